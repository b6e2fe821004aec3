"""A served world speaks OpenEnv's wire: episodes, errors by code, tools, and an end to every session."""

import asyncio
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import asynccontextmanager, suppress

import httpx
import pytest
from websockets.asyncio.client import connect
from websockets.exceptions import ConnectionClosed

from troupe.envs import registry
from troupe.envs.base import TextWorld, Turn
from troupe.envs.openenv.serve import serve, serving
from troupe.envs.tools import ToolWorld, tool
from troupe.protocol.errors import ConfigError

OPEN: list[object] = []
"""Worlds that have begun an episode and are not closed."""


class Counter(TextWorld):
    """Counts to three."""

    system = "Say a number."
    max_turns = 5

    def __init__(self, hang: bool = False):
        self.hang = hang

    def reset(self, task):
        OPEN.append(self)
        self.count = 0
        return f"start {self.rng.random()}"

    def step(self, text):
        if text == "hang":
            while True:
                time.sleep(0.01)
        if text == "break":
            raise RuntimeError("it is broken")
        if not text.isdigit():
            raise ValueError("say a number")
        self.count += 1
        return Turn(f"{self.count} {text}", reward=0.5, done=self.count == 3, parts={"half": 0.5})

    def state_key(self):
        return str(self.count)

    def close(self):
        if self in OPEN:
            OPEN.remove(self)


class Till(ToolWorld):
    """Counts coins."""

    max_turns = 3

    def reset(self, task):
        self.coins = self.rng.randint(1, 9)
        return "How many coins?"

    @tool
    def count(self, of: str) -> int:
        """Count the coins."""
        if of != "coins":
            raise ValueError("there are only coins")
        return self.coins

    def verify(self):
        return self.answer == str(self.coins)


@asynccontextmanager
async def served(world=Counter, **options):
    """(url, ask) of a served world: `ask` opens a socket, whose function sends one frame and gives its answer."""
    async with serving(world, {}, **options) as url:

        @asynccontextmanager
        async def client(path="/ws"):
            async with connect(url.replace("http", "ws") + path, proxy=None, open_timeout=60) as socket:

                async def ask(kind, data=None, raw=None):
                    with suppress(ConnectionClosed):  # what a server said before it closed can still be read
                        await socket.send(raw or json.dumps({"type": kind} if data is None else {"type": kind, "data": data}))
                    return json.loads(await asyncio.wait_for(socket.recv(), 20))

                yield ask

        yield url, client


async def test_a_seed_and_a_split_begin_the_same_episode_again():
    async with served() as (_, client), client() as one, client() as two:
        a, b = await one("reset", {"seed": 4}), await two("reset", {"seed": 4, "split": "train"})
        assert a == b and a["type"] == "observation"
        assert a["data"]["reward"] is None and a["data"]["done"] is False
        seen = a["data"]["observation"]
        assert (seen["seed"], seen["split"], seen["state_key"]) == (4, "train", "0")
        assert seen["metadata"]["system"] == "Say a number." and seen["metadata"]["task"]["id"] == "train/4"
        assert (await one("reset", {"seed": 4, "split": "heldout"}))["data"]["observation"]["text"] != seen["text"]
        assert (await one("reset", {"seed": 5}))["data"]["observation"]["text"] != seen["text"]
        free = [(await client_("reset"))["data"]["observation"]["seed"] for client_ in (one, two, one)]
        assert len(set(free)) == 3, "without a seed it is always a task that nobody has had"


async def test_an_episode_is_told_step_by_step():
    async with served() as (_, client), client() as ask:
        await ask("reset", {"seed": 1, "episode_id": "mine"})
        first = (await ask("step", {"message": "<think>hm</think>7"}))["data"]
        assert (first["observation"]["text"], first["reward"], first["done"]) == ("1 7", 0.5, False)
        assert first["observation"]["parts"] == {"half": 0.5} and first["observation"]["state_key"] == "1"
        told = (await ask("step", {"message": "seven"}))["data"]
        assert told["observation"]["error"] == {"error_type": "invalid_action", "message": "say a number"}
        assert (told["observation"]["text"], told["reward"], told["done"]) == ("Invalid action: say a number", 0.0, False)
        await ask("step", {"message": "8"})
        last = (await ask("step", {"message": "9"}))["data"]
        assert last["done"] and last["observation"]["success"] is True and last["observation"]["truncated"] is False
        state = (await ask("state"))["data"]
        assert (state["episode_id"], state["step_count"], state["reward"], state["done"]) == ("mine", 4, 1.5, True)
        over = await ask("step", {"message": "1"})
        assert over["data"]["code"] == "EXECUTION_ERROR" and "reset" in over["data"]["message"]
        assert (await ask("reset", {"seed": 1}))["type"] == "observation"


async def test_turns_that_are_used_up_end_the_episode_with_the_worlds_verdict():
    async with served() as (_, client), client() as ask:
        await ask("reset")
        told = [(await ask("step", {"message": "no number"}))["data"] for _ in range(5)]
        assert [one["done"] for one in told] == [False] * 4 + [True]
        assert told[-1]["observation"]["truncated"] and told[-1]["observation"]["success"] is False
        await ask("reset", {"max_turns": 1})
        assert (await ask("step", {"message": "1"}))["data"]["observation"]["truncated"]
    async with served(Till) as (_, client), client() as ask:
        await ask("reset", {"max_turns": 1})
        cut = (await ask("step", {"tool_name": "count", "arguments": {"of": "coins"}}))["data"]
        assert cut["done"] and cut["observation"]["parts"] == {"outcome": 0.0} and cut["observation"]["success"] is False


@pytest.mark.parametrize(
    ("frame", "code"),
    [
        ("{", "INVALID_JSON"),
        ("[" * 100_000, "INVALID_JSON"),
        ("[1]", "VALIDATION_ERROR"),
        ('{"type": "fly"}', "UNKNOWN_TYPE"),
        ("{}", "UNKNOWN_TYPE"),
        ('{"type": "step", "data": {}}', "VALIDATION_ERROR"),
        ('{"type": "step", "data": {"message": 7}}', "VALIDATION_ERROR"),
        ('{"type": "step", "data": {"message": "7", "more": 1}}', "VALIDATION_ERROR"),
        ('{"type": "step", "data": "7"}', "VALIDATION_ERROR"),
        ('{"type": "reset", "data": {"seed": -1}}', "VALIDATION_ERROR"),
        ('{"type": "reset", "data": {"split": "test"}}', "VALIDATION_ERROR"),
        ('{"type": "step", "data": {"message": "break"}}', "EXECUTION_ERROR"),
    ],
)
async def test_what_is_no_request_has_its_code_and_the_session_lives(frame, code):
    async with served() as (_, client), client() as ask:
        await ask("reset", {"seed": 0})
        told = await ask("", raw=frame)
        assert told["type"] == "error" and told["data"]["code"] == code and told["data"]["message"], told
        assert (await ask("reset", {"seed": 0}))["type"] == "observation"
        assert (await ask("step", {"message": "1"}))["data"]["reward"] == 0.5


async def test_a_world_that_hangs_is_named_and_replaced_at_the_next_reset():
    async with served(step_s=0.3) as (_, client), client() as ask:
        await ask("reset", {"seed": 2})
        told = (await ask("step", {"message": "hang"}))["data"]
        assert told["code"] == "EXECUTION_ERROR" and "Counter.step (task train/2, seed 2)" in told["message"], told
        again = (await ask("step", {"message": "1"}))["data"]
        assert again["code"] == "EXECUTION_ERROR" and "reset" in again["message"]
        await ask("reset", {"seed": 2})
        assert (await ask("step", {"message": "1"}))["data"]["reward"] == 0.5


async def test_one_world_a_socket_and_no_more_than_there_are_sessions():
    OPEN.clear()
    async with served(sessions=2) as (url, client):
        async with client() as one, client() as two:
            await one("reset", {"seed": 1})
            await two("reset", {"seed": 1})
            assert len(OPEN) == 2
            await one("step", {"message": "1"})
            assert (await two("step", {"message": "2"}))["data"]["observation"]["text"] == "1 2"
            async with client() as three:
                full = (await three("reset"))["data"]
            assert (full["code"], full["active_sessions"], full["max_sessions"]) == ("CAPACITY_REACHED", 2, 2)
            async with httpx.AsyncClient(base_url=url, trust_env=False) as http:
                assert (await http.post("/reset")).status_code == 503
        for _ in range(200):
            if not OPEN:
                break
            await asyncio.sleep(0.02)
        assert not OPEN, "worlds are closed when their sockets go"
        async with client() as again:
            assert (await again("reset"))["type"] == "observation"


async def test_a_silent_client_is_sent_away():
    async with served(idle_s=0.2) as (_, client), client() as ask:
        await ask("reset")
        told = await asyncio.wait_for(ask("", raw=" "), 20)  # answered at once: this one is bad, not late
        assert told["data"]["code"] == "INVALID_JSON"
        await asyncio.sleep(0.5)
        assert (await ask("state"))["data"]["code"] == "SESSION_ERROR"
        with pytest.raises(ConnectionClosed):
            await ask("state")


async def test_tools_are_called_listed_and_refused_as_mcp_environments_do():
    async with served(Till) as (_, client), client() as ask:
        opened = (await ask("reset", {"seed": 3}))["data"]["observation"]
        assert opened["metadata"]["tools"][0]["name"] == "count" and "tools" not in opened
        listed = (await ask("step", {"type": "list_tools"}))["data"]["observation"]["tools"]
        assert listed[0]["input_schema"]["required"] == ["of"]
        seen = (await ask("step", {"type": "call_tool", "tool_name": "count", "arguments": {"of": "coins"}}))["data"]
        assert seen["observation"]["tool_name"] == "count" and seen["observation"]["result"] == seen["observation"]["text"]
        for name, arguments, kind in (
            ("cuont", {}, "tool_not_found"),
            ("count", {}, "invalid_args"),
        ):
            error = (await ask("step", {"tool_name": name, "arguments": arguments}))["data"]["observation"]["error"]
            assert error["error_type"] == kind and error["message"]
        await ask("reset", {"seed": 3})
        done = (await ask("step", {"message": seen["observation"]["result"]}))["data"]
        assert done["done"] and done["reward"] == 1.0 and done["observation"]["success"] is True
        await ask("reset", {"seed": 3})
        ended = (await ask("step", {"type": "end"}))["data"]
        assert ended["done"] and ended["reward"] == 0.0


async def test_mcp_over_the_socket_and_over_http_with_and_without_a_session():
    def call(method, **params):
        return {"jsonrpc": "2.0", "id": 1, "method": method, "params": params}

    async with served(Till, sessions=1) as (url, client), httpx.AsyncClient(base_url=url, trust_env=False) as http:

        async def rpc(method, **params):
            return (await http.post("/mcp", json=call(method, **params))).json()

        assert (await http.post("/mcp", json={})).json()["error"]["code"] == -32600
        assert (await http.post("/mcp", content=b"{")).json()["error"]["code"] == -32700
        assert (await rpc("fly"))["error"]["code"] == -32601
        assert (await rpc("tools/list"))["result"]["tools"][0]["inputSchema"]["required"] == ["of"]
        session = (await rpc("openenv/session/create"))["result"]["session_id"]
        assert (await rpc("openenv/session/create"))["error"]["data"]["max_sessions"] == 1
        async with client(f"/ws?session_id={session}") as ask:
            await ask("reset", {"seed": 3})
            counted = (await rpc("tools/call", session_id=session, name="count", arguments={"of": "coins"}))["result"]
            assert counted["data"] == counted["content"][0]["text"] and not counted["isError"]
            refused = (await rpc("tools/call", session_id=session, name="count", arguments={"of": "x"}))["result"]
            assert refused["isError"] and "only coins" in refused["data"]
            assert (await ask("state"))["data"]["step_count"] == 2
            assert (await ask("mcp", call("tools/list")))["data"]["result"]["tools"]
        assert (await rpc("openenv/session/close", session_id=session))["result"]["closed"]
        assert (await rpc("openenv/session/close", session_id=session))["error"]["code"] == -32602
        async with client("/mcp") as ask:
            assert (await ask("", raw=json.dumps(call("tools/list"))))["result"]["tools"]


async def test_a_session_that_is_held_by_name_only_is_closed_when_nobody_asks():
    async with served(Till, idle_s=0.2) as (url, _), httpx.AsyncClient(base_url=url, trust_env=False) as http:
        await http.post("/mcp", json={"jsonrpc": "2.0", "id": 1, "method": "openenv/session/create"})
        for _ in range(200):
            if not (await http.get("/health")).json()["active_sessions"]:
                return
            await asyncio.sleep(0.02)
        raise AssertionError("the session is still there")


async def test_http_tells_what_the_world_is_and_plays_a_first_step():
    async with served() as (url, _), httpx.AsyncClient(base_url=url, trust_env=False) as http:
        assert (await http.get("/health")).json()["status"] == "healthy"
        metadata = (await http.get("/metadata")).json()
        assert (metadata["name"], metadata["description"]) == ("Counter", "Counts to three.")
        schema = (await http.get("/schema")).json()
        assert schema["action"]["required"] == ["message"] and schema["action"]["x-troupe"]["system"] == "Say a number."
        assert {"/reset", "/step", "/state", "/mcp"} <= set((await http.get("/openapi.json")).json()["paths"])
        assert (await http.post("/reset", json={"seed": 1})).json()["observation"]["seed"] == 1
        assert (await http.post("/step", json={"action": {"message": "1"}})).json()["reward"] == 0.5
        assert (await http.post("/step", json={"action": {}})).status_code == 422
        assert (await http.post("/step", json={"action": {"message": "break"}})).status_code == 500
        assert (await http.get("/state")).json()["step_count"] == 0


async def test_a_hundred_episodes_leave_nothing_behind():
    OPEN.clear()
    async with served() as (_, client):
        files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
        for number in range(100):
            async with client() as ask:
                await ask("reset", {"seed": number})
                for _ in range(number % 4):
                    await ask("step", {"message": "1"})
        for _ in range(200):
            if not OPEN and threading.active_count() <= threads and len(os.listdir("/proc/self/fd")) <= files:
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"{len(OPEN)} worlds, {threading.active_count() - threads} threads more, files {files} before")


def test_ctrl_c_ends_it_and_its_sessions():
    command = [sys.executable, "-m", "troupe", "env", "serve", "guess", "--port", "0", "--set", "high=30"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    try:
        url = next(word for word in process.stdout.readline().split() if word.startswith("http"))

        async def play():
            async with connect(url.replace("http", "ws") + "/ws", proxy=None) as socket:
                await socket.send('{"type":"reset"}')
                assert "between 1 and 30" in await socket.recv()
                process.send_signal(signal.SIGINT)
                await asyncio.wait_for(socket.wait_closed(), 30)

        asyncio.run(play())
        out, err = process.communicate(timeout=30)
        assert process.returncode == 0 and "Stopped." in out and err == ""
    finally:
        process.kill()
        process.communicate()


@pytest.mark.parametrize(
    ("arguments", "says"),
    [({"port": 70_000}, "0 (any free one) to 65535"), ({"host": "no.such.host.invalid"}, "--host"), ({"port": None}, "--port")],
)
def test_a_door_that_cannot_be_opened_is_told_at_once(arguments, says):
    import socket

    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        if arguments.get("port", 0) is None:
            arguments = {"port": taken.getsockname()[1]}
        with pytest.raises(ConfigError, match=r"port|host") as error:
            serve(registry.find("guess"), {}, **arguments)
        assert says in str(error.value)


def test_wrong_options_are_told_before_anything_starts():
    with pytest.raises(ConfigError, match="high"):
        serve(registry.find("guess"), {"high": 3}, port=0)
