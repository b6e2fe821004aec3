"""What an actor did and when, as it keeps it until somebody asks.

Promises:
- to note a span costs microseconds, sends nothing and writes nothing;
- it is bounded: the oldest spans are forgotten, the totals are not; numbers push out no spans, and neither pushes out when the
  actor was busy;
- to ask takes nothing away, so that an answer may be lost, and a new asker may go on where the one before has stopped.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, TypeVar

from troupe.protocol.messages import GetSpans, Span, Spans, Track

T = TypeVar("T")

_KEPT = 1000
"""Spans, and as many numbers."""
_BUSY = 10_000
"""Spans of which it is known when they were, and no more."""
_SAMPLE_S = 0.25
"""Numbers that change more often are noted so often."""
_GAP_S = 0.005
"""Of work in flight: a shorter pause is none."""


class SpanLog:
    """One actor's. Only one thread at a time may add to it; any may ask. now: seconds since the epoch. busy: the name of the
    spans in which the actor is so."""

    def __init__(self, now: Callable[[], float] = time.time, busy: str = "") -> None:
        self.now, self.born = now, now()
        self.totals: dict[str, float] = {}
        self._kept: deque[tuple[int, Span]] = deque(maxlen=_KEPT)
        self._numbers: deque[tuple[int, Span]] = deque(maxlen=_KEPT)
        self._moments: deque[tuple[int, tuple[float, float]]] = deque(maxlen=_BUSY)
        self._busy = busy
        self._count = 0
        self._noted: dict[str, float] = {}
        self._changed: dict[str, Span] = {}

    def add(
        self, name: str, begin: float, end: float | None = None, *, track: Track = "", beside: bool = False, **labels: Any
    ) -> None:
        """Something that began at `begin` and has ended, now if no `end` is given. Counts for the total of its name."""
        end = max(begin, self.now() if end is None else end)
        self.tally(name, end - begin)
        if name == self._busy:
            self._moments.append((self._count, (begin, end)))
        self._keep(self._kept, Span(name, begin, end, track, beside, labels))

    @contextmanager
    def of(self, name: str, *, track: Track = "", **labels: Any) -> Iterator[None]:
        """What is done inside, however it ends."""
        begin = self.now()
        try:
            yield
        finally:
            self.add(name, begin, track=track, **labels)

    def sample(self, name: str, value: float) -> None:
        """A number as it is from now on."""
        moment = self.now()
        before = self._changed.pop(name, None)
        if moment - self._noted.get(name, 0.0) < _SAMPLE_S:
            self._changed[name] = Span(name, moment, moment, value=value)
            return
        if before is not None:
            self._keep(self._numbers, before)
        self._noted[name] = moment
        self._keep(self._numbers, Span(name, moment, moment, value=value))

    def tally(self, name: str, seconds: float) -> None:
        """Adds to a total, without a span."""
        self.totals[name] = self.totals.get(name, 0.0) + seconds

    def take(self) -> list[Span]:
        """All spans that are kept, which are then forgotten: for who passes them on."""
        found = [span for _, span in list(self._kept)]
        self._kept.clear()
        return found

    def told(self, name: str, asked: GetSpans) -> Spans:
        """The answer of the actor called `name`."""
        while self._changed:
            self._keep(self._numbers, self._changed.popitem()[1])
        spans = _newest(self._kept, asked.since, asked.limit)
        spans += _newest(self._numbers, asked.since, asked.limit - len(spans))
        told = [span for _, span in sorted(spans, key=lambda one: one[0])]
        busy = [moments for _, moments in _newest(self._moments, asked.since, _BUSY)]
        return Spans(name, self.born, self._count, told, dict(self.totals), busy)

    def _keep(self, kept: deque[tuple[int, Span]], span: Span) -> None:
        kept.append((self._count, span))
        self._count += 1


def _newest(kept: deque[tuple[int, T]], since: int, limit: int) -> list[tuple[int, T]]:
    """Those numbered from `since` on, at most the newest `limit`."""
    new = [one for one in list(kept) if one[0] >= since]  # a copy first: its actor may go on adding
    return new[max(0, len(new) - limit) :]


class InFlight:
    """Work of which several pieces go on at a time: `with` each of them. Notes when there are any (as `name`), and how many (as
    `number`)."""

    def __init__(self, log: SpanLog, name: str, number: str) -> None:
        self._log, self._name, self._number = log, name, number
        self._pieces = 0
        self._begin = self._end = 0.0

    def __enter__(self) -> None:
        moment = self._log.now()
        if not self._pieces and moment - self._end > _GAP_S:
            self.cut()
            self._begin = moment
        self._pieces += 1
        self._log.sample(self._number, self._pieces)

    def __exit__(self, *exc: object) -> None:
        self._pieces -= 1
        self._end = self._log.now()
        self._log.sample(self._number, self._pieces)

    def cut(self) -> None:
        """Notes what there is until now. To be called before the log is told."""
        end = self._log.now() if self._pieces else self._end
        if end > self._begin > 0:
            self._log.add(self._name, self._begin, end)
        self._begin = end
