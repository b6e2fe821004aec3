"""How many environment pools a run should have: a rule without actors, fed with what is seen of them every few seconds.

Promises:
- the number stays within the bounds, and leaves them at once if it was outside;
- out: episodes have waited for a slot (or worlds were slow) in every look for `out_s`; then by as many pools as those that
  wait would fill, at most doubling;
- in: the most that was wanted at any look of the last `in_s` fits into fewer pools with room to spare (`_FULL`); a pause
  that is shorter, such as a step of an on-policy learner, takes nothing away;
- constant load settles: what went out does not come in again. A pool's capacity is its slots, or what it held when it was
  slow; it is forgotten when nothing was wanted for `in_s`.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass

_FULL = 0.8
"""Share of the capacity that is used at most after a scale-in."""
_LATE_S = 0.5
"""An event loop that is later than that is overloaded."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One look. at: seconds on any clock. pools: that take episodes, with `slots` each; used: slots that are taken in all of
    them. queued: episodes that wait for one. step_s: 90 % of the world steps since the look before took no longer; None:
    there were none. lag: seconds by which the pools' event loops are late, on average."""

    at: float
    pools: int
    slots: int
    used: int
    queued: int
    step_s: float | None = None
    lag: float = 0.0


@dataclass(frozen=True, slots=True)
class Decision:
    """The wanted number of pools, other than what there is, and why, in words."""

    pools: int
    why: str


class Scaling:
    """The rule of one run. slow_step_s: `step_s` above which worlds are slow; None: they may be as slow as they are."""

    def __init__(
        self, least: int, most: int, out_s: float = 10.0, in_s: float = 60.0, slow_step_s: float | None = None
    ) -> None:
        self._least, self._most = least, most
        self._out_s, self._in_s, self._slow_step_s = out_s, in_s, slow_step_s
        self._pressed_since: float | None = None
        self._wanted: deque[tuple[float, int]] = deque()
        """(at, episodes) of the looks of the last `in_s`, and of the one before them."""
        self._slow_with = math.inf
        """Episodes a pool that were too many."""

    def decide(self, sample: Sample) -> Decision | None:
        """What should change now; None: nothing."""
        at, pools = sample.at, sample.pools
        slow = self._slow(sample)
        self._remember(sample, slow)
        if not self._least <= pools <= self._most:
            return self._change(self._bounded(pools), f"it is {self._least} to {self._most} of them")
        if not (sample.queued or slow):
            self._pressed_since = None
        elif self._pressed_since is None:
            self._pressed_since = at
        elif at - self._pressed_since >= self._out_s and pools < self._most:
            more = min(pools, max(1, math.ceil(sample.queued / sample.slots)))
            waiting = f"{sample.queued} episode{'s wait' if sample.queued != 1 else ' waits'}"
            return self._change(self._bounded(pools + more), waiting if sample.queued else slow)
        needed = self._bounded(self._needed(sample.slots))
        if needed < pools and not sample.queued and not slow and self._wanted[0][0] <= at - self._in_s:
            most = max(episodes for _, episodes in self._wanted)
            if most == 0:
                self._slow_with = math.inf
            why = f"at most {most} of {pools * sample.slots} slots were used for {self._in_s:g} s"
            return self._change(needed, why)
        return None

    def rest(self) -> None:
        """The number was changed, perhaps by somebody else: what was seen before says nothing any more."""
        self._pressed_since = None
        self._wanted.clear()

    def _change(self, pools: int, why: str) -> Decision:
        self.rest()
        return Decision(pools, why)

    def _bounded(self, pools: int) -> int:
        return min(self._most, max(self._least, pools))

    def _needed(self, slots: int) -> int:
        """Pools for the most that was wanted lately."""
        most = max(episodes for _, episodes in self._wanted)
        return math.ceil(most / (_FULL * min(slots, self._slow_with)))

    def _slow(self, sample: Sample) -> str:
        """Why the pools count as overloaded; empty if they do not."""
        if not sample.used:
            return ""
        if sample.lag > _LATE_S:
            return f"event loops are {sample.lag:.1f} s late"
        if self._slow_step_s is not None and sample.step_s is not None and sample.step_s > self._slow_step_s:
            return f"90 % of the world steps take up to {sample.step_s:.2g} s"
        return ""

    def _remember(self, sample: Sample, slow: str) -> None:
        episodes = sample.used + sample.queued
        self._wanted.append((sample.at, episodes))
        while len(self._wanted) > 1 and self._wanted[1][0] <= sample.at - self._in_s:
            self._wanted.popleft()
        if slow and sample.pools:
            self._slow_with = min(self._slow_with, max(1.0, sample.used / sample.pools))
