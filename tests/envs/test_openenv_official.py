"""OpenEnv's own clients and validator accept what we serve; OpenEnv's own servers are worlds of ours."""

import asyncio
import json
import os
import socket
import subprocess
import time
import urllib.request
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from troupe.envs import registry
from troupe.envs.check import check
from troupe.envs.drive import Driver
from troupe.envs.openenv.serve import serving
from troupe.protocol.errors import BadArguments, EnvironmentFailed, InvalidAction

PEER = str(Path(__file__).with_name("openenv_peer.py"))
PYTHON = os.environ.get("TROUPE_OPENENV_PYTHON") or str(Path(__file__).parents[2] / ".venv-openenv/bin/python")

pytestmark = [
    pytest.mark.openenv,
    pytest.mark.slow,
    pytest.mark.xdist_group("openenv"),
    pytest.mark.skipif(
        not Path(PYTHON).exists(),
        reason="OpenEnv's own package wants a venv of its own: make test-openenv makes it and runs this",
    ),
]


async def peer(*arguments, module=()):
    """What the program prints. It runs in OpenEnv's own interpreter."""
    process = await asyncio.create_subprocess_exec(
        PYTHON, *(module or (PEER,)), *arguments, stdout=subprocess.PIPE, stderr=subprocess.PIPE
    )
    out, err = await asyncio.wait_for(process.communicate(), 280)
    assert process.returncode == 0, err.decode()[-3_000:] + out.decode()
    return out.decode()


@contextmanager
def official(name, sessions=64):
    """The address of OpenEnv's own server with one of the peer's environments."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([PYTHON, PEER, "serve", str(port), name, str(sessions)], stderr=subprocess.PIPE)
    try:
        for _ in range(1_200):
            if process.poll() is not None:
                raise AssertionError(process.stderr.read().decode()[-3_000:])
            with socket.socket() as trial:
                if trial.connect_ex(("127.0.0.1", port)) == 0:
                    break
            time.sleep(0.1)
        yield f"ws://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.communicate(timeout=60)


@pytest.mark.parametrize("name", ["guess", "stockroom"])
async def test_openenvs_validator_passes_what_we_serve(name):
    async with serving(registry.find(name), {}) as url:
        said = await peer("validate", "--url", url, "--json", "--timeout", "60", module=("-m", "openenv.cli"))
        report = json.loads(said)
        assert report["passed"] and all(one["passed"] for one in report["criteria"]), report
        assert report["mode"] == "simulation" and report["standard_profile"] == "openenv-http/1.x"


async def test_openenvs_clients_play_a_hundred_episodes_unchanged():
    async with serving(registry.find("guess"), {}, sessions=9) as url:
        first, second = map(json.loads, (await peer("drive", url, "100")).splitlines())
        played = first["async"]
        assert [seed for seed, *_ in played] == list(range(100))
        assert all(success == (reward > 0) and 1 <= steps <= 5 for _, reward, success, steps in played)
        assert sum(success for _, _, success, _ in played) > 90, "who halves the range needs five guesses for twenty numbers"
        assert second["sync"] == played[3] and "VALIDATION_ERROR" in second["refused"]
        async with httpx.AsyncClient(trust_env=False) as http:
            assert (await http.get(f"{url}/health")).json()["active_sessions"] == 0


async def test_openenvs_mcp_client_lists_and_calls_our_tools():
    async with serving(registry.find("stockroom"), {}, sessions=1) as url:
        told = json.loads(await peer("call", url))
        assert told["tools"] == ["find_item", "stock"] and told["found"].startswith("A")
        assert told["count"].isdigit() and told["wrong"] == "invalid_args" and told["steps"] == 3
        local = Driver(registry.make(registry.find("stockroom"), {}))
        assert await local.reset(registry.find("stockroom").task("train", 5)) == told["opened"]


# -- their servers -----------------------------------------------------------------------------------------------------


@contextmanager
def world_of(name, sessions=64):
    with official(name, sessions) as url:
        yield registry.find(f"openenv:{url}"), url


def driven(world, play):
    async def run():
        driver = Driver(registry.make(world, {}), timeout_s=60.0)
        try:
            await driver.reset(world.task("train", 7))
            return await play(driver)
        finally:
            await driver.close()

    return asyncio.run(run())


def live(url):
    """Environments of the server that are not closed."""
    for _ in range(200):
        with urllib.request.urlopen(url.replace("ws", "http", 1) + "/live", timeout=60) as told:
            if (count := int(told.read())) == 0:
                break
        time.sleep(0.05)
    return count


def test_a_hundred_episodes_on_openenvs_server_leave_no_world_behind():
    with world_of("lines") as (world, url):
        report = check(world, episodes=5)
        assert report.ok, str(report)

        async def hundred():
            async def one(number):
                driver = Driver(registry.make(world, {}), timeout_s=60.0)
                try:
                    assert await driver.reset(world.task("train", number)) == f"seed {2 * number}"
                    turns = [await driver.step(f"say {turn}") for turn in range(3)]
                    return turns[-1]
                finally:
                    await driver.close()

            return [t for first in range(0, 100, 10) for t in await asyncio.gather(*(one(first + n) for n in range(10)))]

        turns = asyncio.run(hundred())
        assert [turn.text for turn in turns] == [f"3 say 2 {2 * number}" for number in range(100)]
        assert all((turn.reward, turn.done) == (1.0, True) for turn in turns)
        assert live(url) == 0


def test_an_environment_that_raises_on_openenvs_server_breaks_the_episode():
    with world_of("lines") as (world, _), pytest.raises(EnvironmentFailed, match="it is broken"):
        driven(world, lambda driver: driver.step("break"))


def test_openenvs_server_that_is_full_breaks_the_episode():
    with world_of("lines", sessions=1) as (world, _):

        async def two(driver):
            other = Driver(registry.make(world, {}), timeout_s=60.0)
            try:
                await other.reset(world.task("train", 0))
            finally:
                await other.close()

        with pytest.raises(EnvironmentFailed, match="is full"):
            driven(world, two)
        assert driven(world, lambda driver: driver.step("x")).text == "1 x 14"


def test_a_list_of_words_and_an_object_are_read_from_the_message():
    with world_of("colours") as (world, _):
        assert "red, green, dark blue" in world.system
        assert driven(world, lambda driver: driver.step("I like Dark Blue.")).text == "1 dark blue"
        with pytest.raises(InvalidAction):
            driven(world, lambda driver: driver.step("purple"))
    with world_of("pairs") as (world, _):
        assert "JSON" in world.system
        turn = driven(world, lambda driver: driver.step('{"x": 3, "y": 4}'))
        assert (turn.text, turn.reward) == ('{"cells":[3,4]}', 7.0)
        with pytest.raises(InvalidAction, match="x"):
            driven(world, lambda driver: driver.step('{"x": "three", "y": 4}'))


def test_tools_of_an_mcp_environment_are_the_agents():
    with world_of("till") as (world, _):

        async def play(driver):
            assert [tool["name"] for tool in driver.tools()] == ["echo_message", "add"]
            with pytest.raises(BadArguments):
                await driver.call("add", {"a": "x"})
            with pytest.raises(InvalidAction, match="call one of the tools"):
                await driver.step("42")
            return (await driver.call("echo_message", {"message": "hé"})).text, (await driver.call("add", {"a": 2})).text

        assert driven(world, play) == ("hé", "3")
