"""A small stage for the laws of the rollout: the real dispatcher, pools, router, generators and store, in virtual time.

A seed draws everything that goes wrong (`plots.py`): worlds that break, hang and lie, messages that are late or lost, actors
that die between any two events. Director, learner and evaluator are played by `Stage` in few lines. What happened is written
down as a `Run`, by the actors themselves (`watched.py`), and each law is a check of finished runs: `@every_seed` makes a test
of one. A seed that fails is replayed with

    TROUPE_SEED=1234 pytest tests/laws/test_exactly_once.py

which prints the trace of its events; the same seed gives the same trace, in any process.
"""

from __future__ import annotations

import asyncio
import functools
import os
import random
import tempfile
from collections import Counter
from collections.abc import Awaitable, Callable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.laws.plots import SEED, Plot, Trouble, drawn
from tests.laws.watched import Troubled, WatchedEngine, WatchedPool, WatchedStore
from troupe.actors import dispatcher as dispatching
from troupe.actors.context import within
from troupe.actors.dispatcher import Dispatcher
from troupe.actors.elastic import drain
from troupe.actors.env_pool import EnvPool
from troupe.actors.generator import Generator
from troupe.actors.simulated import Simulation
from troupe.actors.store import Store
from troupe.envs import registry
from troupe.protocol import arrow, stored
from troupe.protocol.checksum import checksum_of
from troupe.protocol.errors import ActorLost, CheckpointError, NotReady, Overloaded, TimedOut, TroupeError
from troupe.protocol.messages import (
    Announce,
    CommitGroup,
    Deposit,
    DispatcherStatus,
    Drain,
    Evaluate,
    Evaluated,
    Fence,
    GetBatch,
    Limits,
    Ping,
    Pools,
    Receipt,
    Routes,
    RunEpisode,
    Sampling,
    Weights,
)
from troupe.protocol.trajectory import Task, Trajectory

QUICK, BLOCK = 250, 50
SLOW, SLOW_BLOCK = 2_000, 250
EVALUATION = Sampling(temperature=0.5, max_tokens=4)
_PASSING = (ActorLost, NotReady, Overloaded, TimedOut)


@dataclass
class Run:
    """A finished run. What the store accepted and refused is in the order in which it happened.

    dispatched: the attempts that reached a pool. sampled: (prompt, tokens, versions, logprobs). batches: (id, attempt) of
    each row, for each time that a step's batch was asked for. written: what the store answered, in order: a deposit and
    its receipt, or a fence or commit that it acknowledged. worlds_left, deposits_left: in pools and store that live in the
    end, when nothing is on its way any more.
    """

    plot: Plot
    trace: list[str] = field(default_factory=list)
    dispatched: list[RunEpisode] = field(default_factory=list)
    sampled: set[tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], bytes]] = field(default_factory=set)
    written: list[tuple[Deposit, Receipt] | Fence | CommitGroup] = field(default_factory=list)
    batches: dict[int, list[list[tuple[str, int]]]] = field(default_factory=dict)
    evaluated: list[Evaluated] = field(default_factory=list)
    crashes: list[tuple[float, str]] = field(default_factory=list)
    in_flight: Counter[str] = field(default_factory=Counter)
    most_in_flight: int = 0
    most_deposits: int = 0
    lives: Counter[str] = field(default_factory=Counter)
    rows: list[Trajectory] = field(default_factory=list)
    groups: list[stored.Group] = field(default_factory=list)
    status: DispatcherStatus | None = None
    worlds_left: int = 0
    deposits_left: int = 0
    broken: str = ""
    seconds: float = 0.0

    @property
    def training(self) -> set[int]:
        """Numbers of the groups that train."""
        return {group.group for group in self.groups if group.trains}

    def trained(self, step: int) -> list[Trajectory]:
        """What the store holds for training on `step`, in the order of a batch."""
        found = [t for t in self.rows if t.group in self.training and t.step == step and t.status == "completed"]
        return sorted(found, key=lambda t: t.id)

    def life(self, attempt: int) -> int:
        """Which dispatcher, counted from 0, an attempt is of."""
        return attempt // dispatching._ATTEMPTS


class Stage:
    """Plays a plot."""

    def __init__(self, plot: Plot, model_folder: Path) -> None:
        self.plot, self.model_folder = plot, model_folder
        self.dice = random.Random(f"worlds/{plot.seed}")
        self.run = Run(plot)
        self.worlds: list[Troubled] = []
        self.resets = 0
        self.seen: Counter[int] = Counter()
        self.alive: set[str] = set()
        self.draining: set[str] = set()
        self.proved: dict[str, int] = {}
        self.version = -1
        self.limits = Limits(max_turns=8, episode_s=30.0, env_step_s=3.0, generate_s=15.0)
        self.weights: Weights | None = None
        self.liar, self.loads, self.sampled = 0.0, [], []  # type: ignore[var-annotated]  # what an engine wants to know and say
        self.summing_s = 0.0

    def play(self) -> Run:
        """Runs to the end: all steps trained, all evaluations heard, nothing in flight, or the run is broken."""
        run = self.run
        with (
            tempfile.TemporaryDirectory() as folder,
            pytest.MonkeyPatch.context() as patch,
            Simulation(self.plot.seed, self.plot.chaos) as self.simulation,
        ):
            # A simulated crash never takes the machine down: what was written is read back without syncing the disk.
            patch.setattr(os, "fsync", lambda descriptor: None)
            patch.setitem(
                registry.BUILT_IN, Troubled.name, f"{Troubled.__module__}:Troubled"
            )  # found without looking at what is installed
            patch.setattr(dispatching, "_OPEN_EPISODES", self.plot.room)
            self.folder = folder
            self.simulation.run(self._lead, limit_s=5_000.0)
            run.seconds = self.simulation.loop.moment
            run.crashes = list(self.simulation.crashes)
            run.rows = arrow.from_table(stored.committed(folder).drop_columns(["trains"]))
            run.groups = stored.manifest(folder).groups
        return run

    # -- worlds and events -------------------------------------------------------------------------------------------

    def trouble(self, task: Task) -> tuple[Trouble, int]:
        """The trouble that an attempt at `task` meets, and in which turn."""
        plot, turn = self.plot, self.dice.randint(1, self.plot.turns)
        self.resets += 1
        if self.resets in plot.script:
            return plot.script[self.resets]
        if random.Random(f"{plot.seed}/{task.id}").random() < plot.troubles.get("data", 0.0):
            return "data", 0
        left = self.dice.random()
        for trouble, chance in plot.troubles.items():
            left -= chance if trouble != "data" else 0.0
            if left < 0:
                return trouble, turn
        return "", 0

    def note(self, who: str, what: str) -> None:
        """Writes down an event. The crashes that wait for it happen before anything else does."""
        run, loop = self.run, self.simulation.loop
        run.trace.append(f"{loop.moment:9.4f} {who}: {what}")
        for number, (kind, at, victim) in enumerate(self.plot.crashes):
            self.seen[number] += kind in what
            if kind in what and self.seen[number] == at:
                loop.call_soon(self._crash, who if victim == "it" else victim)

    def _crash(self, who: str) -> None:
        if self.simulation.crash(who):
            self.note("chaos", f"{who} dies")

    # -- director, company, learner and evaluator --------------------------------------------------------------------

    async def _lead(self, context: Any) -> None:
        self.context = context
        self.dispatcher, self.store = context.ref("dispatcher", Dispatcher), context.ref("store", Store)
        self.weights = self._weights(0)
        work = [asyncio.ensure_future(self._supervise(name)) for name in self.plot.names]
        work.append(asyncio.ensure_future(self._keep_informed()))
        work += [asyncio.ensure_future(self._drain(*asked)) for asked in self.plot.drains]
        work += [asyncio.ensure_future(self._retire(*asked)) for asked in self.plot.retired]
        evaluations = [asyncio.ensure_future(self._evaluate(*asked)) for asked in self.plot.evaluations]
        try:
            await self._publish(0)
            for step in range(1, self.plot.steps + 1):
                await self._batch(step)
                await asyncio.sleep(self.dice.uniform(0.0, 0.5))
                if self.plot.settings.mode == "one-step-off" and step < self.plot.steps:
                    await self._batch(step + 1)
                await self._publish(step)
            await asyncio.gather(*evaluations)
            await self._settle()
            for step in range(1, self.plot.steps + 1):
                await self._batch(step)
        except _Broken as error:
            self.run.broken = str(error)
        for task in (*work, *evaluations):
            task.cancel()
        await asyncio.gather(*work, *evaluations, return_exceptions=True)

    async def _supervise(self, name: str) -> None:
        """Puts a new actor in the place of each that dies."""
        while True:
            with suppress(*_PASSING):
                await self._start(name)
                self.run.lives[name] += 1
                self.alive.add(name)
                self.note(name, "lives")
                await self.context.watch(name)
                self.alive.discard(name)
                self.proved.pop(name, None)
            await asyncio.sleep(0.2)

    async def _start(self, name: str) -> None:
        spawn, plot = self.context.spawn, self.plot
        if name == "store":
            await spawn(name, WatchedStore, stage=self, max_deposits=2 * plot.room)
        elif name == "dispatcher":
            await spawn(
                name,
                Dispatcher,
                world=Troubled.name,
                settings=plot.settings,
                limits=self.limits,
                steps=plot.steps,
                seed=SEED,
                incarnation=self.run.lives[name],
            )
        elif name.startswith("env-"):
            await spawn(name, WatchedPool, stage=self)
        else:
            await spawn(
                name,
                Generator,
                make_engine=lambda name: WatchedEngine(name, self),  # type: ignore[arg-type]
                in_flight=plot.settings.in_flight,
                finish_s=7.5,
            )

    def _of(self, kind: str) -> list[str]:
        return sorted(name for name in self.alive if name.startswith(kind))

    def _ending_pools(self) -> list[str]:
        return sorted(name for name in self.draining if name.startswith("env-"))

    def _weights(self, version: int) -> Weights:
        tensors = {"w": np.full(2, version, np.int32)}
        return Weights(version, checksum_of(tensors), self.context.blobs.put(tensors))

    async def _publish(self, version: int) -> None:
        self.weights = self._weights(version)
        while True:
            await asyncio.gather(*(self._prove(name) for name in self._of("generator-")))
            if version in self.proved.values():
                break
            await asyncio.sleep(0.1)
        self.version = version
        self.note("director", f"announces version {version}")
        await self._inform()

    async def _prove(self, name: str) -> None:
        assert self.weights is not None
        wanted, life = self.weights.version, self.run.lives[name]
        with suppress(*_PASSING, CheckpointError):  # the last: a newer version was there before
            held = await within(20.0, name, self.context.ref(name, Generator).load_weights(self.weights))
            if held.version == wanted and life == self.run.lives[name] and name in self.alive:
                self.proved[name] = wanted

    async def _keep_informed(self) -> None:
        while True:
            await asyncio.sleep(2.0)
            if self.weights is not None:
                late = [
                    n for n in sorted(self.alive) if n.startswith("generator-") and self.proved.get(n) != self.weights.version
                ]
                await asyncio.gather(*(self._prove(name) for name in late))
                await self._inform()

    async def _inform(self) -> None:
        """Says again whatever may have been lost, as the company does."""
        assert self.weights is not None
        pools = self._of("env-")
        slots = dict.fromkeys((pool for pool in pools if pool not in self.draining), self.plot.slots)
        proved = {name for name, version in self.proved.items() if version == self.weights.version}
        routes = Routes(sorted(proved - self.draining))
        calls: list[Awaitable[Any]] = [self.context.ref(pool, EnvPool).routes(routes) for pool in pools]
        calls.append(self.dispatcher.pools(Pools(slots, self._ending_pools())))
        if self.version >= 0:
            calls.append(self.dispatcher.announce(Announce(self.version)))
        for answer in await asyncio.gather(*(within(60.0, "it", call) for call in calls), return_exceptions=True):
            if isinstance(answer, BaseException) and not isinstance(answer, _PASSING):
                raise answer

    async def _drain(self, after: float, name: str, limit_s: float) -> None:
        async def left() -> int | None:
            slots = dict.fromkeys((pool for pool in self._of("env-") if pool not in self.draining), self.plot.slots)
            with suppress(*_PASSING):
                heard = await within(60.0, "it", self.dispatcher.pools(Pools(slots, self._ending_pools())))
                return heard.left.get(name)
            return None

        await asyncio.sleep(after)
        self.draining.add(name)
        self.note(name, "drains")
        await drain(self.context, name, left, limit_s)
        self.note(name, "is drained")
        self.draining.discard(name)

    async def _retire(self, after: float, name: str) -> None:
        await asyncio.sleep(after)
        self.draining.add(name)
        self.note(name, "hands over")
        await self._inform()
        for _ in range(40):
            with suppress(*_PASSING):
                health = await within(10.0, "it", self.context.ref(name, Generator).drain(Drain(now=True)))
                if health.load == 0:
                    break
            await asyncio.sleep(0.1)
        await self.context.kill(name)
        self.draining.discard(name)

    async def _batch(self, step: int) -> None:
        """Asks for a batch until it is there."""
        while True:
            with suppress(*_PASSING):
                batch = await within(
                    60.0, "store.batch", self.store.batch(GetBatch(step, self.plot.settings.groups_per_step, wait_s=2.0))
                )
                if batch.trajectories is not None:
                    table = await self.context.blobs.get(batch.trajectories)
                    rows = table.select(["id", "attempt"]).to_pylist()
                    self.run.batches.setdefault(step, []).append([(row["id"], row["attempt"]) for row in rows])
                    self.note("learner", f"has the batch of step {step}: {len(rows)} trajectories")
                    return
            await self._hear()
            await asyncio.sleep(0.1)

    async def _evaluate(self, after: float, tasks: int, trials: int) -> None:
        await asyncio.sleep(after)
        asked = [Troubled.task("heldout", index) for index in range(tasks)]
        while True:
            with suppress(*_PASSING):
                message = Evaluate("e", max(0, self.version), asked, trials, EVALUATION, self.limits, seed=7)
                self.run.evaluated.append(await within(600.0, "dispatcher.evaluate", self.dispatcher.evaluate(message)))
                self.note("evaluator", "has its scores")
                return
            await asyncio.sleep(0.5)

    async def _hear(self) -> DispatcherStatus | None:
        try:
            self.run.status = await within(30.0, "dispatcher.status", self.dispatcher.status(Ping()))
        except _PASSING:
            return None
        except TroupeError as error:
            raise _Broken(str(error)) from error
        return self.run.status

    async def _settle(self) -> None:
        """Waits until no group is on its way and every actor lives, then looks at what the pools have left."""
        while True:
            await asyncio.sleep(1.0)
            actors = {name: actor.instance for name, actor in self.simulation.actors.items() if actor.instance is not None}
            pools = {name: pool for name, pool in actors.items() if name.startswith("env-")}
            quiet = set(self.plot.names) <= actors.keys() and not actors["dispatcher"]._groups
            if quiet and not any(pool._running for pool in pools.values()) and await self._hear() is not None:
                break
        self.run.worlds_left = sum(world.pool in pools.values() for world in self.worlds)
        self.run.deposits_left = len(actors["store"]._deposits)


class _Broken(Exception):
    """The dispatcher has called the run broken."""


@functools.cache
def played(seed: int, model_folder: Path) -> Run:
    """The finished run of `seed`; all laws look at the same one."""
    return Stage(drawn(seed), model_folder).play()


def _blocks(quick: int, block_size: int, slow: int) -> list[Any]:
    if only := os.environ.get("TROUPE_SEED"):
        return [pytest.param([int(only)], id=only)]

    def block(first: int, size: int, *marks: Any) -> Any:
        # A block's seeds are played once, by the process that checks all laws on them.
        group = pytest.mark.xdist_group(f"rollouts-{first}")
        return pytest.param(range(first, first + size), id=f"{first}-{first + size - 1}", marks=[group, *marks])

    blocks = [block(first, block_size) for first in range(0, quick, block_size)]
    return blocks + [block(first, SLOW_BLOCK, pytest.mark.slow) for first in range(quick, quick + slow, SLOW_BLOCK)]


def every_seed_of(
    play: Callable[[int, Path], Run], quick: int, block_size: int, slow: int
) -> Callable[[Callable[[Run], None]], Callable[..., None]]:
    """Makes tests of checks that must hold of the run of every seed. A seed that fails says how to replay it."""

    def decorate(law: Callable[[Run], None]) -> Callable[..., None]:
        @pytest.mark.parametrize("seeds", _blocks(quick, block_size, slow))
        def test(seeds: Any, model_folder: Path, request: pytest.FixtureRequest) -> None:
            for seed in seeds:
                try:
                    run = play(seed, model_folder)
                    if len(seeds) == 1:
                        print(*run.trace, sep="\n")
                    law(run)
                except Exception as error:
                    file = request.path.relative_to(request.config.rootpath)
                    error.add_note(f"seed {seed}; replay it with: TROUPE_SEED={seed} pytest {file}")
                    raise

        test.__name__, test.__doc__ = law.__name__, law.__doc__
        return test

    return decorate


every_seed = every_seed_of(played, QUICK, BLOCK, SLOW)
