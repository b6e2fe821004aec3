"""A dispatcher, a real store and pools that misbehave on purpose, in the simulation: the stage of the tests of dispatching."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from troupe.actors.dispatcher import Dispatcher
from troupe.actors.settings import RolloutSettings
from troupe.actors.simulated import Chaos, Simulation
from troupe.actors.store import Store
from troupe.protocol import arrow
from troupe.protocol.errors import ActorLost, NotReady, Overloaded, TimedOut
from troupe.protocol.messages import (
    Ack,
    Announce,
    CancelEpisode,
    Deposit,
    DispatcherStatus,
    EpisodeDone,
    Evaluate,
    Evaluated,
    GetBatch,
    Limits,
    Ping,
    Pools,
    RunEpisode,
    Sampling,
)
from troupe.protocol.stored import committed
from troupe.protocol.trajectory import ENVIRONMENT, POLICY, Failure, Node, Step, Task, Trajectory


@dataclass
class Act:
    """What a pool does with an attempt, after `seconds`. `lost`: its end is stored and nobody hears of it."""

    how: Literal["complete", "fail", "data", "refuse", "starting", "die", "hang", "drop"] = "complete"
    reward: float = 1.0
    seconds: float = 1.0
    why: str = "the sandbox is gone"
    lost: bool = False


Plan = Callable[[RunEpisode, str], Act]


@dataclass
class Company:
    """A dispatcher, a real store and stand-in pools, led by the least of a director. What happened lies in its lists."""

    folder: Path
    plan: Plan = lambda message, pool: Act()
    settings: dict[str, Any] = field(default_factory=dict)
    pools: int = 2
    slots: int = 4
    steps: int = 2
    world: str = "echo"
    limits: Limits = field(default_factory=lambda: Limits(episode_s=60.0))
    chaos: Chaos | None = None
    crashes: int = 0
    heeds_cancel: bool = True
    max_deposits: int = 10_000
    started: list[tuple[str, RunEpisode]] = field(default_factory=list)
    cancelled: list[CancelEpisode] = field(default_factory=list)
    ended: list[tuple[float, str]] = field(default_factory=list)
    live: Counter[str] = field(default_factory=Counter)
    peak: int = 0
    took: float = 0.0
    batches: dict[int, list[Trajectory]] = field(default_factory=dict)
    status: DispatcherStatus | None = None

    @property
    def rollout(self) -> RolloutSettings:
        return RolloutSettings.model_validate({"groups_per_step": 2, "group_size": 3, **self.settings})

    def play(self, work: Callable[[Company, Any], Awaitable[Any]] | None = None, seed: int = 0) -> Any:
        """Trains `steps` steps, or does `work`, and then waits until nothing is in flight."""
        with Simulation(seed, self.chaos) as simulation:

            async def main(context: Any) -> Any:
                self.context = context
                company = [asyncio.ensure_future(self._supervise(name)) for name in ("store", *self._names())]
                killer = asyncio.ensure_future(self._kill(simulation, seed))
                while not {"store", *self._names()} <= set(simulation.actors):
                    await asyncio.sleep(0.1)
                company.append(asyncio.ensure_future(self._supervise("dispatcher")))
                company.append(asyncio.ensure_future(self._inform()))
                result = await (work or train)(self, context)
                await killer
                await self.settled()
                self.took = asyncio.get_running_loop().time()
                for task in company:
                    task.cancel()
                return result

            return simulation.run(main)

    def _names(self) -> list[str]:
        return [f"env-{number}" for number in range(self.pools)]

    async def _supervise(self, name: str) -> None:
        """Puts a new actor in the place of each that dies."""
        for life in range(1000):
            try:
                if name == "store":
                    await self.context.spawn(name, Store, folder=str(self.folder), max_deposits=self.max_deposits)
                elif name == "dispatcher":
                    await self.context.spawn(
                        name,
                        Dispatcher,
                        world=self.world,
                        settings=self.rollout,
                        limits=self.limits,
                        steps=self.steps,
                        seed=1,
                        incarnation=life,
                    )
                else:
                    await self.context.spawn(name, Pool, company=self)
            except (ActorLost, NotReady, TimedOut):
                await asyncio.sleep(0.1)
                continue
            await self.context.watch(name)
            self.live.pop(name, None)
            await asyncio.sleep(0.5)

    version: int = 0

    async def _inform(self) -> None:
        """As the company does: tells the dispatcher again and again which pools live, and the version."""
        dispatcher = self.context.ref("dispatcher", Dispatcher)
        while True:
            try:
                await dispatcher.pools(Pools(dict.fromkeys(self._names(), self.slots)))
                await dispatcher.announce(Announce(self.version))
            except (ActorLost, NotReady):
                pass
            await asyncio.sleep(2.0)

    async def _kill(self, simulation: Simulation, seed: int) -> None:
        dice = random.Random(seed)
        for _ in range(self.crashes):
            await asyncio.sleep(dice.uniform(0.5, 8.0))
            if simulation.actors:
                simulation.crash(dice.choice(sorted(simulation.actors)))

    async def hear(self) -> DispatcherStatus | None:
        try:
            self.status = await self.context.ref("dispatcher", Dispatcher).status(Ping())
        except (ActorLost, NotReady):
            return None
        return self.status

    async def settled(self) -> None:
        """Waits until the dispatcher has had nothing in flight for long enough to have heard of its last commit."""
        quiet = 0
        while quiet < 20:
            await asyncio.sleep(1.0)
            status = await self.hear()
            quiet = quiet + 1 if status is not None and not status.in_flight else 0

    async def batch(self, step: int) -> list[Trajectory]:
        store = self.context.ref("store", Store)
        while True:
            try:
                batch = await store.batch(GetBatch(step, self.rollout.groups_per_step, wait_s=1.0))
                if batch.trajectories is not None:
                    return arrow.from_table(await self.context.blobs.get(batch.trajectories))
            except (ActorLost, NotReady):
                await asyncio.sleep(0.1)
            await self.hear()

    async def evaluate(self, tasks: list[Task], trials: int = 1) -> Evaluated:
        while await self.hear() is None:
            await asyncio.sleep(0.1)
        return await self.context.ref("dispatcher", Dispatcher).evaluate(
            Evaluate("e", self.version, tasks, trials, Sampling(temperature=0.5), self.limits, seed=3)
        )

    def rows(self) -> list[dict[str, Any]]:
        return committed(self.folder).to_pylist()

    def groups(self) -> dict[int, list[dict[str, Any]]]:
        found: dict[int, list[dict[str, Any]]] = {}
        for row in self.rows():
            found.setdefault(row["group"], []).append(row)
        return found


async def train(company: Company, context: Any) -> None:
    """The learner's part: takes batch after batch."""
    for step in range(1, company.steps + 1):
        company.batches[step] = await company.batch(step)
        company.version = step
        with suppress(ActorLost, NotReady):
            await context.ref("dispatcher", Dispatcher).announce(Announce(step))


class Pool:
    """Keeps the contract of a pool, and does what the plan says."""

    def __init__(self, context: Any, company: Company) -> None:
        self.context, self.company = context, company
        self.running: dict[tuple[str, int], asyncio.Task[EpisodeDone]] = {}

    async def run_episode(self, message: RunEpisode) -> EpisodeDone:
        act = self.company.plan(message, self.context.name)
        if act.how == "refuse":
            raise Overloaded(f"{self.context.name} is full")
        if act.how == "starting":
            raise NotReady(f"{self.context.name} is starting")
        if act.how == "drop":
            raise ActorLost(f"'run_episode' did not reach {self.context.name}")
        self.company.started.append((self.context.name, message))
        task = asyncio.ensure_future(self._episode(message, act))
        self.running[(message.episode, message.attempt)] = task
        self.company.live[self.context.name] += 1
        self.company.peak = max(self.company.peak, self.company.live[self.context.name])
        try:
            return await task
        finally:
            self.company.live[self.context.name] -= 1
            self.company.ended.append((asyncio.get_running_loop().time(), message.episode))
            del self.running[(message.episode, message.attempt)]

    async def cancel(self, message: CancelEpisode) -> Ack:
        if message.episode:
            self.company.cancelled.append(message)
        for (episode, attempt), task in list(self.running.items()):
            if self.company.heeds_cancel and message.episode in ("", episode) and attempt <= message.attempt:
                task.cancel()
        return Ack()

    async def _episode(self, message: RunEpisode, act: Act) -> EpisodeDone:
        status: Any = "completed"
        failure = None
        try:
            await asyncio.sleep(1e9 if act.how == "hang" else act.seconds)
            if act.how == "die":
                self.context.die("out of memory")
                await asyncio.sleep(1e9)
            if act.how in ("fail", "data"):
                status, failure = "failed", Failure("data" if act.how == "data" else "infrastructure", "Broken", act.why, "")
        except asyncio.CancelledError:
            status = "cancelled"
        done = status == "completed"
        trajectory = Trajectory(
            **{name: getattr(message, name) for name in ("attempt", "group", "member", "kind", "step", "task", "seed")},
            id=message.episode,
            status=status,
            stop="terminated" if done else status,
            nodes=[_node()],
            steps=[Step(reward=act.reward)] if done else [],
            reward=act.reward if done else 0.0,
            success=act.reward > 0 if done else None,
            failure=failure,
            pool=self.context.name,
        )
        accepted = False
        for _ in range(60):
            try:
                receipt = await self.context.ref("store", Store).deposit(Deposit(trajectory))
                accepted = receipt.accepted
                break
            except (ActorLost, NotReady, Overloaded):
                await asyncio.sleep(0.5)
        if act.lost:
            raise ActorLost(f"the answer of {self.context.name} was lost")
        return EpisodeDone(
            message.episode,
            message.attempt,
            status,
            trajectory.stop,
            accepted,
            self.context.name,
            trajectory.reward,
            trajectory.success,
            turns=1,
            tokens=1,
            oldest_version=message.min_version,
            failure_kind=failure.kind if failure else "",
            failure=failure.message if failure else "",
        )


def _node() -> Node:
    provenance = np.array([ENVIRONMENT, POLICY], np.uint8)
    return Node(-1, "assistant", -1, np.arange(2, dtype=np.int32), provenance, np.zeros(1, np.float32), np.zeros(1, np.int32))


def ordinal(message: RunEpisode) -> int:
    return message.group % 10_000


def check_emitted(run: Company, crashed: bool = False) -> None:
    """Law 3 and law 6, from what the pools saw and what is in the store. `crashed`: the dispatcher may have died."""
    rows = run.rows()
    assert set(Counter(row["id"] for row in rows).values()) <= {1}, "an episode was stored twice"
    stored, dispatched = {row["id"] for row in rows}, {message.episode for _, message in run.started}
    if not crashed:
        assert dispatched <= stored, "a dispatched episode vanished"
        ended = Counter(row["status"] for row in rows)
        assert run.status is not None
        assert ended == +Counter(completed=run.status.completed, failed=run.status.failed, cancelled=run.status.cancelled), (
            "the counts are not those of the store"
        )
    settings = run.rollout
    for row in rows:
        if row["status"] != "completed":
            assert row["reward"] == 0.0 and row["success"] is None
        assert (row["failure_kind"] is not None) == (row["status"] == "failed")
    trained: Counter[int] = Counter()
    for members in run.groups().values():
        first = members[0]
        assert len({row["trains"] for row in members}) == 1
        if not first["trains"]:
            continue
        assert first["kind"] == "train"
        trained[first["step"]] += 1
        good = [row for row in members if row["status"] == "completed"]
        assert len(members) == settings.group_size
        assert len(good) == len(members) or (settings.on_failure == "drop-episode" and len(good) >= 2)
    assert max(trained.values(), default=0) <= settings.groups_per_step, "a step trains more than its groups"
    for step, batch in run.batches.items():
        assert trained[step] == settings.groups_per_step
        ids = {row["id"] for row in rows if row["trains"] and row["step"] == step and row["status"] == "completed"}
        assert {t.id for t in batch} == ids
