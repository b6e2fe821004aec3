"""Decides which episode runs where and when, and carries each to exactly one end. docs/dispatch.md explains the rules.

Owns in-flight episodes, their groups and the staleness budget. Promises:
- emit everything: every dispatched episode reaches the store exactly once, as completed, failed or cancelled, in a
  committed group. Of several attempts only one is recorded: before a new one starts, the store is told to refuse the
  old one. Where a pool left no record (it died, or never began), the dispatcher writes it (law 3);
- groups are born for a training step and numbered `step * 10_000 + ordinal`, which fixes task, seed and ids: a restarted
  dispatcher asks the store which groups are durable and runs exactly the others again (law 7);
- a group for step k starts only while `k ≤ version + 1 + max_staleness`, and asks for weights no older than
  `k − 1 − max_staleness`; one with an older token all the same is told of and never trained (law 4);
- exactly `groups_per_step` groups of a step train; what failed, what a filter dropped, what is too old and what came too late
  is stored and never trained, and replaced while the step needs it;
- a broken episode never carries a reward: the run's policy says whether it is retried or dropped (law 6), `BIAS` what
  that does to the data. A task that always fails is quarantined and never dispatched again;
- with `rollout.tree` a member starts when the sibling that it forks from has ended (see `tree.py`), and waits for no other;
- an evaluation has its own sampling, shares the slots fairly, and is never part of a batch (law 8);
- nothing waits without a limit: permits are bounded by the pools' slots, attempts and replacements by numbers, calls by
  seconds (law 10).
"""

from __future__ import annotations

import asyncio
import hashlib
import itertools
import math
import os
from collections import Counter, deque
from collections.abc import Awaitable, Callable, Coroutine
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any, Literal, TypeVar

from troupe.actors.context import Context, within
from troupe.actors.env_pool import EnvPool
from troupe.actors.permits import Permits
from troupe.actors.quarantine import Quarantine
from troupe.actors.settings import RolloutSettings
from troupe.actors.store import Store
from troupe.actors.tree import sibling_of
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
    PoolsHeard,
    RunEpisode,
    Sampling,
    Sibling,
)
from troupe.protocol.trajectory import Failure, Kind, Status, Task, Trajectory

T = TypeVar("T")

GROUPS_PER_STEP_LIMIT = 10_000
EVAL_GROUP = 1_000_000_000_000
"""Group numbers of evaluations start here."""

BIAS: dict[str, str] = {
    "retry": "a broken episode runs again with the same task and seed; a task whose episode breaks at every attempt is "
    "replaced by another, so such tasks are missing from training",
    "drop-episode": "a group trains without its broken episodes, so behaviour that breaks episodes (long ones first) is "
    "seen too rarely and those groups' baselines rest on fewer samples",
    "drop-group": "one broken episode replaces its whole group, so tasks whose episodes tend to break (long ones first) "
    "are seen too rarely, the more so the larger the groups are",
    "oversample": "each step trains on the groups that were ready first, so slow tasks and long episodes are seen too rarely",
    "filter": "groups whose rewards are all equal are not trained, so tasks that are always or never solved are missing and "
    "the rewards of a batch are not those of the policy on all tasks",
    "tree": "members of a group share beginnings, so they vary less than independent ones, and beginnings that led to long "
    "episodes, which have more places to fork at, are seen too often",
}
"""What a policy of `rollout.on_failure`, over-sampling, the filter and sampling as a tree do to the data that is trained on."""

_EVENTS_KEPT = 200
_REPLACEMENTS = 8
"""A step may use this many times its groups before the run is called broken; the filter may use as many again."""
_ATTEMPTS = 1000
"""Attempt numbers of one life of the dispatcher: an episode's attempts (at most 100, see settings) in all rounds fit."""
_ROUNDS = 8
"""How often the store may lose what it held of a group before the run is called broken."""
_GRACE_S = 10.0
"""Seconds that a cancelled attempt has to end; it is asked `_CANCELS` times, then no longer waited for."""
_CANCELS = 3
_OPEN_EPISODES = 8_192
"""Episodes of each kind whose groups are begun and not committed: the store has room for the records of both kinds."""
_PAUSE_S = 0.2
_MOVES = 16
"""How often an episode may be moved, because its pool drains, until that counts as a failure."""

_Verdict = Literal["trains", "failed", "stale", "surplus", "filtered", "evaluation"]


@dataclass(slots=True)
class _Member:
    """One episode of a group. place: in the line for permits. tries: attempt numbers used up.

    call: the attempt that runs now, in `pool`. done: how the episode ended; it is in the store then.
    """

    episode: str
    seed: int
    place: int
    tries: int = 0
    pool: str = ""
    call: asyncio.Task[EpisodeDone] | None = None
    done: EpisodeDone | None = None


@dataclass(slots=True)
class _Group:
    """A group on its way. min_version: of the weights that may sample it. stopped: why it can no longer train, or an empty
    string."""

    number: int
    kind: Kind
    step: int
    task: Task
    sampling: Sampling
    limits: Limits
    members: list[_Member]
    min_version: int
    stopped: Literal["", "failed", "surplus"] = ""

    def ended(self, status: Status) -> list[EpisodeDone]:
        """The members that ended so."""
        return [member.done for member in self.members if member.done is not None and member.done.status == status]


@dataclass(slots=True)
class _Step:
    """The groups of one training step, by number. next: the first ordinal that was never used.

    chosen: those that train, durable ones and those whose commit is under way.
    """

    next: int = 0
    holes: list[int] = field(default_factory=list)
    running: set[int] = field(default_factory=set)
    chosen: set[int] = field(default_factory=set)
    durable: set[int] = field(default_factory=set)
    failed: int = 0
    filtered: int = 0


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
        self._settings, self._limits, self._last_step, self._seed = settings, limits, steps, seed
        self._first_attempt = incarnation * _ATTEMPTS
        self._store = context.ref("store", Store)
        self._version = -1
        self._announced = False
        self._permits = Permits()
        self._places = itertools.count()
        self._gate = _gate(settings.group_size)
        self._cleared: set[str] = set()  # pools in which nothing of an earlier dispatcher runs
        self._draining: set[str] = set()  # pools whose attempts are moved if they do not finish there
        self._quarantine = Quarantine(settings.quarantine_after)
        self._steps: dict[int, _Step] = {}
        self._groups: dict[int, _Group] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._in_flight = 0
        self._ended: Counter[Status] = Counter()
        self._retried = self._moved = self._dropped = self._filtered = self._stale = self._tokens = 0
        self._events: deque[str] = deque(maxlen=_EVENTS_KEPT)
        self._evaluations = 0
        self._broken = ""
        self._last_failure = ""
        self._filter_is_spent = False

    async def start(self) -> None:
        """Learns from the store what is durable, and shuts out whatever an earlier dispatcher left running."""
        await self._fence("", self._first_attempt)
        known = await self._patiently("store.committed", lambda: self._store.committed(GetCommitted()))
        for number, groups in known.groups.items():
            step = self._step(number)
            step.durable, step.chosen = set(groups), set(groups)
        used: dict[int, set[int]] = {}
        for number in [n for groups in known.groups.values() for n in groups] + known.dropped:
            at, ordinal = divmod(number, GROUPS_PER_STEP_LIMIT)
            used.setdefault(at, set()).add(ordinal)
        for at, ordinals in used.items():
            step = self._step(at)
            step.next = max(ordinals) + 1
            # Groups below the highest durable one that are not durable themselves run again under their own numbers.
            step.holes = sorted(set(range(step.next)) - ordinals)
        self._ended.update({"completed": known.completed, "failed": known.failed, "cancelled": known.cancelled})
        self._dropped, self._tokens = len(known.dropped), known.tokens
        self._quarantine.restore(known.data_failures)

    # -- messages ----------------------------------------------------------------------------------------------------

    async def pools(self, message: Pools) -> PoolsHeard:
        """Which pools take episodes now, and which only finish theirs."""
        left_over = {name for name in self._draining if self._permits.used(name)}  # ended, and not all of its calls have heard
        self._draining = {*message.draining, *left_over} - message.slots.keys()
        new = [name for name in (*message.slots, *message.draining) if name not in self._cleared]
        heard = await asyncio.gather(*(self._clear(name) for name in new))
        self._cleared.update(name for name, ok in zip(new, heard, strict=True) if ok)
        self._permits.open(message.slots)
        self._fill()
        return PoolsHeard({name: self._permits.used(name) for name in message.draining})

    async def announce(self, message: Announce) -> Ack:
        """Every generator holds `version`: more groups may start."""
        self._version = max(self._version, message.version)
        self._announced = True
        for number in [n for n, step in self._steps.items() if n <= self._version and not step.running]:
            del self._steps[number]
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
                task=task,
                sampling=message.sampling,
                limits=message.limits,
                members=self._members(
                    f"{message.name}.{serial}-{index:05d}",
                    [seed_of(message.seed, index, trial) for trial in range(message.trials)],
                ),
                min_version=message.version,
            )
            for index, task in enumerate(message.tasks)
        ]
        gate = _gate(message.trials)
        await asyncio.gather(*(self._run_group(group, gate) for group in groups))
        good = [done for group in groups for done in group.ended("completed")]
        return Evaluated(
            name=message.name,
            version=message.version,
            successes=[bool(done.success) for done in good],
            rewards=[done.reward for done in good],
            turns=sum(done.turns for done in good) / max(1, len(good)),
            failed=len(message.tasks) * message.trials - len(good),
            sampling=message.sampling,
            task_ids=[task.id for task in message.tasks],
        )

    async def status(self, message: Ping) -> DispatcherStatus:
        """Counts and the latest events. Raises what broke the run, if something did."""
        if self._broken:
            raise TroupeError(self._broken)
        waiting, used, slots = self._permits.load()
        return DispatcherStatus(
            version=self._version,
            in_flight=self._in_flight,
            completed=self._ended["completed"],
            failed=self._ended["failed"],
            cancelled=self._ended["cancelled"],
            retried=self._retried,
            dropped_groups=self._dropped,
            filtered_groups=self._filtered,
            tokens=self._tokens,
            quarantined=dict(self._quarantine.reasons),
            events=list(self._events),
            waiting=waiting,
            used=used,
            slots=slots,
            moved=self._moved,
            stale_groups=self._stale,
            granted=self._permits.granted,
            queued_s=self._permits.waited,
        )

    async def health(self, message: Ping) -> Health:
        """Load is the number of episodes in flight."""
        return Health(self._context.name, os.getpid(), load=self._in_flight)

    # -- steps -------------------------------------------------------------------------------------------------------

    def _step(self, number: int) -> _Step:
        return self._steps.setdefault(number, _Step())

    def _fill(self) -> None:
        """Starts every group that the staleness budget allows. Capacity in groups is
        (version + 1 + max_staleness) · groups_per_step − (committed + running), and of each step over-sampling adds
        ⌈oversample · groups_per_step⌉ until enough are chosen."""
        if not self._announced or self._broken:
            return
        wanted = self._settings.groups_per_step
        started = wanted + math.ceil(round(self._settings.oversample * wanted, 6))
        newest = min(self._last_step, self._version + 1 + self._settings.max_staleness)
        for at in range(self._version + 1, newest + 1):
            step = self._step(at)
            while len(step.chosen) < wanted and len(step.durable) + len(step.running) < started:
                ordinal = step.holes[0] if step.holes else step.next
                if ordinal >= GROUPS_PER_STEP_LIMIT or step.failed > (_REPLACEMENTS - 1) * wanted:
                    self._broken = (
                        f"step {at}: {ordinal} groups were tried and too few survived their failures; last: "
                        f"{self._last_failure or 'no reason known'}"
                    )
                    return
                step.holes = step.holes[1:]
                step.next = max(step.next, ordinal + 1)
                number = at * GROUPS_PER_STEP_LIMIT + ordinal
                step.running.add(number)
                self._spawn(self._train_group(number, at))

    async def _train_group(self, number: int, at: int) -> None:
        settings = self._settings
        group = _Group(
            number=number,
            kind="train",
            step=at,
            # The run's seed chooses the tasks: runs with different seeds see different ones, a resumed run the same.
            task=self._world.task("train", self._seed * 10_000_000_000 + number),
            sampling=Sampling(
                settings.temperature, settings.top_p, settings.top_k, settings.max_tokens, stop=list(settings.stop)
            ),
            limits=self._limits,
            members=self._members(
                f"t{number:09d}", [seed_of(self._seed, number, member) for member in range(settings.group_size)]
            ),
            min_version=at - 1 - settings.max_staleness,
        )
        verdict = await self._run_group(group, self._gate)
        step = self._step(at)
        step.running.discard(number)
        if verdict == "trains":
            step.chosen.add(number)
            step.durable.add(number)
            if len(step.durable) >= settings.groups_per_step:
                for straggler in [self._groups[n] for n in step.running if n in self._groups]:
                    self._stop(straggler, "surplus")
        else:
            step.chosen.discard(number)
            self._dropped += 1
            step.failed += verdict in ("failed", "stale")
            self._stale += verdict == "stale"
            if verdict == "filtered":
                step.filtered += 1
                self._filtered += 1
        self._fill()

    # -- groups ------------------------------------------------------------------------------------------------------

    def _members(self, prefix: str, seeds: list[int]) -> list[_Member]:
        return [_Member(f"{prefix}-{number:02d}", seed, next(self._places)) for number, seed in enumerate(seeds)]

    async def _run_group(self, group: _Group, gate: asyncio.Semaphore) -> _Verdict:
        """Runs a group to its end, begun when the gate lets it in. Returns what became of it."""
        self._groups[group.number] = group
        async with gate:
            if group.task.id in self._quarantine:
                self._stop(group, "failed")
            verdict = await self._make_durable(group)
        del self._groups[group.number]
        self._ended.update(member.done.status for member in group.members if member.done is not None)
        return verdict

    async def _make_durable(self, group: _Group) -> _Verdict:
        """Runs all members and commits them; again if the store lost their records before they were committed."""
        reason = ""
        for _ in range(_ROUNDS):
            running: list[asyncio.Future[None]] = []
            for number in range(len(group.members)):
                before = self._forks_from(group, number)
                work = self._run_member(group, number, None if before is None else running[before])
                running.append(asyncio.ensure_future(work))
            await asyncio.gather(*running)
            verdict = self._judge(group)
            commit = CommitGroup(
                group=group.number,
                kind=group.kind,
                step=group.step,
                episodes=[member.episode for member in group.members],
                trains=verdict == "trains",
            )
            receipt = await self._patiently("store.commit", partial(self._store.commit, commit))
            if receipt.accepted:
                return verdict
            reason = receipt.reason
            known = await self._patiently("store.committed", lambda: self._store.committed(GetCommitted()))
            if group.number in known.groups.get(group.step, ()):  # by a late message of the dispatcher before this one
                return "trains"
            if group.number in known.dropped:
                return "failed"
            self._note(f"group {group.number} runs again: {reason}")
        raise TroupeError(f"group {group.number} could not be committed {_ROUNDS} times; last: {reason}")

    def _judge(self, group: _Group) -> _Verdict:
        """Whether the group, whose members have all ended, trains; and why not."""
        if group.kind == "eval":
            return "evaluation"
        step, wanted = self._step(group.step), self._settings.groups_per_step
        if group.stopped:
            return group.stopped
        if len(step.chosen - {group.number}) >= wanted:
            return "surplus"
        good = group.ended("completed")
        oldest = min((done.oldest_version for done in good), default=group.min_version)
        if oldest < group.min_version:
            allowed = f"step {group.step} takes none before {group.min_version}"
            self._last_failure = f"group {group.number} has a token of version {oldest}, and {allowed}"
            self._note(f"{self._last_failure}: it is stored and not trained, and another takes its place")
            return "stale"
        rewards = [done.reward for done in good]
        if self._settings.filter == "informative" and len(rewards) > 1 and min(rewards) == max(rewards):
            if step.filtered < (_REPLACEMENTS - 1) * wanted and step.next < GROUPS_PER_STEP_LIMIT:
                return "filtered"
            if not self._filter_is_spent:
                self._filter_is_spent = True
                self._note(
                    f"step {group.step}: {step.filtered} groups had equal rewards and were replaced; further ones train, "
                    "without a gradient (said once)"
                )
        step.chosen.add(group.number)
        return "trains"

    def _stop(self, group: _Group, why: Literal["failed", "surplus"]) -> None:
        """Nobody needs this group any more: its members end as soon as they can."""
        if group.stopped:
            return
        group.stopped = why
        self._permits.withdraw(group.number)
        for member in group.members:
            if member.call is not None:
                self._spawn(self._cancel(member.call, member.pool, member.episode, self._attempt_of(member)))

    async def _cancel(self, call: asyncio.Task[EpisodeDone], pool: str, episode: str, attempt: int) -> None:
        """Ends an attempt. Asked again because the message may be lost, or arrive before the attempt does."""
        for _ in range(_CANCELS):
            await self._clear(pool, episode, attempt)
            await asyncio.wait({call}, timeout=_GRACE_S)
            if call.done():
                return
        call.cancel()  # the fence around its record shuts out whatever the pool still sends

    # -- episodes ----------------------------------------------------------------------------------------------------

    async def _run_member(self, group: _Group, number: int, after: asyncio.Future[None] | None) -> None:
        """Carries an episode to its end, with exactly one record of it in the store: `done` of the member says which.
        It begins once `after`, the sibling that it forks from, has ended.

        Retried: infrastructure failures, of evaluations and under the policy "retry". A failure of kind "data" counts
        for the quarantine of its task, and so does an episode that failed at each of several attempts in the same words,
        the pools' names aside (the latter is not known to a restarted dispatcher). An attempt that a draining pool did not
        finish is moved: another runs, and it counts as no failure, at most `_MOVES` times.
        """
        settings, member = self._settings, group.members[number]
        allowed = settings.attempts if group.kind == "eval" or settings.on_failure == "retry" else 1
        last = _lost(member.done) if group.stopped and member.done else None
        member.done = None
        failures: list[str] = []
        moves = 0
        self._in_flight += 1
        try:
            if after is not None:
                await asyncio.wait({after})
            while not group.stopped and len(failures) < allowed:
                last = await self._attempt(group, number, avoid=last.pool if last else "")
                self._tokens += last.tokens
                if last.status == "completed" and last.stored:
                    break
                if last.failure_kind == "data":
                    self._tell(member.episode, last, "the task's own failure is not retried")
                    self._suspect(group.task, member.episode, last.failure)
                    break
                if last.status == "cancelled" and moves < _MOVES and not group.stopped:
                    moves += 1
                    self._moved += 1
                elif not group.stopped:
                    failures.append(last.failure.replace(last.pool, "") if last.pool else last.failure)
                    again = len(failures) < allowed
                    self._retried += again
                    self._tell(member.episode, last, "such episodes are retried" if again else "the episode counts as failed")
            alike = len(failures) == allowed > 1 and len(set(failures)) == 1
            if alike and last is not None and last.failure_kind == "infrastructure":
                self._suspect(group.task, member.episode, f"{allowed} attempts alike: {last.failure}")
            if last is None or not last.stored:
                last = await self._record(group, number, last)
            member.done = last
        finally:
            self._in_flight -= 1
        # The first failure by which the group cannot train any more ends the others.
        broken = sum(m.done is not None and m.done.status != "completed" for m in group.members)
        needed = min(2, len(group.members)) if settings.on_failure == "drop-episode" else len(group.members)
        if group.kind == "train" and len(group.members) - broken < needed:
            self._stop(group, "failed")

    async def _attempt(self, group: _Group, number: int, avoid: str) -> EpisodeDone:
        """One attempt, from its permit to its end. A pool that refuses has not begun: another permit is waited for, at
        most `episode_s` long. An attempt that nobody needs any more ends as cancelled."""
        member, clock = group.members[number], self._context.clock
        deadline = math.inf
        while True:
            pool = "" if group.stopped else await self._permits.take(group.kind, member.place, group.number, avoid)
            if not pool:
                return self._unstored(member, "cancelled")
            try:
                return await self._run_at(pool, group, number)
            except (NotReady, Overloaded) as error:
                avoid, deadline = pool, min(deadline, clock.now() + group.limits.episode_s)
                if clock.now() >= deadline:
                    reason = f"no pool took it for {group.limits.episode_s:g} s: {error}"
                    return self._unstored(member, "failed", pool, reason)
                await asyncio.sleep(_PAUSE_S)
            finally:
                self._permits.give(pool)

    async def _run_at(self, pool: str, group: _Group, number: int) -> EpisodeDone:
        """Lets `pool` run the next attempt. Raises NotReady or Overloaded if it refuses. A pool that refuses or is lost
        gets no more episodes until the company says again that it lives."""
        member = group.members[number]
        attempt = self._attempt_of(member)
        if member.tries:
            await self._fence(member.episode, attempt)
        if group.stopped:
            return self._unstored(member, "cancelled")
        message = RunEpisode(
            episode=member.episode,
            attempt=attempt,
            group=group.number,
            member=number,
            kind=group.kind,
            step=group.step,
            task=group.task,
            sampling=group.sampling,
            limits=group.limits,
            seed=member.seed,
            sibling=self._sibling(group, number),
            min_version=group.min_version,
        )
        seconds = group.limits.episode_s + 120.0
        work = within(seconds, f"{pool}.run_episode({member.episode})", self._pool(pool).run_episode(message))
        call = member.call = asyncio.ensure_future(work)
        member.pool = pool
        await asyncio.wait({call})
        member.call = None
        error = None if call.cancelled() else call.exception()
        if isinstance(error, (NotReady, Overloaded)):
            self._permits.close(pool)
            raise error
        member.tries += 1
        if isinstance(error, (ActorLost, TimedOut)):
            # Perhaps only the message was lost and the pool lives: then it must not go on with this attempt.
            self._permits.close(pool)
            await self._clear(pool, member.episode, attempt)
        elif error is not None and not isinstance(error, TroupeError):
            raise error
        if call.cancelled() or (error is not None and (group.stopped or pool in self._draining)):
            return self._unstored(member, "cancelled", pool)
        return call.result() if error is None else self._unstored(member, "failed", pool, str(error))

    async def _record(self, group: _Group, number: int, last: EpisodeDone | None) -> EpisodeDone:
        """Writes the record that no pool has written: of an episode that never began, or whose pool was lost.

        Under an attempt number of its own: should the pool have written one after all, it is refused, so that what is
        believed here is what is stored.
        """
        member = group.members[number]
        attempt = self._attempt_of(member)
        if member.tries:
            await self._fence(member.episode, attempt)
        member.tries += 1
        last = last or self._unstored(member, "cancelled")
        failed = last.status == "failed" or not group.stopped
        status: Literal["failed", "cancelled"] = "failed" if failed else "cancelled"
        reason = last.failure or f"its end ({last.status}) could not be stored"
        trajectory = Trajectory(
            id=member.episode,
            attempt=attempt,
            group=group.number,
            member=number,
            kind=group.kind,
            step=group.step,
            task=group.task,
            status=status,
            stop=status,
            failure=Failure(last.failure_kind or "infrastructure", "EpisodeError", reason, last.pool) if failed else None,
            pool=last.pool,
            seed=member.seed,
            started_at=self._context.clock.now(),
        )
        await self._patiently("store.deposit", lambda: self._store.deposit(Deposit(trajectory)))
        return replace(last, attempt=attempt, status=status, stop=status, stored=True, reward=0.0, success=None)

    def _forks_from(self, group: _Group, number: int) -> int | None:
        return sibling_of(number, self._settings.tree) if group.kind == "train" else None

    def _sibling(self, group: _Group, number: int) -> Sibling | None:
        """What a member forks from. One that broke or was not stored is no beginning: the member begins at the start."""
        before = self._forks_from(group, number)
        done = None if before is None else group.members[before].done
        if done is None or done.status != "completed" or not done.stored:
            return None
        return Sibling(done.episode, done.attempt, self._settings.tree_segment)

    def _attempt_of(self, member: _Member) -> int:
        """The number of its next attempt, or of the one that runs."""
        return self._first_attempt + member.tries

    def _unstored(self, member: _Member, status: Literal["failed", "cancelled"], pool: str = "", why: str = "") -> EpisodeDone:
        """How an attempt ended of which no pool gave notice."""
        kind: Literal["infrastructure", ""] = "infrastructure" if status == "failed" else ""
        attempt = self._attempt_of(member)
        return EpisodeDone(member.episode, attempt, status, status, stored=False, pool=pool, failure_kind=kind, failure=why)

    def _suspect(self, task: Task, episode: str, message: str) -> None:
        """A failure that is the task's own. The last of several ends whatever runs it, here and now."""
        if self._quarantine.report(task.id, episode, message):
            self._note(f"task {task.id} is quarantined: {self._settings.quarantine_after} failures of its own; last: {message}")
            for group in list(self._groups.values()):
                if group.task.id == task.id:
                    self._stop(group, "failed")

    # -- others ------------------------------------------------------------------------------------------------------

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._broken = f"dispatcher: {type(task.exception()).__name__}: {task.exception()}"

    def _pool(self, name: str) -> EnvPool:
        return self._context.ref(name, EnvPool)

    async def _clear(self, pool: str, episode: str = "", attempt: int | None = None) -> bool:
        """Ends what an earlier dispatcher, or a call that was given up, left running in `pool`. False if it did not hear."""
        last = self._first_attempt - 1 if attempt is None else attempt
        try:
            await within(30.0, f"{pool}.cancel", self._pool(pool).cancel(CancelEpisode(episode, last)))
        except (ActorLost, NotReady, TimedOut):
            return False  # probably it is gone, and what it ran with it
        return True

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

    def _tell(self, episode: str, done: EpisodeDone, what: str) -> None:
        """Says how an attempt broke: one sentence for the many episodes of a pool that died."""
        reason = done.failure or f"{done.pool} ended it as {done.status}"
        if reason != self._last_failure:
            self._last_failure = reason
            self._note(f"{episode}: {reason} ({what})")

    def _note(self, text: str) -> None:
        self._events.append(text)


def _gate(group_size: int) -> asyncio.Semaphore:
    """Lets in groups of that size, first come first served, until their episodes are `_OPEN_EPISODES`."""
    return asyncio.Semaphore(max(1, _OPEN_EPISODES // group_size))


def _lost(done: EpisodeDone) -> EpisodeDone:
    """What is left of an ended episode whose record the store lost, in a group that is not run again."""
    return replace(done, stored=False, status="cancelled" if done.status == "completed" else done.status)


def seed_of(*parts: int) -> int:
    """A 62-bit seed from several integers, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big") >> 2
