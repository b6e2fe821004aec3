"""Measures a world in real environment pools on Ray, without a model.

Owns the Ray session and the pools of a measurement. Promises: they are gone afterwards, on Ctrl-C too; a pool that dies is
told as one, and what it was to play is not counted as played; nothing waits longer than an episode may take.
"""

from __future__ import annotations

import asyncio
import io
import os
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn
from rich.table import Table

from troupe.actors.context import Context, within
from troupe.actors.director import limits_of
from troupe.actors.env_pool import EnvPool
from troupe.actors.pool_load import told
from troupe.actors.settings import RunConfig
from troupe.cluster import config as recipes
from troupe.cluster import launch
from troupe.cluster.progress import seconds
from troupe.envs import registry
from troupe.learner.tiny import make_tiny
from troupe.protocol import latency
from troupe.protocol.errors import ActorLost, EnvironmentFailed, NotReady, TimedOut
from troupe.protocol.latency import Latencies
from troupe.protocol.messages import Ping, Rehearse, Rehearsed

_SLACK_S = 60.0
_REASONS = 3
"""Reasons of failures that are shown."""


@dataclass(slots=True)
class Plan:
    """What is played."""

    config: RunConfig
    episodes: int
    seed: int


@dataclass(slots=True)
class Pool:
    """What one pool did. busy_s: from its first episode to the end of its last."""

    name: str
    episodes: int = 0
    failed: int = 0
    steps: int = 0
    refused: int = 0
    busy_s: float = 0.0
    latency: Latencies = field(default_factory=dict)
    died: str = ""


@dataclass(slots=True)
class Report:
    """What was measured. seconds: from the first episode of any pool to the last. reasons: what broke, how often."""

    world: str
    slots: int
    wanted: int
    seconds: float
    pools: list[Pool]
    reasons: Counter[str]


def planned(name: str, overrides: list[str], episodes: int, seed: int) -> Plan:
    """Raises ConfigError for a world or options that do not exist."""
    config = recipes.from_flags(name, overrides)
    registry.make(registry.find(name), config.env.options)
    return Plan(config, episodes, seed)


def measure(plan: Plan, *, address: str | None = None, quiet: bool = False) -> Report:
    """Plays the plan. Raises EnvironmentFailed if every pool died before anything was played."""
    from troupe.actors.host import RayContext

    namespace = f"troupe-bench-{os.getpid()}"
    console = Console(file=sys.stderr, highlight=False, quiet=quiet, emoji=False)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with (
        tempfile.TemporaryDirectory(prefix="troupe-bench-") as folder,
        launch.ray_session(address, namespace),
        Progress(*columns, console=console, transient=True) as progress,
    ):
        bar = progress.add_task(f"starting {plan.config.env.actors} pools", total=plan.episodes)
        # Pools speak a model's language even if nobody listens: the smallest there is.
        model = str(make_tiny(folder, ["a b c"], hidden=16, layers=1, heads=2))
        report = asyncio.run(
            _measure(
                RayContext.launch(namespace, plan.seed),
                plan,
                model,
                lambda done: progress.update(bar, completed=done, description=plan.config.env.name),
            )
        )
    if not any(pool.episodes for pool in report.pools):
        raise EnvironmentFailed(f"every pool died before an episode was over; the last: {report.pools[-1].died}")
    return report


async def _measure(context: Context, plan: Plan, model: str, show: Callable[[int], None]) -> Report:
    config = plan.config
    world, limits = registry.find(config.env.name), limits_of(config)
    pools = [Pool(f"env-{number}") for number in range(config.env.actors)]
    settings: dict[str, Any] = {"world": config.env.name, "options": config.env.options, "slots": config.env.slots}
    settings |= {"model_folder": model, "env_step_s": limits.env_step_s}
    await asyncio.gather(*(context.spawn(pool.name, EnvPool, **settings) for pool in pools))
    waiting = iter(range(plan.episodes))
    reasons: Counter[str] = Counter()
    began = time.perf_counter()

    async def play(pool: Pool) -> None:
        ref = context.ref(pool.name, EnvPool)
        for number in waiting:
            ask = Rehearse(world.task("train", plan.seed + number), plan.seed + number, limits)
            try:
                done = await within(limits.episode_s + _SLACK_S, f"{pool.name}.rehearse", ref.rehearse(ask))
            except (ActorLost, NotReady, TimedOut) as error:
                pool.died = str(error)
                return
            _count(pool, done, reasons)
            pool.busy_s = time.perf_counter() - began
            show(sum(one.episodes for one in pools))

    show(0)
    await asyncio.gather(*(play(pool) for pool in pools for _ in range(config.env.slots)))
    took = time.perf_counter() - began
    for pool in pools:
        if not pool.died:
            pool.latency = (await within(30.0, f"{pool.name}.health", context.ref(pool.name, EnvPool).health(Ping()))).latency
    return Report(config.env.name, config.env.slots, plan.episodes, took, pools, reasons)


def _count(pool: Pool, done: Rehearsed, reasons: Counter[str]) -> None:
    pool.episodes += 1
    pool.steps += done.steps
    pool.refused += done.refused
    if done.failure:
        pool.failed += 1
        reasons[done.failure] += 1


# -- saying it -------------------------------------------------------------------------------------------------------


def whole(report: Report) -> Pool:
    """All pools as one."""
    total = Pool("total", busy_s=report.seconds)
    for pool in report.pools:
        total.episodes, total.failed = total.episodes + pool.episodes, total.failed + pool.failed
        total.steps, total.refused = total.steps + pool.steps, total.refused + pool.refused
        latency.add(total.latency, pool.latency)
    return total


def plain(report: Report) -> dict[str, Any]:
    """As JSON: seconds, counts and rates of each pool and of all."""

    def one(pool: Pool) -> dict[str, Any]:
        calls = {call: figures for calls in told(pool.latency).values() for call, figures in calls.items()}
        rates = {"steps_per_s": pool.steps / max(1e-9, pool.busy_s), "episodes_per_s": pool.episodes / max(1e-9, pool.busy_s)}
        counts = {key: getattr(pool, key) for key in ("episodes", "failed", "steps", "refused", "died")}
        return {"name": pool.name, **counts, "seconds": pool.busy_s, **rates, "latency": calls}

    return {
        "world": report.world,
        "actors": len(report.pools),
        "slots": report.slots,
        "episodes_wanted": report.wanted,
        "total": one(whole(report)),
        "pools": [one(pool) for pool in report.pools],
        "failures": dict(report.reasons.most_common()),
    }


def rendered(report: Report) -> str:
    """Two tables: rates of each pool, and latencies of each call; then what broke."""
    total = whole(report)
    text = io.StringIO()
    console = Console(file=text, width=120, markup=False, highlight=False, emoji=False)
    rates = Table("pool", *(_right(n) for n in ("episodes", "failed", "steps", "refused", "steps/s", "episodes/s")), box=None)
    calls = Table("pool", "call", *(_right(n) for n in ("calls", "p50", "p90", "p99", "longest")), box=None)
    for pool in [*report.pools, total] if len(report.pools) > 1 else [total]:
        per_s = (f"{count / max(1e-9, pool.busy_s):.1f}" for count in (pool.steps, pool.episodes))
        rates.add_row(pool.name, *map(str, (pool.episodes, pool.failed, pool.steps, pool.refused)), *per_s)
        for call in ("reset", "step", "verify", "close"):
            if (found := latency.of_call(pool.latency, call)).count:
                quantiles = [seconds(found.quantile(share) or 0.0) for share in (0.5, 0.9, 0.99)]
                calls.add_row(pool.name, call, str(found.count), *quantiles, seconds(found.longest))
    slots = f"{len(report.pools)} pool{'s' * (len(report.pools) > 1)} of {report.slots} slots"
    console.print(f"{report.world}: {total.episodes} episodes in {report.seconds:.1f} s, {slots}\n")
    console.print(rates)
    console.print()
    console.print(calls)
    for reason, count in report.reasons.most_common(_REASONS):
        console.print(f"\n{count} × {reason}", soft_wrap=True)
    if (more := len(report.reasons) - _REASONS) > 0:
        console.print(f"\n… and {more} other reasons; --json has all")
    for pool in report.pools:
        if pool.died:
            console.print(f"\n{pool.name} died: {pool.died}", soft_wrap=True)
    if total.episodes < report.wanted:
        console.print(f"\n{report.wanted - total.episodes} episodes were not played, or not to their end")
    return text.getvalue()


def _right(name: str) -> Any:
    from rich.table import Column

    return Column(name, justify="right")
