"""Carries each episode of a group to exactly one end, and says how it ended. docs/dispatch.md explains the rules.

Owns the attempts that run, the pools that they run in, and the quarantine. Promises:
- of several attempts only one is recorded: before a new one starts, the store is told to refuse the old one. Where a pool
  left no record (it died, or never began), the carrier writes it (law 3);
- a broken episode never carries a reward: the run's policy says whether it is retried or dropped (law 6). A task that
  always fails is quarantined and never dispatched again;
- with `rollout.tree` a member starts when the sibling that it forks from has ended (see `tree.py`), and waits for no other;
- nothing waits without a limit: permits are bounded by the pools' slots, attempts by a number, calls by seconds (law 10).
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable, Coroutine
from dataclasses import replace
from typing import Any, Literal

from troupe.actors.context import Context, within
from troupe.actors.env_pool import EnvPool
from troupe.actors.groups import Group, Member
from troupe.actors.notes import Notes
from troupe.actors.patience import patiently
from troupe.actors.permits import Permits
from troupe.actors.quarantine import Quarantine
from troupe.actors.settings import RolloutSettings
from troupe.actors.store import Store
from troupe.actors.tree import sibling_of
from troupe.protocol.errors import ActorLost, NotReady, Overloaded, TimedOut, TroupeError
from troupe.protocol.messages import CancelEpisode, Deposit, EpisodeDone, Fence, Pools, PoolsHeard, RunEpisode, Sibling
from troupe.protocol.trajectory import Failure, Task, Trajectory

_GRACE_S = 10.0
"""Seconds that a cancelled attempt has to end; it is asked `_CANCELS` times, then no longer waited for."""
_CANCELS = 3
_PAUSE_S = 0.2
_MOVES = 16
"""How often an episode may be moved, as its pool drains or no generator takes its turns, until that counts as a failure."""


class Carrier:
    """Async: every episode at its own pace.

    groups: those on their way, by number. spawn: lets work go on by itself. `in_flight`, `retried`, `moved` and `tokens` count
    what the dispatcher tells (see `DispatcherStatus`).
    """

    def __init__(
        self,
        context: Context,
        settings: RolloutSettings,
        first_attempt: int,
        groups: dict[int, Group],
        notes: Notes,
        spawn: Callable[[Coroutine[Any, Any, None]], None],
    ) -> None:
        self._context, self._settings, self._first_attempt = context, settings, first_attempt
        self._groups, self._notes, self._spawn = groups, notes, spawn
        self._store = context.ref("store", Store)
        self._cleared: set[str] = set()  # pools in which nothing of an earlier dispatcher runs
        self._draining: set[str] = set()  # pools whose attempts are moved if they do not finish there
        self.permits = Permits()
        self.quarantine = Quarantine(settings.quarantine_after)
        self.in_flight = self.retried = self.moved = self.tokens = 0

    async def pools(self, message: Pools) -> PoolsHeard:
        """Which pools take episodes now, and which only finish theirs."""
        left_over = {name for name in self._draining if self.permits.used(name)}  # ended, and not all of its calls have heard
        self._draining = {*message.draining, *left_over} - message.slots.keys()
        new = [name for name in (*message.slots, *message.draining) if name not in self._cleared]
        heard = await asyncio.gather(*(self._clear(name) for name in new))
        self._cleared.update(name for name, ok in zip(new, heard, strict=True) if ok)
        self.permits.open(message.slots)
        return PoolsHeard({name: self.permits.used(name) for name in message.draining})

    async def run(self, group: Group) -> None:
        """Runs every member to its end; one that has ended before too, because the store has lost its record."""
        running: list[asyncio.Future[None]] = []
        for number in range(len(group.members)):
            before = self._forks_from(group, number)
            work = self._run_member(group, number, None if before is None else running[before])
            running.append(asyncio.ensure_future(work))
        await asyncio.gather(*running)

    def stop(self, group: Group, why: Literal["failed", "surplus"]) -> None:
        """Nobody needs this group any more: its members end as soon as they can."""
        if group.stopped:
            return
        group.stopped = why
        self.permits.withdraw(group.number)
        for member in group.members:
            if member.call is not None:
                self._spawn(self._cancel(member.call, member.pool, member.episode, self._attempt_of(member)))

    async def fence(self, episode: str, attempt: int) -> None:
        """The store refuses attempts of `episode` (of all, if it is an empty string) below `attempt` from now on."""
        await patiently(self._context, "store.fence", lambda: self._store.fence(Fence(episode, attempt)))

    # -- one episode -------------------------------------------------------------------------------------------------

    async def _run_member(self, group: Group, number: int, after: asyncio.Future[None] | None) -> None:
        """Carries an episode to its end, with exactly one record of it in the store: `done` of the member says which.
        It begins once `after`, the sibling that it forks from, has ended.

        Retried: infrastructure failures, of evaluations and under the policy "retry". A failure of kind "data" counts
        for the quarantine of its task, and so does an episode that failed at each of several attempts in the same words,
        the pools' names aside (the latter is not known to a restarted dispatcher). An attempt that a draining pool did not
        finish, or that no generator let finish, is moved: another runs, and it counts as no failure, at most `_MOVES` times.
        """
        settings, member = self._settings, group.members[number]
        allowed = settings.attempts if group.kind == "eval" or settings.on_failure == "retry" else 1
        last = _lost(member.done) if group.stopped and member.done else None
        member.done = None
        failures: list[str] = []
        moves = 0
        self.in_flight += 1
        try:
            if after is not None:
                await asyncio.wait({after})
            while not group.stopped and len(failures) < allowed:
                last = await self._attempt(group, number, avoid=last.pool if last else "")
                self.tokens += last.tokens
                if last.status == "completed" and last.stored:
                    break
                if last.failure_kind == "data":
                    self._tell(member.episode, last, "the task's own failure is not retried")
                    self._suspect(group.task, member.episode, last.failure)
                    break
                if last.status == "cancelled" and moves < _MOVES and not group.stopped:
                    moves += 1
                    self.moved += 1
                elif not group.stopped:
                    failures.append(last.failure.replace(last.pool, "") if last.pool else last.failure)
                    again = len(failures) < allowed
                    self.retried += again
                    self._tell(member.episode, last, "such episodes are retried" if again else "the episode counts as failed")
            alike = len(failures) == allowed > 1 and len(set(failures)) == 1
            if alike and last is not None and last.failure_kind == "infrastructure":
                self._suspect(group.task, member.episode, f"{allowed} attempts alike: {last.failure}")
            if last is None or not last.stored:
                last = await self._record(group, number, last)
            member.done = last
        finally:
            self.in_flight -= 1
        # The first failure by which the group cannot train any more ends the others.
        broken = sum(m.done is not None and m.done.status != "completed" for m in group.members)
        needed = min(2, len(group.members)) if settings.on_failure == "drop-episode" else len(group.members)
        if group.kind == "train" and len(group.members) - broken < needed:
            self.stop(group, "failed")

    async def _attempt(self, group: Group, number: int, avoid: str) -> EpisodeDone:
        """One attempt, from its permit to its end. A pool that refuses has not begun: another permit is waited for, at
        most `episode_s` long. An attempt that nobody needs any more ends as cancelled."""
        member, clock = group.members[number], self._context.clock
        deadline = math.inf
        while True:
            pool = "" if group.stopped else await self.permits.take(group.kind, member.place, group.number, avoid)
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
                self.permits.give(pool)

    async def _run_at(self, pool: str, group: Group, number: int) -> EpisodeDone:
        """Lets `pool` run the next attempt. Raises NotReady or Overloaded if it refuses. A pool that refuses or is lost
        gets no more episodes until the company says again that it lives."""
        member = group.members[number]
        attempt = self._attempt_of(member)
        if member.tries:
            await self.fence(member.episode, attempt)
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
            self.permits.close(pool)
            raise error
        member.tries += 1
        if isinstance(error, (ActorLost, TimedOut)):
            # Perhaps only the message was lost and the pool lives: then it must not go on with this attempt.
            self.permits.close(pool)
            await self._clear(pool, member.episode, attempt)
        elif error is not None and not isinstance(error, TroupeError):
            raise error
        if call.cancelled() or (error is not None and (group.stopped or pool in self._draining)):
            return self._unstored(member, "cancelled", pool)
        return call.result() if error is None else self._unstored(member, "failed", pool, str(error))

    async def _record(self, group: Group, number: int, last: EpisodeDone | None) -> EpisodeDone:
        """Writes the record that no pool has written: of an episode that never began, or whose pool was lost.

        Under an attempt number of its own: should the pool have written one after all, it is refused, so that what is
        believed here is what is stored.
        """
        member = group.members[number]
        attempt = self._attempt_of(member)
        if member.tries:
            await self.fence(member.episode, attempt)
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
        await patiently(self._context, "store.deposit", lambda: self._store.deposit(Deposit(trajectory)))
        return replace(last, attempt=attempt, status=status, stop=status, stored=True, reward=0.0, success=None)

    def _forks_from(self, group: Group, number: int) -> int | None:
        return sibling_of(number, self._settings.tree) if group.kind == "train" else None

    def _sibling(self, group: Group, number: int) -> Sibling | None:
        """What a member forks from. One that broke or was not stored is no beginning: the member begins at the start."""
        before = self._forks_from(group, number)
        done = None if before is None else group.members[before].done
        if done is None or done.status != "completed" or not done.stored:
            return None
        return Sibling(done.episode, done.attempt, self._settings.tree_segment)

    def _attempt_of(self, member: Member) -> int:
        """The number of its next attempt, or of the one that runs."""
        return self._first_attempt + member.tries

    def _unstored(self, member: Member, status: Literal["failed", "cancelled"], pool: str = "", why: str = "") -> EpisodeDone:
        """How an attempt ended of which no pool gave notice."""
        kind: Literal["infrastructure", ""] = "infrastructure" if status == "failed" else ""
        attempt = self._attempt_of(member)
        return EpisodeDone(member.episode, attempt, status, status, stored=False, pool=pool, failure_kind=kind, failure=why)

    def _tell(self, episode: str, done: EpisodeDone, what: str) -> None:
        self._notes.fail(episode, done.failure or f"{done.pool} ended it as {done.status}", what)

    def _suspect(self, task: Task, episode: str, message: str) -> None:
        """A failure that is the task's own. The last of several ends whatever runs it, here and now."""
        if self.quarantine.report(task.id, episode, message):
            self._notes.say(
                f"task {task.id} is quarantined: {self._settings.quarantine_after} failures of its own; last: {message}"
            )
            for group in list(self._groups.values()):
                if group.task.id == task.id:
                    self.stop(group, "failed")

    # -- pools and store ---------------------------------------------------------------------------------------------

    async def _cancel(self, call: asyncio.Task[EpisodeDone], pool: str, episode: str, attempt: int) -> None:
        """Ends an attempt. Asked again because the message may be lost, or arrive before the attempt does."""
        for _ in range(_CANCELS):
            await self._clear(pool, episode, attempt)
            await asyncio.wait({call}, timeout=_GRACE_S)
            if call.done():
                return
        call.cancel()  # the fence around its record shuts out whatever the pool still sends

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


def _lost(done: EpisodeDone) -> EpisodeDone:
    """What is left of an ended episode whose record the store lost, in a group that is not run again."""
    return replace(done, stored=False, status="cancelled" if done.status == "completed" else done.status)
