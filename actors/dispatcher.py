"""Decides which groups of episodes run when, and makes each durable with its verdict. docs/dispatch.md explains the rules.

`quota.py` counts what a step needs and says which groups train, `carrier.py` brings each episode to exactly one end; here
groups are made, begun and committed. Promises:
- emit everything: every dispatched episode reaches the store exactly once, as completed, failed or cancelled, in a
  committed group (law 3);
- groups are born for a training step and numbered, which fixes task, seed and ids: a restarted dispatcher asks the store which
  groups are durable and runs exactly the others again (law 7);
- a group asks for weights no older than `step − 1 − max_staleness`; one with an older token all the same is told of and
  never trained (law 4);
- what fails, is filtered, too old or too late is stored and never trained; `BIAS` says what each policy does to the data;
- an evaluation has its own sampling, shares the slots fairly, and is never part of a batch (law 8);
- nothing waits without a limit: groups that are begun are bounded by the store's room, rounds by a number (law 10).
"""

from __future__ import annotations

import asyncio
import itertools
import os
from collections import Counter
from collections.abc import Coroutine
from functools import partial
from typing import Any

from troupe.actors.carrier import Carrier
from troupe.actors.context import Context
from troupe.actors.groups import EVAL_GROUP, Group, Member, Verdict, seed_of, task_index
from troupe.actors.notes import Notes
from troupe.actors.patience import patiently
from troupe.actors.quota import Quota
from troupe.actors.settings import RolloutSettings
from troupe.actors.store import Store
from troupe.envs import registry
from troupe.protocol.errors import TroupeError
from troupe.protocol.messages import (
    Ack,
    Announce,
    CommitGroup,
    Committed,
    DispatcherStatus,
    Evaluate,
    Evaluated,
    GetCommitted,
    Health,
    Limits,
    Ping,
    Pools,
    PoolsHeard,
    Sampling,
)
from troupe.protocol.trajectory import Status

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

_ATTEMPTS = 1000
"""Attempt numbers of one life of the dispatcher: an episode's attempts (at most 100, see settings) in all rounds fit."""
_ROUNDS = 8
"""How often the store may lose what it held of a group before the run is called broken."""
_OPEN_EPISODES = 8_192
"""Episodes of each kind whose groups are begun and not committed: the store has room for the records of both kinds."""


class Dispatcher:
    """Async: every group at its own pace."""

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
        self._context, self._born = context, context.clock.now()
        self._world = registry.find(world)
        self._settings, self._limits, self._seed = settings, limits, seed
        self._first_attempt = incarnation * _ATTEMPTS
        self._store = context.ref("store", Store)
        self._version = -1
        self._announced = False
        self._places = itertools.count()
        self._gate = _gate(settings.group_size)
        self._groups: dict[int, Group] = {}
        self._notes = Notes()
        self._quota = Quota(settings, steps, self._notes)
        self._carrier = Carrier(context, settings, self._first_attempt, self._groups, self._notes, self._spawn)
        self._tasks: set[asyncio.Task[None]] = set()
        self._ended: Counter[Status] = Counter()
        self._evaluations = 0
        self._broken = ""

    async def start(self) -> None:
        """Learns from the store what is durable, and shuts out whatever an earlier dispatcher left running."""
        await self._carrier.fence("", self._first_attempt)
        known = await self._committed()
        self._quota.restore(known)
        self._carrier.quarantine.restore(known.data_failures)
        self._carrier.tokens = known.tokens
        self._ended.update({"completed": known.completed, "failed": known.failed, "cancelled": known.cancelled})

    # -- messages ----------------------------------------------------------------------------------------------------

    async def pools(self, message: Pools) -> PoolsHeard:
        """Which pools take episodes now, and which only finish theirs."""
        heard = await self._carrier.pools(message)
        self._fill()
        return heard

    async def announce(self, message: Announce) -> Ack:
        """Every generator holds `version`: more groups may start."""
        self._version = max(self._version, message.version)
        self._announced = True
        self._quota.finished(self._version)
        self._fill()
        return Ack()

    async def evaluate(self, message: Evaluate) -> Evaluated:
        """Runs the tasks and returns their scores."""
        # An evaluation that is asked for again (its asker died) runs anew, under numbers and names of its own.
        serial = self._first_attempt + self._evaluations
        self._evaluations += 1
        base = EVAL_GROUP + serial * 1_000_000
        groups = [
            Group(
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
        waiting, used, slots = self._carrier.permits.load()
        return DispatcherStatus(
            version=self._version,
            in_flight=self._carrier.in_flight,
            completed=self._ended["completed"],
            failed=self._ended["failed"],
            cancelled=self._ended["cancelled"],
            retried=self._carrier.retried,
            dropped_groups=self._quota.dropped,
            filtered_groups=self._quota.filtered,
            tokens=self._carrier.tokens,
            quarantined=dict(self._carrier.quarantine.reasons),
            events=self._notes.events(),
            waiting=waiting,
            used=used,
            slots=slots,
            moved=self._carrier.moved,
            stale_groups=self._quota.stale,
            granted=self._carrier.permits.granted,
            queued_s=self._carrier.permits.waited,
            born=self._born,
        )

    async def health(self, message: Ping) -> Health:
        """Load is the number of episodes in flight."""
        return Health(self._context.name, os.getpid(), load=self._carrier.in_flight)

    # -- groups ------------------------------------------------------------------------------------------------------

    def _fill(self) -> None:
        """Starts every group that may start."""
        if not self._announced or self._broken:
            return
        try:
            for number, at in self._quota.due(self._version):
                self._spawn(self._train_group(number, at))
        except TroupeError as error:
            self._broken = str(error)

    async def _train_group(self, number: int, at: int) -> None:
        settings = self._settings
        group = Group(
            number=number,
            kind="train",
            step=at,
            # The run's seed chooses the tasks: runs with different seeds see different ones, a resumed run the same.
            task=self._world.task("train", task_index(self._seed, number)),
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
        for straggler in self._quota.ended(group, verdict):
            if straggler in self._groups:
                self._carrier.stop(self._groups[straggler], "surplus")
        self._fill()

    def _members(self, prefix: str, seeds: list[int]) -> list[Member]:
        return [Member(f"{prefix}-{number:02d}", seed, next(self._places)) for number, seed in enumerate(seeds)]

    async def _run_group(self, group: Group, gate: asyncio.Semaphore) -> Verdict:
        """Runs a group to its end, begun when the gate lets it in. Returns what became of it."""
        self._groups[group.number] = group
        async with gate:
            if group.task.id in self._carrier.quarantine:
                self._carrier.stop(group, "failed")
            verdict = await self._make_durable(group)
        del self._groups[group.number]
        self._ended.update(member.done.status for member in group.members if member.done is not None)
        return verdict

    async def _make_durable(self, group: Group) -> Verdict:
        """Runs all members and commits them; again if the store lost their records before they were committed."""
        reason = ""
        for _ in range(_ROUNDS):
            await self._carrier.run(group)
            verdict = self._quota.judge(group)
            commit = CommitGroup(
                group=group.number,
                kind=group.kind,
                step=group.step,
                episodes=[member.episode for member in group.members],
                trains=verdict == "trains",
            )
            receipt = await patiently(self._context, "store.commit", partial(self._store.commit, commit))
            if receipt.accepted:
                return verdict
            reason = receipt.reason
            known = await self._committed()
            if group.number in known.groups.get(group.step, ()):  # by a late message of the dispatcher before this one
                return "trains"
            if group.number in known.dropped:
                return "failed"
            self._notes.say(f"group {group.number} runs again: {reason}")
        raise TroupeError(f"group {group.number} could not be committed {_ROUNDS} times; last: {reason}")

    async def _committed(self) -> Committed:
        return await patiently(self._context, "store.committed", lambda: self._store.committed(GetCommitted()))

    def _spawn(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.ensure_future(work)
        self._tasks.add(task)
        task.add_done_callback(self._finished)

    def _finished(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and task.exception() is not None:
            self._broken = f"dispatcher: {type(task.exception()).__name__}: {task.exception()}"


def _gate(group_size: int) -> asyncio.Semaphore:
    """Lets in groups of that size, first come first served, until their episodes are `_OPEN_EPISODES`."""
    return asyncio.Semaphore(max(1, _OPEN_EPISODES // group_size))
