"""Decides which episode runs where and when, and carries each to exactly one end.

Owns permits, in-flight episodes, groups and the staleness budget. Promises:
- every dispatched episode ends exactly once, as completed, failed or cancelled; of several attempts only one is
  recorded: before a new attempt starts, the store is told to refuse the old one (law 3);
- groups are born for a training step and numbered `step * 10_000 + ordinal`, which fixes task, seed and ids: a restarted
  dispatcher asks the store which groups are durable and runs exactly the others again (law 7);
- a group for step k starts only while `k ≤ version + 1 + max_staleness`, so no trained token is older than that (law 4);
- an evaluation runs between training groups, with its own sampling, and is never part of a batch (law 8);
- nothing waits without a limit: permits are bounded by the pools' slots, attempts by `attempts` (law 10).
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import os
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field
from functools import partial
from typing import Any, TypeVar

from troupe.actors.context import Context, within
from troupe.actors.env_pool import EnvPool
from troupe.actors.settings import RolloutSettings
from troupe.actors.store import Store
from troupe.envs import registry
from troupe.protocol.errors import ActorLost, NotReady, Overloaded, TimedOut, TroupeError
from troupe.protocol.messages import (
    Ack,
    Announce,
    CancelEpisode,
    CommitGroup,
    Deposit,
    DispatcherStatus,
    EpisodeDone,
    Evaluate,
    Evaluated,
    Fence,
    GetCommitted,
    Health,
    Limits,
    Ping,
    Pools,
    RunEpisode,
    Sampling,
)
from troupe.protocol.trajectory import Failure, Kind, Task, Trajectory

T = TypeVar("T")

GROUPS_PER_STEP_LIMIT = 10_000
EVAL_GROUP = 1_000_000_000_000
"""Group numbers of evaluations start here."""

_EVENTS_KEPT = 200
_REPLACEMENTS = 8
"""A step may use this many times its groups before the run is called broken."""


@dataclass(slots=True)
class _Group:
    """A group on its way."""

    number: int
    kind: Kind
    step: int
    tasks: list[Task]
    sampling: Sampling
    limits: Limits
    seeds: list[int]
    prefix: str
    done: dict[int, EpisodeDone] = field(default_factory=dict)


class Dispatcher:
    """Async: every episode at its own pace."""

    def __init__(
        self,
        context: Context,
        world: str,
        settings: RolloutSettings,
        limits: Limits,
        steps: int,
        seed: int,
        incarnation: int,
    ) -> None:
        self._context = context
        self._world = registry.find(world)
        self._settings, self._limits, self._steps, self._seed = settings, limits, steps, seed
        self._incarnation = incarnation
        self._store = context.ref("store", Store)
        self._version = -1
        self._announced = False
        self._slots: dict[str, int] = {}
        self._used: Counter[str] = Counter()
        self._waiting: deque[asyncio.Future[None]] = deque()
        self._ordinals: dict[int, int] = {}
        self._holes: dict[int, list[int]] = {}
        self._committed: dict[int, set[int]] = {}
        self._active: dict[int, set[int]] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._in_flight = 0
        self._completed = self._failed = self._retried = self._dropped = self._tokens = 0
        self._events: deque[str] = deque(maxlen=_EVENTS_KEPT)
        self._evaluations = 0
        self._broken = ""
        self._last_failure = ""

    async def start(self) -> None:
        """Learns from the store what is durable, and shuts out whatever an earlier dispatcher left running."""
        await self._fence("", self._first_attempt)
        known = await self._patiently("store.committed", lambda: self._store.committed(GetCommitted()))
        for step, groups in known.groups.items():
            self._committed[step] = set(groups)
        for number in [n for groups in known.groups.values() for n in groups] + known.dropped:
            step, ordinal = divmod(number, GROUPS_PER_STEP_LIMIT)
            self._ordinals[step] = max(self._ordinals.get(step, 0), ordinal + 1)
        self._completed, self._failed, self._dropped = known.completed, known.failed, len(known.dropped)
        self._tokens = known.tokens
        # Groups below the highest durable ordinal that are not durable themselves run again under their own numbers.
        self._holes = {
            step: [
                o
                for o in range(self._ordinals[step])
                if step * GROUPS_PER_STEP_LIMIT + o not in self._committed.get(step, set())
                and step * GROUPS_PER_STEP_LIMIT + o not in known.dropped
            ]
            for step in self._ordinals
        }

    @property
    def _first_attempt(self) -> int:
        return self._incarnation * 1000

    # -- messages ----------------------------------------------------------------------------------------------------

    async def pools(self, message: Pools) -> Ack:
        """Which pools take episodes now."""
        for name in message.slots:
            if name not in self._slots:
                await self._clear(name)
        self._slots = dict(message.slots)
        self._wake()
        self._fill()
        return Ack()

    async def announce(self, message: Announce) -> Ack:
        """Every generator holds `version`: more groups may start."""
        self._version = max(self._version, message.version)
        self._announced = True
        self._fill()
        return Ack()

    async def evaluate(self, message: Evaluate) -> Evaluated:
        """Runs the tasks and returns their scores."""
        # An evaluation that is asked for again (its asker died) runs anew, under numbers and names of its own.
        serial = self._first_attempt + self._evaluations
        self._evaluations += 1
        base = EVAL_GROUP + serial * 1_000_000
        groups = [
            _Group(
                number=base + index,
                kind="eval",
                step=message.version,
                tasks=[task] * message.trials,
                sampling=message.sampling,
                limits=message.limits,
                seeds=[seed_of(message.seed, index, trial) for trial in range(message.trials)],
                prefix=f"{message.name}.{serial}-{index:05d}",
            )
            for index, task in enumerate(message.tasks)
        ]
        await asyncio.gather(*(self._run_group(group) for group in groups))
        done = [group.done[i] for group in groups for i in range(message.trials)]
        good = [d for d in done if d.status == "completed"]
        return Evaluated(
            name=message.name,
            version=message.version,
            successes=[bool(d.success) for d in good],
            rewards=[d.reward for d in good],
            turns=sum(d.turns for d in good) / max(1, len(good)),
            failed=len(done) - len(good),
            sampling=message.sampling,
            task_ids=[task.id for task in message.tasks],
        )

    async def status(self, message: Ping) -> DispatcherStatus:
        """Counts and the latest events. Raises what broke the run, if something did."""
        if self._broken:
            raise TroupeError(self._broken)
        return DispatcherStatus(
            version=self._version,
            in_flight=self._in_flight,
            completed=self._completed,
            failed=self._failed,
            retried=self._retried,
            dropped_groups=self._dropped,
            tokens=self._tokens,
            events=list(self._events),
        )

    async def health(self, message: Ping) -> Health:
        """Load is the number of episodes in flight."""
        return Health(self._context.name, os.getpid(), load=self._in_flight)

    # -- groups ------------------------------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Starts every group that the staleness budget allows. Capacity in groups is
        (version + 1 + max_staleness) · groups_per_step − (committed + running)."""
        if not self._announced or self._broken:
            return
        newest = min(self._steps, self._version + 1 + self._settings.max_staleness)
        for step in range(self._version + 1, newest + 1):
            active = self._active.setdefault(step, set())
            wanted = self._settings.groups_per_step - len(self._committed.get(step, ())) - len(active)
            for _ in range(wanted):
                holes = self._holes.get(step)
                ordinal = holes.pop(0) if holes else self._ordinals.get(step, 0)
                if ordinal >= min(GROUPS_PER_STEP_LIMIT, _REPLACEMENTS * self._settings.groups_per_step):
                    self._broken = (
                        f"step {step}: {ordinal} groups were tried and too few survived their failures; last: "
                        f"{self._events[-1] if self._events else 'no reason known'}"
                    )
                    return
                self._ordinals[step] = max(self._ordinals.get(step, 0), ordinal + 1)
                number = step * GROUPS_PER_STEP_LIMIT + ordinal
                active.add(number)
                self._spawn(self._train_group(number, step))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._broken = f"dispatcher: {type(task.exception()).__name__}: {task.exception()}"

    async def _train_group(self, number: int, step: int) -> None:
        # The run's seed chooses the tasks: runs with different seeds see different ones, a resumed run the same.
        task = self._world.task("train", self._seed * 10_000_000_000 + number)
        settings = self._settings
        group = _Group(
            number=number,
            kind="train",
            step=step,
            tasks=[task] * settings.group_size,
            sampling=Sampling(settings.temperature, settings.top_p, settings.top_k, settings.max_tokens),
            limits=self._limits,
            seeds=[seed_of(self._seed, number, member) for member in range(settings.group_size)],
            prefix=f"t{number:09d}",
        )
        trains = await self._run_group(group)
        self._active[step].discard(number)
        if trains:
            self._committed.setdefault(step, set()).add(number)
        else:
            self._dropped += 1
        self._fill()

    async def _run_group(self, group: _Group) -> bool:
        """Runs all members and makes the group durable. Returns whether it trains."""
        members = range(len(group.tasks))
        for round_ in itertools.count():
            await asyncio.gather(*(self._run_member(group, member, round_) for member in members))
            completed = sum(d.status == "completed" for d in group.done.values())
            whole = completed == len(group.tasks)
            trains = group.kind == "train" and (whole or (self._settings.on_failure == "drop-episode" and completed >= 2))
            commit = CommitGroup(
                group=group.number,
                kind=group.kind,
                step=group.step,
                episodes=[_episode(group, member) for member in members],
                trains=trains,
            )
            receipt = await self._patiently("store.commit", partial(self._store.commit, commit))
            if receipt.accepted:
                return trains
            # The store lost uncommitted trajectories: it was restarted, which its supervisor does a limited number of times.
            self._note(f"group {group.number} runs again: {receipt.reason}")
        raise AssertionError("unreachable")

    async def _run_member(self, group: _Group, member: int, round_: int) -> None:
        episode = _episode(group, member)
        self._in_flight += 1
        try:
            last: EpisodeDone | None = None
            for retry in range(self._settings.attempts):
                attempt = self._first_attempt + round_ * 50 + retry
                if retry or round_:
                    await self._fence(episode, attempt)
                done = await self._attempt(group, member, episode, attempt)
                last = done
                self._tokens += done.tokens
                if done.status == "completed" and done.stored:
                    self._completed += 1
                    group.done[member] = done
                    return
                if done.failure_kind == "data":
                    break
                self._retried += 1
                more = retry + 1 < self._settings.attempts
                if done.failure != self._last_failure:  # one sentence for the many episodes of a pool that died
                    self._last_failure = done.failure
                    what = "such episodes are retried" if more else "the episode counts as failed"
                    self._note(f"{episode}: {done.failure or done.status} ({what})")
            self._failed += 1
            assert last is not None
            group.done[member] = last
            if not last.stored:
                await self._record_failure(group, member, last)
        finally:
            self._in_flight -= 1

    async def _attempt(self, group: _Group, member: int, episode: str, attempt: int) -> EpisodeDone:
        pool = await self._permit()
        message = RunEpisode(
            episode=episode,
            attempt=attempt,
            group=group.number,
            member=member,
            kind=group.kind,
            step=group.step,
            task=group.tasks[member],
            sampling=group.sampling,
            limits=group.limits,
            seed=group.seeds[member],
        )
        reason = ""
        try:
            return await within(
                group.limits.episode_s + 120.0, f"{pool}.run_episode({episode})", self._pool(pool).run_episode(message)
            )
        except (ActorLost, TimedOut, NotReady, Overloaded) as error:
            reason = str(error)
            # Perhaps only the message was lost and the pool lives: then it must not go on with this attempt. It gets no
            # more episodes until the company says again that it lives.
            self._slots.pop(pool, None)
            await self._clear(pool, episode, attempt)
        finally:
            self._release(pool)
        return EpisodeDone(
            episode, attempt, "failed", "failed", stored=False, pool=pool, failure_kind="infrastructure", failure=reason
        )

    async def _record_failure(self, group: _Group, member: int, last: EpisodeDone) -> None:
        """An episode whose pool died left no record: the dispatcher writes it, so that nothing vanishes (law 3)."""
        kind = last.failure_kind or "infrastructure"
        trajectory = Trajectory(
            id=last.episode,
            attempt=last.attempt,
            group=group.number,
            member=member,
            kind=group.kind,
            step=group.step,
            task=group.tasks[member],
            status="failed",
            stop="failed",
            failure=Failure(kind, "EpisodeError", last.failure, last.pool),
            pool=last.pool,
            seed=group.seeds[member],
            started_at=self._context.clock.now(),
        )
        await self._patiently("store.deposit", lambda: self._store.deposit(Deposit(trajectory)))

    # -- permits -----------------------------------------------------------------------------------------------------

    async def _permit(self) -> str:
        """Takes a slot on the pool with the most free ones; waits for one in the order of asking."""
        while True:
            free = [(self._slots[n] - self._used[n], n) for n in self._slots if self._used[n] < self._slots[n]]
            if free:
                name = max(free)[1]
                self._used[name] += 1
                return name
            waiter: asyncio.Future[None] = asyncio.get_running_loop().create_future()
            self._waiting.append(waiter)
            await waiter

    def _release(self, pool: str) -> None:
        self._used[pool] -= 1
        self._wake()

    def _wake(self) -> None:
        free = sum(max(0, self._slots[n] - self._used[n]) for n in self._slots)
        while free > 0 and self._waiting:
            waiter = self._waiting.popleft()
            if not waiter.done():
                waiter.set_result(None)
                free -= 1

    # -- others ------------------------------------------------------------------------------------------------------

    def _pool(self, name: str) -> EnvPool:
        return self._context.ref(name, EnvPool)

    async def _clear(self, pool: str, episode: str = "", attempt: int | None = None) -> None:
        """Ends what an earlier dispatcher, or a call that was given up, left running in `pool`."""
        last = self._first_attempt - 1 if attempt is None else attempt
        try:
            await within(30.0, f"{pool}.cancel", self._pool(pool).cancel(CancelEpisode(episode, last)))
        except (ActorLost, NotReady, TimedOut):
            return  # it is gone, and what it ran with it

    async def _fence(self, episode: str, attempt: int) -> None:
        await self._patiently("store.fence", lambda: self._store.fence(Fence(episode, attempt)))

    async def _patiently(self, what: str, call: Callable[[], Awaitable[T]]) -> T:
        """Asks the store again while its supervisor restarts it. Its answers are idempotent."""
        reason = ""
        for _ in range(60):
            try:
                return await within(60.0, what, call())
            except (ActorLost, NotReady, Overloaded, TimedOut) as error:
                reason = str(error)
                await asyncio.sleep(0.5 + self._context.rng.random())
        raise TimedOut(f"{what} failed for a minute: {reason}")

    def _note(self, text: str) -> None:
        self._events.append(text)


def _episode(group: _Group, member: int) -> str:
    return f"{group.prefix}-{member:02d}"


def seed_of(*parts: int) -> int:
    """A 62-bit seed from several integers, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big") >> 2
