"""What an actor did and when, as it keeps it until somebody asks.

Promises:
- to note a span costs microseconds, sends nothing and writes nothing;
- it is bounded: the oldest spans are forgotten, the totals are not;
- to ask takes nothing away, so that an answer may be lost, and a new asker may go on where the one before has stopped.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from troupe.protocol.messages import GetSpans, Span, Spans, Track

_KEPT = 1000
_SAMPLE_S = 0.25
"""Numbers that change more often are noted so often."""
_GAP_S = 0.005
"""Of work in flight: a shorter pause is none."""


class SpanLog:
    """One actor's. Only one thread at a time may add to it; any may ask. now: seconds since the epoch."""

    def __init__(self, now: Callable[[], float] = time.time) -> None:
        self.now, self.born = now, now()
        self.totals: dict[str, float] = {}
        self._kept: deque[Span] = deque(maxlen=_KEPT)
        self._count = 0
        self._noted: dict[str, float] = {}
        self._changed: dict[str, Span] = {}

    def add(
        self, name: str, begin: float, end: float | None = None, *, track: Track = "", beside: bool = False, **labels: Any
    ) -> None:
        """Something that began at `begin` and has ended, now if no `end` is given. Counts for the total of its name."""
        end = max(begin, self.now() if end is None else end)
        self.tally(name, end - begin)
        self.keep(Span(name, begin, end, track, beside, labels))

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
            self.keep(before)
        self._noted[name] = moment
        self.keep(Span(name, moment, moment, value=value))

    def tally(self, name: str, seconds: float) -> None:
        """Adds to a total, without a span."""
        self.totals[name] = self.totals.get(name, 0.0) + seconds

    def keep(self, span: Span) -> None:
        """A span as it is, without a total."""
        self._kept.append(span)
        self._count += 1

    def take(self) -> list[Span]:
        """All that is kept, which is then forgotten: for who passes it on."""
        found = list(self._kept)
        self._kept.clear()
        return found

    def told(self, name: str, asked: GetSpans) -> Spans:
        """The answer of the actor called `name`."""
        while self._changed:
            self.keep(self._changed.popitem()[1])
        new = min(self._count - asked.since, asked.limit, len(self._kept))
        return Spans(name, self.born, self._count, list(self._kept)[len(self._kept) - max(0, new) :], dict(self.totals))


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
