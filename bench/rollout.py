"""What a turn costs beside the engine and the world: dispatcher, pool, agent loop, recorder, router and store.

    python bench/rollout.py [--quick] [--only CASE] [--profile]

One JSON line a case: {"name", "value", "unit", "compared_with", "context"}. The engine answers every request with the same
32 tokens, the world is `echo`; everything else is what a run has, on real Ray but for `turn_cpu_ms`.

turn_overhead_ms_256: 256 episodes of 8 turns at once, engine and world answer at once. (Seconds of a wave − seconds of the
same requests sent bare) / turns, the median over alternating waves. A wave lasts from the announcement of a version until
the batch of the next step is there, so it has in it whatever an episode costs: permits, the recorder, its deposit, the
commit with its fsync. Bare: as many coroutines in one actor send the same requests to the same generators by the same
messages, and do nothing with the answers. Everything is busy all the time, so this is the throughput that is lost.
turn_latency_ms_256: the same, but an engine takes 1 to 3 s for a turn, so that nothing queues for long. From an answer
leaving the engine to the next request of that episode entering it, as the engine sees it: the median, less that of the
bare calls.
turn_cpu_ms: the pool's part alone: 256 episodes in this process, without Ray, messages and store. CPU time a turn.
episodes_2000: three waves of 2,000 episodes at once in two pools, whose worlds sleep for 5 s in each of 4 turns. Seconds of
a wave (median); how late the turns are, and what the processes hold after each wave.
"""

from __future__ import annotations

import asyncio
import cProfile
import json
import os
import pstats
import random
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import typer

from troupe.actors import rendering
from troupe.actors.dispatcher import Dispatcher
from troupe.actors.env_pool import EnvPool
from troupe.actors.generator import Generator
from troupe.actors.host import RayContext, WallClock
from troupe.actors.settings import RolloutSettings
from troupe.actors.store import Store
from troupe.cluster.launch import ray_session
from troupe.learner.tiny import make_tiny
from troupe.protocol.checksum import checksum_of
from troupe.protocol.messages import (
    Ack,
    Announce,
    Deposit,
    EndSession,
    Generate,
    Generated,
    GetBatch,
    Health,
    Limits,
    Ping,
    Pools,
    Receipt,
    Routes,
    RunEpisode,
    Sampling,
    Weights,
)
from troupe.protocol.trajectory import Task

SAYS = "the board changes and you see a wall to the north and a door to the east of you " * 2
TURNS = 8
GROUP = 8
EPISODES = 256
LIMITS = Limits(max_turns=1_000, max_episode_tokens=1_000_000, env_step_s=300.0)
CASES = ("turn_cpu_ms", "turn_overhead_ms_256", "turn_latency_ms_256", "episodes_2000")


def main(
    quick: bool = typer.Option(False, help="small and short: shows that it works, its figures mean nothing"),
    only: str = typer.Option("", help="the one case to run"),
    profile: bool = typer.Option(False, help="also print to stderr where turn_cpu_ms is spent"),
) -> None:
    if only and only not in CASES:
        raise typer.BadParameter(f"no case '{only}'; known: {', '.join(CASES)}")
    wanted = {only} if only else set(CASES)
    load = round(os.getloadavg()[0], 2)
    with tempfile.TemporaryDirectory() as folder:
        model = str(make_tiny(Path(folder) / "model", [SAYS, "echo train heldout system user assistant 0 1 2 3 4 5 6 7 8 9"]))
        told = rendering.load(model)
        answer = [*told.encode(SAYS), told.stop_ids[0]]
        bench = Bench(Path(folder), model, answer, {"load": load, "cores": os.cpu_count(), "answer_tokens": len(answer)})
        if "turn_cpu_ms" in wanted:
            asyncio.run(bench.turn_cpu(3 if quick else 9, profile))
        if wanted - {"turn_cpu_ms"}:
            with ray_session(None, "bench"):
                asyncio.run(bench.on_ray(wanted, quick))


# -- the engine, and calls without anything around them --------------------------------------------------------------


FRESH = 1_000_000
"""A version as new as any step asks for."""


class FixedEngine:
    """Gives every request the same answer, after `seconds` (drawn by the request's seed between the two).

    gaps: seconds from each answer to the next request of that session.
    """

    def __init__(self, answer: list[int], seconds: tuple[float, float] = (0.0, 0.0)) -> None:
        self.version = -1
        self._tokens = np.asarray(answer, np.int32)
        self._logprobs = np.full(len(answer), -1.0, np.float32)
        self._versions = np.full(len(answer), FRESH, np.int32)
        self._seconds = seconds
        self._answered: dict[str, float] = {}
        self.gaps: list[float] = []
        self.requests: list[Generate] = []
        """The first session's."""

    async def start(self) -> None:
        return

    async def load_weights(self, version: int, tensors: Any) -> str:
        self.version = version
        return checksum_of(tensors)

    async def generate(self, request: Generate) -> Generated:
        before = self._answered.get(request.session)
        if before is not None:
            self.gaps.append(time.monotonic() - before)
        if not self.requests or self.requests[0].session == request.session:
            self.requests.append(request)
        if self._seconds[1]:
            await asyncio.sleep(random.Random(request.seed).uniform(*self._seconds))
        self._answered[request.session] = time.monotonic()
        return Generated(self._tokens, self._logprobs, self._versions, "stop", "fixed")

    async def end_session(self, session: str) -> None:
        self._answered.pop(session, None)

    def forget(self) -> list[float]:
        """The gaps since the last time."""
        found, self.gaps = self.gaps, []
        self._answered.clear()
        return found

    def stats(self) -> dict[str, float]:
        return {}


class Probed(Generator):
    """A generator that also tells its engine's gaps."""

    async def gaps(self, message: Ping) -> Health:
        engine: Any = self._engine
        return Health(self._context.name, os.getpid(), detail={"gaps": engine.forget()})


class Bare:
    """Sends the requests of an episode, for `episodes` of them at once, and does nothing with the answers."""

    def __init__(self, context: Any, requests: list[Generate], episodes: int) -> None:
        self._context, self._requests, self._episodes = context, requests, episodes
        self._generators: list[str] = []

    async def routes(self, message: Routes) -> None:
        self._generators = message.generators

    async def run(self, message: Ping) -> None:
        await asyncio.gather(*(self._episode(number) for number in range(self._episodes)))

    async def _episode(self, number: int) -> None:
        generator = self._context.ref(self._generators[number % len(self._generators)], Generator)
        for turn, request in enumerate(self._requests):
            name = f"bare-{number}"
            await generator.generate(replace(request, request=f"{name}/{turn}", session=name, seed=number * 1_000 + turn))


# -- the rollout side of a run ---------------------------------------------------------------------------------------


@dataclass
class Rollouts:
    """Store, dispatcher and pools on Ray, led by the least of a director. pids: of its actors, by name."""

    context: RayContext
    episodes: int
    pids: dict[str, int] = field(default_factory=dict)
    step: int = 0

    async def spawn(self, name: str, cls: type[Any], **arguments: Any) -> None:
        self.pids[name] = await self.context.spawn(name, cls, **arguments)

    def actor(self, name: str) -> Any:
        return self.context.ref(name, object)

    async def route(self, names: list[str]) -> None:
        for name in self.pids:
            if name.startswith("env-") or name == "bare":
                await self.actor(name).routes(Routes(names))

    async def wave(self) -> float:
        """One training step's episodes, until they are a batch. Returns seconds."""
        self.step += 1
        began = time.perf_counter()
        await self.actor("dispatcher").announce(Announce(self.step - 1))
        batch = await self.actor("store").batch(GetBatch(self.step, self.episodes // GROUP, wait_s=3_600.0))
        seconds = time.perf_counter() - began
        if batch.count != self.episodes:
            raise RuntimeError(f"step {self.step} has {batch.count} trajectories, not {self.episodes}")
        return seconds

    async def bare(self) -> float:
        """The same requests without anything around them. Returns seconds."""
        began = time.perf_counter()
        await self.actor("bare").run(Ping())
        return time.perf_counter() - began

    async def gaps(self, names: list[str]) -> list[float]:
        told = [await self.actor(name).gaps(Ping()) for name in names]
        return [gap for one in told for gap in one.detail["gaps"]]


@dataclass
class Bench:
    """The cases. about: what every line's context ends with."""

    folder: Path
    model: str
    answer: list[int]
    about: dict[str, Any]

    async def on_ray(self, wanted: set[str], quick: bool) -> None:
        if wanted & {"turn_overhead_ms_256", "turn_latency_ms_256"}:
            requests = await self._requests()
            async with self._rollouts("turns", [EPISODES], {"turns": TURNS}) as rollouts:
                await rollouts.spawn("bare", Bare, requests=requests, episodes=EPISODES)
                if "turn_overhead_ms_256" in wanted:
                    await self.turn_overhead(rollouts, 3 if quick else 15)
                if "turn_latency_ms_256" in wanted:
                    await self.turn_latency(rollouts, (0.1, 0.3) if quick else (1.0, 3.0), 1 if quick else 2)
        if "episodes_2000" in wanted:
            await self.episodes(*(2, 100, 0.5) if quick else (2, 1_000, 5.0))

    async def turn_cpu(self, repetitions: int, profile: bool) -> None:
        pool, _ = self._pool()
        await pool.routes(Routes(["generator"]))

        async def wave(name: str) -> float:
            began = time.process_time()
            await asyncio.gather(*(pool.run_episode(self._episode(f"{name}-{i}", i)) for i in range(EPISODES)))
            return time.process_time() - began

        seconds = [await wave(str(number)) for number in range(repetitions + 1)]
        if profile:
            with cProfile.Profile() as profiler:
                await wave("profiled")
            pstats.Stats(profiler, stream=sys.stderr).sort_stats("tottime").print_stats(40)
        each = _ms(seconds[1:], EPISODES * TURNS)
        self._print("turn_cpu_ms", each["median"], "ms", "", low=each["low"], high=each["high"], episodes=EPISODES, turns=TURNS)

    async def turn_overhead(self, rollouts: Rollouts, repetitions: int) -> None:
        names = await self._generators(rollouts, "instant", (0.0, 0.0))
        ours: list[float] = []
        bare: list[float] = []
        cpu: Counter[str] = Counter()
        bare_cpu: Counter[str] = Counter()
        # Alternately, so that whatever else the machine does weighs on both; the first pair warms up.
        for number in range(repetitions + 1):
            moments = [_cpu(rollouts.pids)]
            ours.append(await rollouts.wave())
            moments.append(_cpu(rollouts.pids))
            bare.append(await rollouts.bare())
            moments.append(_cpu(rollouts.pids))
            if number:
                cpu.update(moments[1] - moments[0])
                bare_cpu.update(moments[2] - moments[1])
        await rollouts.gaps(names)
        turns = EPISODES * TURNS
        each = _ms([a - b for a, b in zip(ours[1:], bare[1:], strict=True)], turns)
        self._print(
            "turn_overhead_ms_256",
            each["median"],
            "ms",
            "the same requests sent bare to the same Ray actors",
            low=each["low"],
            high=each["high"],
            ours_ms_a_turn=_ms(ours[1:], turns)["median"],
            bare_ms_a_turn=_ms(bare[1:], turns)["median"],
            turns_per_s=round(turns / statistics.median(ours[1:])),
            bare_turns_per_s=round(turns / statistics.median(bare[1:])),
            cpu_ms_a_turn=_each(cpu, turns * repetitions),
            bare_cpu_ms_a_turn=_each(bare_cpu, turns * repetitions),
            waves=repetitions,
            episodes=EPISODES,
            turns=TURNS,
        )

    async def turn_latency(self, rollouts: Rollouts, engine_s: tuple[float, float], repetitions: int) -> None:
        names = await self._generators(rollouts, "paced", engine_s)
        ours: list[float] = []
        bare: list[float] = []
        seconds: list[float] = []
        for _ in range(repetitions):
            seconds.append(await rollouts.wave())
            ours += await rollouts.gaps(names)
            await rollouts.bare()
            bare += await rollouts.gaps(names)
        added = statistics.median(ours) - statistics.median(bare)
        self._print(
            "turn_latency_ms_256",
            round(1e3 * added, 2),
            "ms",
            "the same requests sent bare to the same Ray actors",
            median=_at(ours, 0.5),
            p99=_at(ours, 0.99),
            bare_median=_at(bare, 0.5),
            bare_p99=_at(bare, 0.99),
            turns_per_s=round(EPISODES * TURNS / statistics.median(seconds)),
            engine_s=engine_s,
            waves=repetitions,
            episodes=EPISODES,
            turns=TURNS,
        )

    async def episodes(self, pools: int, slots: int, sleep: float, turns: int = 4, waves: int = 3) -> None:
        count = pools * slots
        async with self._rollouts("episodes", [slots] * pools, {"turns": turns, "sleep": sleep}) as rollouts:
            names = await self._generators(rollouts, "instant", (0.0, 0.0))
            before = _resident(rollouts.pids)
            seconds: list[float] = []
            late: list[float] = []
            held: list[dict[str, float]] = []
            cpu = _cpu(rollouts.pids)
            for _ in range(waves):
                seconds.append(await rollouts.wave())
                late += [gap - sleep for gap in await rollouts.gaps(names)]
                held.append(_resident(rollouts.pids))
            spent = _cpu(rollouts.pids) - cpu
            self._print(
                "episodes_2000",
                round(statistics.median(seconds), 2),
                "s",
                f"{turns * sleep:g} s that the worlds alone sleep",
                waves_s=[round(s, 2) for s in seconds],
                late_ms_median=_at(late, 0.5),
                late_ms_p99=_at(late, 0.99),
                late_ms_worst=_at(late, 1.0),
                rss_mib_before=before,
                rss_mib_after_waves=held,
                rss_mib_growth_first_to_last={name: round(held[-1][name] - held[0][name], 1) for name in before},
                rss_mib_peak=_resident(rollouts.pids, "VmHWM"),
                cpu_ms_a_turn=_each(spent, count * turns * waves),
                episodes=count,
                pools=pools,
                turns=turns,
                sleep_s=sleep,
            )

    # -- making them -------------------------------------------------------------------------------------------------

    @asynccontextmanager
    async def _rollouts(self, name: str, slots: list[int], options: dict[str, Any]) -> AsyncIterator[Rollouts]:
        context = RayContext.launch(name, seed=0)
        rollouts = Rollouts(context, sum(slots))
        settings = RolloutSettings(
            groups_per_step=sum(slots) // GROUP, group_size=GROUP, max_staleness=0, max_tokens=len(self.answer)
        )
        pools = {f"env-{number}": count for number, count in enumerate(slots)}
        try:
            await rollouts.spawn("store", Store, folder=str(self.folder / name))
            await rollouts.spawn(
                "dispatcher",
                Dispatcher,
                world="echo",
                settings=settings,
                limits=LIMITS,
                steps=1_000_000,
                seed=0,
                incarnation=0,
            )
            for pool, count in pools.items():
                await rollouts.spawn(pool, EnvPool, world="echo", options=options, model_folder=self.model, slots=count)
            await rollouts.actor("dispatcher").pools(Pools(pools))
            yield rollouts
        finally:
            await asyncio.gather(*(context.kill(actor) for actor in rollouts.pids))

    async def _generators(self, rollouts: Rollouts, name: str, seconds: tuple[float, float]) -> list[str]:
        """Two generators, to which all turns go from now on."""
        names = [f"{name}-{number}" for number in range(2)]
        weights = Weights(FRESH, checksum_of({}), rollouts.context.blobs.put({}))
        for generator in names:
            await rollouts.spawn(generator, Probed, make_engine=partial(_engine, answer=self.answer, seconds=seconds))
            await rollouts.actor(generator).load_weights(weights)
        await rollouts.route(names)
        return names

    def _pool(self) -> tuple[EnvPool, FixedEngine]:
        """A pool in this process, whose messages are plain calls."""
        engine = FixedEngine(self.answer)
        pool = EnvPool(Here(engine), "echo", {"turns": TURNS}, self.model, EPISODES)  # type: ignore[arg-type]
        return pool, engine

    async def _requests(self) -> list[Generate]:
        """What one episode asks of its engine."""
        pool, engine = self._pool()
        await pool.routes(Routes(["generator"]))
        await pool.run_episode(self._episode("first", 0))
        return engine.requests

    def _episode(self, name: str, number: int) -> RunEpisode:
        return RunEpisode(
            episode=name,
            attempt=0,
            group=number // GROUP,
            member=number % GROUP,
            kind="train",
            step=1,
            task=Task(f"train/{number}", "echo", "train", number),
            sampling=Sampling(max_tokens=len(self.answer)),
            limits=LIMITS,
            seed=number,
        )

    def _print(self, name: str, value: float, unit: str, compared_with: str, **context: Any) -> None:
        line = {
            "name": name,
            "value": value,
            "unit": unit,
            "compared_with": compared_with,
            "context": {**context, **self.about},
        }
        print(json.dumps(line), flush=True)


class Here:
    """The least context for a pool in this process: one generator, and a store that accepts everything and keeps nothing."""

    name, executor = "env-0", None
    clock, rng = WallClock(), random.Random(0)

    def __init__(self, engine: FixedEngine) -> None:
        self._engine = engine

    def ref(self, name: str, cls: type[Any]) -> Any:
        return self

    async def generate(self, message: Generate) -> Generated:
        return await self._engine.generate(message)

    async def end_session(self, message: EndSession) -> Ack:
        await self._engine.end_session(message.session)
        return Ack()

    async def deposit(self, message: Deposit) -> Receipt:
        return Receipt(True)


# -- helpers ---------------------------------------------------------------------------------------------------------


def _engine(name: str, answer: list[int], seconds: tuple[float, float]) -> FixedEngine:
    return FixedEngine(answer, seconds)


def _ms(seconds: list[float], turns: int) -> dict[str, float]:
    """Milliseconds a turn."""
    each = {"median": statistics.median(seconds), "low": min(seconds), "high": max(seconds)}
    return {name: round(1e3 * value / turns, 3) for name, value in each.items()}


def _at(seconds: list[float], share: float) -> float:
    """A quantile in milliseconds."""
    return round(1e3 * sorted(seconds)[min(len(seconds) - 1, int(share * len(seconds)))], 2)


def _each(cpu: Counter[str], turns: int) -> dict[str, float]:
    """Milliseconds of CPU a turn, by process."""
    return {name: round(1e3 * seconds / turns, 3) for name, seconds in cpu.items()}


def _cpu(pids: dict[str, int]) -> Counter[str]:
    """CPU seconds of each process so far, the threads of Ray in it included."""
    tick = os.sysconf("SC_CLK_TCK")
    fields = {name: Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for name, pid in pids.items()}
    return Counter({name: (int(found[11]) + int(found[12])) / tick for name, found in fields.items()})  # type: ignore[arg-type]


def _resident(pids: dict[str, int], what: str = "VmRSS") -> dict[str, float]:
    """MiB that each process holds; with "VmHWM" the most that it ever held."""
    found = {}
    for name, pid in pids.items():
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        found[name] = round(next(int(line.split()[1]) for line in lines if line.startswith(f"{what}:")) / 1024, 1)
    return found


if __name__ == "__main__":
    typer.run(main)
