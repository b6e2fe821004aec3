"""Worlds whose place is a sandbox or a server that is killed under them: episodes break and say so, slots recover."""

from __future__ import annotations

import asyncio
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

import pytest

from tests.actors.test_dying_worlds import assert_nothing_left, dies, held, settled
from tests.actors.test_many_episodes import Here
from troupe.actors.env_pool import EnvPool
from troupe.envs import calls, registry, sandbox
from troupe.envs.base import Task, TextWorld, Turn
from troupe.envs.sandbox import SandboxSettings
from troupe.learner.tiny import make_tiny
from troupe.protocol.messages import Limits, Ping, Rehearse, Rehearsed

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1_800)]
LIMITS = Limits(max_turns=3, env_step_s=60.0)


def children(pid: int) -> set[int]:
    """Child processes that have not been waited for."""
    return set(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))


class Boxed(TextWorld):
    """A sandbox an episode. In one of ten it is killed from outside: while nothing runs in it, or in the middle of a run."""

    inline: ClassVar[bool] = True

    async def reset(self, task: Task) -> str:
        self.dies = self.rng.random() < 0.1
        self.box = await sandbox.open(SandboxSettings(backend="bubblewrap"))
        return "go"

    async def step(self, text: str) -> Turn:
        (pid,) = children(self.box._channel._process.pid)  # type: ignore[attr-defined]  # process 1 of the sandbox
        if self.dies and self.rng.random() < 0.5:
            os.kill(pid, signal.SIGKILL)
        elif self.dies:
            asyncio.get_running_loop().call_later(0.3, os.kill, pid, signal.SIGKILL)
        said = await self.box.run(code=f"import time; time.sleep({10 * self.dies}); print(1)")
        return Turn(said.stdout.decode(), reward=1.0, done=True)

    async def close(self) -> None:  # type: ignore[override]
        await self.box.close()

    def play(self, rng: random.Random, noise: float) -> str:
        return "go"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("tiny"), ["go on"], hidden=16, layers=1, heads=2))


class Playing:
    """A pool with `slots`, as full as it may be."""

    def __init__(self, world: str, model: str, slots: int) -> None:
        here: Any = Here()
        self.world, self.free = registry.find(world), asyncio.Semaphore(slots)
        self.pool = EnvPool(here, world, {}, model, slots=slots)

    async def one(self, seed: int) -> Rehearsed:
        async with self.free:
            return await self.pool.rehearse(Rehearse(self.world.task("train", seed), seed, LIMITS))

    async def all(self, seeds: range) -> list[Rehearsed]:
        return await asyncio.gather(*map(self.one, seeds))

    async def assert_free(self) -> None:
        health = await self.pool.health(Ping())
        assert (health.load, health.detail["stuck"], calls.stuck()) == (0, 0, 0)


async def test_sandboxes_that_are_killed_break_their_episodes_and_leave_nothing(model: str) -> None:
    if why := sandbox.missing("bubblewrap"):
        pytest.skip(why)
    playing = Playing(f"{Path(__file__).resolve()}:Boxed", model, slots=20)
    await playing.all(range(20))
    before, born = held(), children(os.getpid())
    done = await playing.all(range(200))
    assert [bool(one.failure) for one in done] == [random.Random(f"train/{seed}").random() < 0.1 for seed in range(200)]
    assert all("sandbox" in one.failure or one.reward == 1.0 for one in done)
    assert_nothing_left(before, await settled(held, before))
    assert children(os.getpid()) == born
    await playing.assert_free()


@contextmanager
def serving(port: int) -> Iterator[subprocess.Popen[str]]:
    """`Dying` as an OpenEnv server in a process of its own."""
    world = f"{Path(__file__).with_name('test_dying_worlds.py').resolve()}:Dying"
    command = [sys.executable, "-m", "troupe", "env", "serve", world, "--port", str(port), "--sessions", "1000"]
    process = subprocess.Popen([*command, "--timeout", "10"], stdout=subprocess.PIPE, text=True)
    try:
        for _ in range(1_200):
            with socket.socket() as there:
                if there.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None, "the server has ended"
            time.sleep(0.1)
        yield process
    finally:
        process.kill()
        process.communicate()


async def test_a_server_of_a_thousand_worlds_of_which_one_in_ten_dies_and_which_is_killed_itself(model: str) -> None:
    """What the server has after the first thousand, it has after the second. Killed, it takes the episodes with it and not the
    slots; when there is one again, episodes go on."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with serving(port) as server:
        playing = Playing(f"openenv:ws://127.0.0.1:{port}", model, slots=250)
        await playing.all(range(1_000))
        await asyncio.sleep(16.0)  # a `close` that hangs has the time of a call, and is then killed
        there, here = held(server.pid), held()
        done = await playing.all(range(1_000))
        assert [bool(one.failure) for one in done] == [dies(seed) for seed in range(1_000)]
        assert_nothing_left(there, await settled(lambda: held(server.pid), there))
        assert_nothing_left(here, await settled(held, here))
        await playing.assert_free()

        ends = asyncio.ensure_future(playing.all(range(1_000, 2_000)))
        while (await playing.pool.health(Ping())).latency["openenv_dying"]["step"].count < 2_200:
            await asyncio.sleep(0.01)
        server.send_signal(signal.SIGKILL)
        told = [one.failure for one in await ends if one.failure]
        assert len(told) > 300 and all("127.0.0.1" in why or "dead" in why or "Dying" in why for why in told)
        assert_nothing_left(here, await settled(held, here))
        await playing.assert_free()
    with serving(port):
        alive = [seed for seed in range(2_000, 2_100) if not dies(seed)]
        assert {one.failure for one in await asyncio.gather(*map(playing.one, alive))} == {""}
