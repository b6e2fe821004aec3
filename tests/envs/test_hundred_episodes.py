"""A hundred episodes of each world of somebody else's, in a real pool: none breaks, slots come back, nothing is left.

First by who knows how (the scripted player where there is one), then by who talks nonsense. Threads, descriptors, child
processes, memory and temporary files are compared with what there was once the world had been warm.
"""

import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import urllib.request
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.actors.test_dying_worlds import assert_nothing_left, held, settled
from tests.actors.test_many_episodes import Here
from tests.envs import test_mcp_tools as till
from tests.envs.test_openenv_official import PYTHON, official, peer
from troupe.actors.env_pool import EnvPool
from troupe.envs import calls, registry, sandbox
from troupe.envs.base import ToolCall
from troupe.envs.mcp_tools import McpTools
from troupe.learner.tiny import make_tiny
from troupe.protocol.messages import Generate, Generated, Limits, Ping, Rehearse, Routes, RunEpisode, Sampling

EPISODES, WARM, SLOTS = 100, 10, 5
NO_OPENENV = "OpenEnv's own package wants a venv of its own: make test-openenv makes it"
LIMITS = Limits(max_turns=12, env_step_s=120.0)

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1_800)]


@dataclass
class Case:
    """reward: of each episode that the player plays. server: whose process is watched too. nonsense: episodes of it."""

    world: str
    options: dict[str, Any] = field(default_factory=dict)
    reward: float = 1.0
    server: int = 0
    nonsense: int = EPISODES


class Till(till.Till):
    """Two coins and one are put in, by tools of an MCP server, and counted."""

    def __init__(self, url=""):
        super().__init__(McpTools(url=url) if url else McpTools(sys.executable, till.SERVER))

    async def reset(self, task):
        self.acts = 0
        return await super().reset(task)

    def play(self, rng, noise):
        self.acts += 1
        return [ToolCall("add", {"amount": 2}), ToolCall("add", {"amount": 1}), ToolCall("refuse", {}), "3"][self.acts - 1]


class Babbler(Here):
    """What an untrained policy says: any tokens, and sometimes no end."""

    def __init__(self) -> None:
        super().__init__()
        self.chance = random.Random(0)

    async def generate(self, message: Generate) -> Generated:
        said = [self.chance.randrange(4, 40) for _ in range(self.chance.randint(0, 6))] + list(message.sampling.stop_ids[:1])
        n = len(said)
        return Generated(np.asarray(said, np.int32), np.zeros(n, np.float32), np.zeros(n, np.int32), "stop", "generator-0")


@contextmanager
def installed(module, world, **options):
    if find_spec(module) is None:
        pytest.skip(f"the package {module} is missing: pip install 'troupe-rl[{module.replace('_', '-')}]'")
    yield Case(world, options)


@contextmanager
def in_bubblewrap():
    if why := sandbox.missing("bubblewrap"):
        pytest.skip(why)
    with installed("skyrl_gym", "skyrl_gym:lcb", sandbox={"backend": "bubblewrap"}) as case:
        yield case


@contextmanager
def over_stdio():
    pytest.importorskip("mcp", reason="needs mcp: pip install 'troupe-rl[mcp]'")
    yield Case(f"{Path(__file__).resolve()}:Till", nonsense=WARM)  # a process an episode


@contextmanager
def over_http():
    pytest.importorskip("mcp", reason="needs mcp: pip install 'troupe-rl[mcp]'")
    with till.served() as (url, pid):
        yield Case(f"{Path(__file__).resolve()}:Till", {"url": url}, server=pid)


@contextmanager
def of_openenv(name, reward):
    if not Path(PYTHON).exists():
        pytest.skip(NO_OPENENV)
    with official(name) as url:
        yield Case(f"openenv:{url}", reward=reward, server=owner_of(url))
        with urllib.request.urlopen(url.replace("ws", "http", 1) + "/live", timeout=60) as told:
            assert int(told.read()) == 0, "a world of the server was not closed"


CASES = {
    "reasoning-gym, arithmetic": partial(installed, "reasoning_gym", "reasoning_gym:basic_arithmetic"),
    "reasoning-gym, words": partial(installed, "reasoning_gym", "reasoning_gym:spell_backward"),
    "skyrl-gym, one turn": partial(installed, "skyrl_gym", "skyrl_gym:gsm8k"),
    "skyrl-gym, three turns": partial(installed, "skyrl_gym", "skyrl_gym:gsm8k_multi_turn", turns=3),
    "skyrl-gym, programs": in_bubblewrap,
    "TextWorld": partial(installed, "textworld", "textworld", rooms=2, objects=3, quest=2, games=20),
    "MCP over stdio": over_stdio,
    "MCP over HTTP": over_http,
    "OpenEnv's server": partial(of_openenv, "lines", 1.0),
    "OpenEnv's server, tools": partial(of_openenv, "till", 0.0),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return str(make_tiny(tmp_path_factory.mktemp("tiny"), ["a b c the 1 2 3 take open go"], hidden=16, layers=1, heads=2))


@pytest.fixture
def temporary(tmp_path, monkeypatch):
    """The folder where this process and its children put temporary files."""
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


def children():
    """Child processes of this one that have not been waited for."""
    return set(Path(f"/proc/self/task/{os.getpid()}/children").read_text().split())


def owner_of(url):
    """The child of this process that listens there."""
    port = url.rpartition(":")[2]
    return next(int(pid) for pid in children() if port in Path(f"/proc/{pid}/cmdline").read_text().split("\0"))


@pytest.mark.xdist_group("openenv")
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.openenv] if "OpenEnv" in name else []) for name in CASES]
)
async def test_a_hundred_episodes_in_a_pool_break_nothing_and_leave_nothing(name, model, temporary):
    with CASES[name]() as case:
        world, there = registry.find(case.world), Babbler()
        pool: EnvPool = EnvPool(there, case.world, case.options, model, slots=SLOTS)  # type: ignore[arg-type]
        await pool.routes(Routes(["generator-0"]))

        async def played(number):
            return await pool.rehearse(Rehearse(world.task("train", number), number, LIMITS))

        async def babbled(number):
            task = world.task("heldout", number)
            ask = RunEpisode(f"e{number}", 0, 0, number, "train", 1, task, Sampling(max_tokens=8), LIMITS, number)
            return await pool.run_episode(ask)

        async def all_of(one, numbers):
            free = asyncio.Semaphore(SLOTS)

            async def in_turn(number):
                async with free:
                    return await one(number)

            return await asyncio.gather(*map(in_turn, numbers))

        await all_of(played, range(WARM))
        await all_of(babbled, range(WARM))
        before, born, files = held(), children(), set(temporary.iterdir())
        servers = held(case.server) if case.server else None

        ends = await all_of(played, range(WARM, WARM + EPISODES))
        assert [end.failure for end in ends if end.failure] == []
        assert {round(end.reward, 6) for end in ends} == {case.reward}
        ends = await all_of(babbled, range(WARM, WARM + case.nonsense))
        assert [end.failure for end in ends if end.status != "completed"] == []
        assert sorted(there.stored) == sorted(f"e{number}" for number in range(WARM + case.nonsense)), "each has one record"

        health = await pool.health(Ping())
        assert (health.load, health.detail["stuck"], calls.stuck(), health.detail["late"]) == (0, 0, 0, "")
        assert_nothing_left(before, await settled(held, before))
        assert children() == born and set(temporary.iterdir()) == files
        if servers:
            assert_nothing_left(servers, await settled(lambda: held(case.server), servers))


@pytest.fixture
def serving(temporary):
    """(address, process id) of `troupe env serve`."""
    serve = [sys.executable, "-m", "troupe", "env", "serve", "guess", "--port", "0", "--sessions", "9"]
    process = subprocess.Popen(serve, stdout=subprocess.PIPE, text=True, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    try:
        yield process.stdout.readline().split(" at ")[1].split()[0], process.pid
    finally:
        process.terminate()
        process.communicate(timeout=60)


@pytest.mark.openenv
@pytest.mark.xdist_group("openenv")
@pytest.mark.skipif(not Path(PYTHON).exists(), reason=NO_OPENENV)
def test_a_hundred_episodes_of_openenvs_client_leave_nothing_in_our_server(serving, temporary):
    url, pid = serving
    asyncio.run(peer("drive", url, str(WARM)))
    before, files = held(pid), set(temporary.iterdir())
    played = json.loads(asyncio.run(peer("drive", url, str(EPISODES))).splitlines()[0])["async"]
    assert len(played) == EPISODES and sum(success for _, _, success, _ in played) > 0.9 * EPISODES
    assert_nothing_left(before, asyncio.run(settled(lambda: held(pid), before)))
    assert set(temporary.iterdir()) == files
    with urllib.request.urlopen(f"{url}/health", timeout=60) as told:
        assert json.loads(told.read())["active_sessions"] == 0
