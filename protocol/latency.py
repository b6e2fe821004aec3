"""How long calls take, as a histogram: buckets that are the same everywhere, so that those of many processes add up.

Promises:
- twenty buckets a factor of ten, from 10 µs to 1,000 s: a quantile is right to 6 % of itself (half a bucket) within that range;
- only buckets that hold something travel; counts, the sum and the longest are exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field, replace

from pydantic import ConfigDict

_SHORTEST_S = 1e-5
_A_DECADE = 20
_LAST = 8 * _A_DECADE + 1
"""Bucket 0 is for what is shorter than the range, the last for what is longer; bucket i ends at 10 µs · 10^(i/20)."""


@dataclass(slots=True)
class Histogram:
    """buckets: number of the bucket → calls in it. seconds: of all calls together. longest: of one, in seconds."""

    __pydantic_config__ = ConfigDict(extra="forbid")
    buckets: dict[int, int] = field(default_factory=dict)
    seconds: float = 0.0
    longest: float = 0.0

    @property
    def count(self) -> int:
        """How many calls."""
        return sum(list(self.buckets.values()))

    def record(self, seconds: float) -> None:
        """One more call. Only one thread may record; others may read meanwhile."""
        place = 0 if seconds < _SHORTEST_S else 1 + math.floor(math.log10(seconds / _SHORTEST_S) * _A_DECADE)
        place = min(_LAST, place)
        self.buckets[place] = self.buckets.get(place, 0) + 1
        self.seconds += seconds
        self.longest = max(self.longest, seconds)

    def merge(self, other: Histogram) -> None:
        """Adds the calls of `other`."""
        for place, count in other.buckets.items():
            self.buckets[place] = self.buckets.get(place, 0) + count
        self.seconds += other.seconds
        self.longest = max(self.longest, other.longest)

    def since(self, earlier: Histogram) -> Histogram:
        """The calls that came after `earlier`, a former state of the same histogram. Their longest is not known any more:
        it is that of all."""
        counts = {place: count - earlier.buckets.get(place, 0) for place, count in self.buckets.items()}
        return Histogram(
            {place: count for place, count in counts.items() if count}, max(0.0, self.seconds - earlier.seconds), self.longest
        )

    def copy(self) -> Histogram:
        """As it is now."""
        return replace(self, buckets=dict(self.buckets))

    def quantile(self, share: float) -> float | None:
        """Seconds within which that share (0 to 1) of the calls returned; None if there were none."""
        rank, seen = max(1, math.ceil(share * self.count)), 0
        for place in sorted(self.buckets):
            seen += self.buckets[place]
            if seen >= rank:
                return min(self.longest, _middle(place))
        return None


Latencies = dict[str, dict[str, Histogram]]
"""World → call (reset, step, verify, close) → how long those calls took."""


def add(total: Latencies, more: Latencies) -> None:
    """Adds `more` to `total`."""
    for world, calls in more.items():
        for call, histogram in calls.items():
            total.setdefault(world, {}).setdefault(call, Histogram()).merge(histogram)


def of_call(latencies: Latencies, call: str) -> Histogram:
    """That call of all worlds together."""
    whole = Histogram()
    for calls in latencies.values():
        whole.merge(calls.get(call, Histogram()))
    return whole


def copied(latencies: Latencies) -> Latencies:
    """As they are now."""
    return {
        world: {call: histogram.copy() for call, histogram in list(calls.items())} for world, calls in list(latencies.items())
    }


def _middle(place: int) -> float:
    """What stands for a bucket: the geometric middle of its ends."""
    if place == 0:
        return _SHORTEST_S
    if place == _LAST:
        return math.inf
    return float(_SHORTEST_S * 10 ** ((place - 0.5) / _A_DECADE))
