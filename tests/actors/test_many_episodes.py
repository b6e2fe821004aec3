"""Thousands of episodes at once: none is lost, no pool is overfilled, and when they are over nothing is left of them."""

from __future__ import annotations

import asyncio
import gc
import os
import random
import threading
import weakref
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest

from troupe.actors import env_pool
from troupe.actors.dispatcher import Dispatcher
from troupe.actors.env_pool import EnvPool
from troupe.actors.generator import Generator
from troupe.actors.host import WallClock
from troupe.actors.recorder import Recorder
from troupe.actors.settings import RolloutSettings
from troupe.actors.simulated import Chaos, Simulation
from troupe.actors.store import Store
from troupe.envs.base import Task, TextWorld, Turn
from troupe.envs.drive import Driver
from troupe.learner.tiny import make_tiny
from troupe.protocol.checksum import checksum_of
from troupe.protocol.messages import (
    Ack,
    Announce,
    CancelEpisode,
    Deposit,
    EndSession,
    Generate,
    Generated,
    GetBatch,
    GetCommitted,
    Limits,
    Ping,
    Pools,
    Receipt,
    Routes,
    RunEpisode,
    Sampling,
    Weights,
)

GROUP = 8
ANSWER = [10, 11, 12, 2]
"""A turn; 2 is <|im_end|>."""


class FixedEngine:
    """Always says the same, with the newest weights that there will ever be."""

    version = -1

    async def start(self) -> None:
        return

    async def load_weights(self, version: int, tensors: Any) -> str:
        self.version = version
        return checksum_of(tensors)

    async def generate(self, request: Generate) -> Generated:
        n = len(ANSWER)
        return Generated(np.asarray(ANSWER, np.int32), np.zeros(n, np.float32), np.full(n, self.version, np.int32), "stop")

    async def end_session(self, session: str) -> None:
        return


@dataclass
class Watched:
    """Every recorder and every driver that a pool makes."""

    alive: weakref.WeakSet[Any] = field(default_factory=weakref.WeakSet)
    made: int = 0

    def left(self) -> list[Any]:
        gc.collect()
        return list(self.alive)


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Watched:
    seen = Watched()

    def watching(cls: type[Any]) -> type[Any]:
        class Seen(cls):  # type: ignore[misc]
            def __init__(self, *arguments: Any, **named: Any) -> None:
                super().__init__(*arguments, **named)
                seen.alive.add(self)
                seen.made += 1

        return Seen

    monkeypatch.setattr(env_pool, "Recorder", watching(Recorder))
    monkeypatch.setattr(env_pool, "Driver", watching(Driver))
    return seen


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("tiny"), ["echo train 0 1 2 3 4 5 6 7 8 9"], hidden=16, layers=1, heads=2))


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)


@dataclass
class Rollouts:
    """Dispatcher, store, two pools and two generators in a simulation, led by the least of a director."""

    simulation: Simulation
    episodes: int
    slots: dict[str, int]
    peak: dict[str, int] = field(default_factory=dict)

    async def start(self, context: Any, folder: Path, model: str, options: dict[str, Any], **settings: Any) -> None:
        self.context = context
        rollout = RolloutSettings(
            groups_per_step=self.episodes // GROUP, group_size=GROUP, max_staleness=0, max_tokens=8, **settings
        )
        await context.spawn("store", Store, folder=str(folder))
        await context.spawn(
            "dispatcher", Dispatcher, world="echo", settings=rollout, limits=Limits(), steps=9, seed=0, incarnation=0
        )
        generators = ["generator-0", "generator-1"]
        for name in generators:
            await context.spawn(name, Generator, make_engine=lambda name: FixedEngine())
            await context.ref(name, Generator).load_weights(Weights(1_000, checksum_of({}), context.blobs.put({})))
        for name, slots in self.slots.items():
            await context.spawn(name, EnvPool, world="echo", options=options, model_folder=model, slots=slots)
            await context.ref(name, EnvPool).routes(Routes(generators))
        await context.ref("dispatcher", Dispatcher).pools(Pools(self.slots))

    async def wave(self, step: int) -> int:
        """The episodes of one training step. Returns how many of them are trained."""
        await self.context.ref("dispatcher", Dispatcher).announce(Announce(step - 1))
        asking = asyncio.ensure_future(
            self.context.ref("store", Store).batch(GetBatch(step, self.episodes // GROUP, wait_s=3_600.0))
        )
        while not asking.done():
            for name in self.slots:
                health = await self.context.ref(name, EnvPool).health(Ping())
                self.peak[name] = max(health.load, self.peak.get(name, 0))
            await asyncio.wait({asking}, timeout=0.2)
        await asyncio.sleep(60.0)  # replies that are still on their way
        return int(asking.result().count)

    def sizes(self) -> dict[str, int]:
        """How much each container of pools and dispatcher holds."""
        dispatcher = self.simulation.actors["dispatcher"].instance
        carrier = dispatcher._carrier
        owners = {"dispatcher": dispatcher, "dispatcher.quota": dispatcher._quota, "dispatcher.carrier": carrier}
        owners["dispatcher.permits"] = carrier.permits
        for name in self.slots:
            owners |= {name: (pool := self.simulation.actors[name].instance), f"{name}.router": pool._router}
        for number in range(2):
            owners[f"generator-{number}"] = self.simulation.actors[f"generator-{number}"].instance
        return {
            f"{owner}.{attribute}": len(value)
            for owner, thing in owners.items()
            for attribute, value in vars(thing).items()
            if hasattr(value, "__len__") and not isinstance(value, (str, type))
        }


def test_two_thousand_episodes_at_once_all_end_in_the_store_and_leave_nothing_behind(
    tmp_path: Path, model: str, watched: Watched
) -> None:
    """More are wanted than there are slots: every slot is used, and none twice."""
    episodes, slots = 2_400, {"env-0": 1_000, "env-1": 1_000}
    with Simulation(0, Chaos(delay=(0.0005, 0.005), slow=0.0)) as simulation:
        rollouts = Rollouts(simulation, episodes, slots)

        async def main(context: Any) -> None:
            await rollouts.start(context, tmp_path, model, {"turns": 2, "sleep": 1.0})
            assert await rollouts.wave(1) == episodes
            known = await context.ref("store", Store).committed(GetCommitted())
            assert (known.completed, known.failed, known.cancelled) == (episodes, 0, 0)

        simulation.run(main)
        assert rollouts.peak == slots
        assert watched.made == 2 * episodes
        assert watched.left() == []
        sizes = rollouts.sizes()
        assert sizes["env-0._running"] == sizes["env-0.router._home"] == sizes["dispatcher._groups"] == 0
        assert simulation.actors["dispatcher"].instance._carrier.permits._used.total() == 0


@pytest.mark.parametrize("on_failure", ["retry", "drop-episode", "drop-group"])
def test_what_the_actors_hold_does_not_grow_from_step_to_step(
    tmp_path: Path, model: str, watched: Watched, on_failure: str
) -> None:
    """Worlds break, messages are slow, episodes are retried, dropped and replaced: nothing of them stays behind."""
    with Simulation(1) as simulation:
        rollouts = Rollouts(simulation, 64, {"env-0": 20, "env-1": 30})
        sizes = []

        async def main(context: Any) -> None:
            await rollouts.start(
                context, tmp_path, model, {"turns": 3, "sleep": 0.5, "fail": 0.01}, on_failure=on_failure, attempts=2
            )
            for step in (1, 2, 3, 4):
                await rollouts.wave(step)
                sizes.append(rollouts.sizes())
            known = await context.ref("store", Store).committed(GetCommitted())
            assert known.failed > 0
            assert known.completed + known.failed + known.cancelled >= 4 * 64

        simulation.run(main)
        assert all(peak <= rollouts.slots[name] for name, peak in rollouts.peak.items())
        assert watched.left() == []
        assert sizes[3] == sizes[0]


class Meeting(TextWorld):
    """Nobody's step returns before all `guests` are in theirs."""

    name: ClassVar[str] = "meeting"
    guests: ClassVar[int] = 0
    arrived: ClassVar[int] = 0
    threads: ClassVar[int] = 0
    all_here: ClassVar[asyncio.Event]

    async def reset(self, task: Task) -> str:
        return "wait for the others"

    async def step(self, text: str) -> Turn:
        cls = type(self)
        cls.arrived += 1
        if cls.arrived == cls.guests:
            cls.threads = threading.active_count()
            cls.all_here.set()
        await cls.all_here.wait()
        return Turn("", reward=1.0, done=True)


class Here:
    """A context whose messages are plain calls: the engine, and a store that counts."""

    name, executor, clock, rng = "env-0", None, WallClock(), random.Random(0)

    def __init__(self) -> None:
        self.stored: list[str] = []

    def ref(self, name: str, cls: type[Any]) -> Any:
        return self

    async def generate(self, message: Generate) -> Generated:
        return await FixedEngine().generate(message)

    async def end_session(self, message: EndSession) -> Ack:
        return Ack()

    async def deposit(self, message: Deposit) -> Receipt:
        self.stored.append(message.trajectory.id)
        return Receipt(True)


async def test_a_thousand_worlds_that_wait_cost_a_pool_no_threads(model: str, watched: Watched) -> None:
    """On a real event loop: all are in the middle of their step at the same moment."""
    Meeting.guests, Meeting.arrived, Meeting.all_here = 1_000, 0, asyncio.Event()
    here: Any = Here()
    pool = EnvPool(here, f"{__name__}:Meeting", {}, model, slots=1_000)
    await pool.routes(Routes(["generator-0"]))
    limits = Limits(env_step_s=500.0)
    before = threading.active_count()
    done = await asyncio.gather(
        *(
            pool.run_episode(
                RunEpisode(f"e{n}", 0, 0, n, "train", 1, Task(str(n), "meeting", "train", n), Sampling(max_tokens=8), limits, n)
            )
            for n in range(1_000)
        )
    )
    assert {end.status for end in done} == {"completed"}
    assert sorted(here.stored) == sorted(f"e{n}" for n in range(1_000))
    assert Meeting.threads <= before
    assert (await pool.health(Ping())).load == 0
    assert watched.left() == []


@pytest.mark.parametrize("turns_of_the_loop", range(40))
async def test_an_episode_that_is_cancelled_at_any_moment_still_says_how_it_ended(model: str, turns_of_the_loop: int) -> None:
    """Before its first await, in its middle, while its record is on its way: never an exception that nobody can read."""

    class Slow(Here):
        async def deposit(self, message: Deposit) -> Receipt:
            for _ in range(10):
                await asyncio.sleep(0)
            return await super().deposit(message)

    here: Any = Slow()
    pool = EnvPool(here, "echo", {"turns": 2}, model, slots=1)
    await pool.routes(Routes(["generator-0"]))
    episode = RunEpisode("e", 0, 0, 0, "train", 1, Task("0", "echo", "train", 0), Sampling(max_tokens=8), Limits(), 0)
    running = asyncio.ensure_future(pool.run_episode(episode))
    for _ in range(turns_of_the_loop):
        await asyncio.sleep(0)
    await pool.cancel(CancelEpisode("e", 0))
    done = await running
    assert done.status in ("completed", "cancelled") and done.stored
    assert here.stored == ["e"]
