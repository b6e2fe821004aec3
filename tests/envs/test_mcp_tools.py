"""Tools of a real MCP server, over stdio and over HTTP: described, checked, called, and gone when the world is closed."""

import asyncio
import os
import socket
import subprocess
import sys
import time
from contextlib import contextmanager
from pathlib import Path

import pytest

from troupe.envs.base import Task
from troupe.envs.drive import Driver, stuck
from troupe.envs.mcp_tools import McpTools
from troupe.envs.tools import ToolWorld, tool
from troupe.protocol.errors import BadArguments, ConfigError, EnvironmentFailed, InvalidAction, TimedOut, UnknownTool

pytest.importorskip("mcp")
SERVER = str(Path(__file__).with_name("mcp_server.py"))
TASK = Task("train/7", "till", "train", 7)


class Till(ToolWorld):
    def __init__(self, server):
        self.server = server

    async def reset(self, task):
        await self.server.offer(self)
        return "How many coins?"

    @tool
    def own(self) -> str:
        """A tool of the world's own."""
        return "mine"

    def verify(self):
        return self.answer == "3"

    async def close(self):
        await self.server.close()


def stdio(**options):
    return McpTools(sys.executable, SERVER, **options)


def driven(play, server, timeout_s=60.0, world=Till):
    async def run():
        driver = Driver(world(server), timeout_s=timeout_s)
        try:
            await driver.reset(TASK)
            return await play(driver)
        finally:
            await driver.close()

    return asyncio.run(run())


def gone(pid):
    """Whether a process has ended: it is not there, or only its exit status is."""
    for _ in range(200):
        try:
            if Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z":
                return True
            os.kill(pid, 0)
        except (ProcessLookupError, FileNotFoundError):
            return True
        time.sleep(0.05)
    return False


@contextmanager
def served():
    """(address, process id) of the server over HTTP."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([sys.executable, SERVER, str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    try:
        for _ in range(1_200):
            with socket.socket() as there:
                if there.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.05)
        yield f"http://127.0.0.1:{port}/mcp", process.pid
    finally:
        process.kill()
        process.wait(10)


@pytest.fixture(scope="module")
def url():
    with served() as (address, _):
        yield address


def test_tools_of_a_process_are_described_checked_and_called_beside_the_worlds_own_and_it_ends_with_the_world():
    async def play(driver):
        specs = {spec["name"]: spec for spec in driver.tools()}
        assert list(specs) == ["own", "add", "count_coins", "refuse", "wait", "die", "pid"]
        assert specs["add"] == {
            "name": "add",
            "description": "Put coins into the till.",
            "parameters": {
                "type": "object",
                "properties": {
                    "amount": {"type": "integer", "minimum": 1, "description": "coins"},
                    "note": {"type": "string", "default": ""},
                },
                "required": ["amount"],
            },
        }
        assert (await driver.call("own", {})).text == "mine"
        assert (await driver.call("add", {"amount": 2, "note": "self"})).text == "2 coins self"
        assert (await driver.call("add", {"amount": 1})).text == "3 coins"
        assert (await driver.call("count_coins", {})).text == "3"
        with pytest.raises(BadArguments, match="add: argument 'amount': 0 is less than the minimum of 1"):
            await driver.call("add", {"amount": 0})
        with pytest.raises(BadArguments, match="'amount' is a required property"):
            await driver.call("add", {})
        with pytest.raises(UnknownTool, match="Did you mean 'count_coins'"):
            await driver.call("count_coin", {})
        with pytest.raises(InvalidAction, match="the till is locked"):
            await driver.call("refuse", {})
        pid = int((await driver.call("pid", {})).text)
        assert (await driver.step("3")).success is True  # none of the errors has broken the episode
        return pid

    assert gone(driven(play, stdio()))


@pytest.mark.slow
def test_each_episode_has_a_server_of_its_own_unless_told_otherwise():
    async def play(driver):
        first = (await driver.call("pid", {})).text, (await driver.call("add", {"amount": 2})).text
        await driver.reset(TASK)
        return first, ((await driver.call("pid", {})).text, (await driver.call("add", {"amount": 2})).text)

    (one, _), (other, said) = driven(play, stdio())
    assert one != other and said == "2 coins" and gone(int(one)) and gone(int(other))
    (one, _), (other, said) = driven(play, stdio(fresh=False))
    assert one == other and said == "4 coins" and gone(int(one))


@pytest.mark.slow
def test_a_server_that_dies_breaks_the_episode_and_says_nothing_about_the_agent():
    async def play(driver):
        with pytest.raises(EnvironmentFailed, match=r"MCP server .*, tool die: Connection closed"):
            await driver.call("die", {})
        await driver.reset(TASK)  # another episode has a server again
        return (await driver.call("add", {"amount": 5})).text

    assert driven(play, stdio()) == "5 coins"


@pytest.mark.slow
def test_a_call_has_the_worlds_time_and_no_more():
    async def play(driver):
        driver.timeout_s = 1.0
        pid = int((await driver.call("pid", {})).text)
        before = stuck()
        with pytest.raises(TimedOut, match=r"Till.wait .* has not returned for 1 s"):
            await driver.call("wait", {})
        assert stuck() == before
        driver.timeout_s = 60.0
        return pid

    assert gone(driven(play, stdio()))


@pytest.mark.parametrize(
    ("server", "reason"),
    [
        (lambda: McpTools("/nowhere/at/all"), "cannot be used: FileNotFoundError"),
        (lambda: McpTools(sys.executable, "-c", "raise SystemExit('no licence')"), "cannot be used: .*; it wrote: no licence"),
        pytest.param(
            lambda: McpTools(sys.executable, "-c", "import time; time.sleep(60)", connect_s=0.3),
            r"no answer for 0\.3 s",
            marks=pytest.mark.slow,  # the client gives a process 2 s to end by itself
        ),
        (lambda: McpTools(url="http://127.0.0.1:9/mcp"), "cannot be used: .*"),
    ],
)
def test_a_server_that_cannot_be_reached_breaks_the_episode_in_one_line(server, reason):
    async def play(driver):
        raise AssertionError("the episode has begun")

    with pytest.raises(EnvironmentFailed, match=reason) as error:
        driven(play, server())
    assert "\n" not in str(error.value)


@pytest.mark.slow
def test_a_reset_that_takes_too_long_leaves_no_server_behind(tmp_path):
    noted = tmp_path / "pid"
    slow = McpTools(sys.executable, "-c", f"import os, time; open({str(noted)!r}, 'w').write(str(os.getpid())); time.sleep(60)")

    async def play(driver):
        raise AssertionError("the episode has begun")

    with pytest.raises(TimedOut, match=r"Till.reset"):
        driven(play, slow, timeout_s=3.0)
    assert not noted.exists() or gone(int(noted.read_text()))


def test_names_that_clash_need_a_prefix_and_only_some_tools_can_be_offered(url):
    class Both(Till):
        @tool
        def add(self) -> str:
            """Add."""
            return "my own"

    async def names(driver):
        return [spec["name"] for spec in driver.tools()]

    with pytest.raises(EnvironmentFailed, match=r"there is a tool 'add' already: give it a prefix="):
        driven(names, McpTools(url=url), world=Both)
    with pytest.raises(EnvironmentFailed, match=r"has no tool 'ad'. Did you mean 'add'"):
        driven(names, McpTools(url=url, only=["ad"]))
    assert driven(names, McpTools(url=url, prefix="till_", only=["add"]), world=Both) == ["own", "add", "till_add"]


def test_tools_over_http_are_the_same_and_a_server_that_is_gone_breaks_the_episode(url):
    async def play(driver):
        before = int((await driver.call("count_coins", {})).text)
        added = await driver.call("add", {"amount": 3})
        with pytest.raises(InvalidAction, match="the till is locked"):
            await driver.call("refuse", {})
        with pytest.raises(InvalidAction, match="nothing"):  # a refusal in the protocol itself
            await driver.world.server._connection.call("nothing")
        together = await asyncio.gather(driver.call("count_coins", {}), driver.call("own", {}))
        return before, added.text, [turn.text for turn in together]

    before, added, together = driven(play, McpTools(url=url))
    assert added == f"{before + 3} coins" and together == [str(before + 3), "mine"]

    async def die(driver):
        driver.timeout_s = 20.0
        await driver.call("die", {})

    with pytest.raises(EnvironmentFailed, match=r"MCP server http://127\.0\.0\.1"):
        driven(die, McpTools(url=url))


def test_one_source_must_be_given_and_the_package_must_be_there(monkeypatch):
    with pytest.raises(ConfigError, match="one of them"):
        McpTools()
    with pytest.raises(ConfigError, match="one of them"):
        McpTools("till", url="http://127.0.0.1")
    monkeypatch.setattr("troupe.envs.mcp_tools.find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'troupe-rl\[mcp\]'"):
        McpTools("till")
