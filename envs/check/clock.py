"""The clock of another day, so that a world that reads the clock gives another episode.

Promises: what Python says of the date and the time of day is moved, for all that is imported meanwhile; what only measures how
long something takes (monotonic, perf_counter) is not; all is as it was afterwards.
"""

from __future__ import annotations

import contextlib
import ctypes
import datetime
import gc
import time
from collections.abc import Callable, Iterator
from typing import Any

LATER_S = 90_061
"""A day, an hour, a minute and a second: each of them is another one, and odd where it was even."""

_TAKES = {"localtime": 0, "gmtime": 0, "ctime": 0, "asctime": 0, "strftime": 1}  # arguments without which it is now


class Clock:
    """The time that is told. seconds: by which it is ahead of the real one."""

    def __init__(self) -> None:
        self.seconds = 0.0
        self._time = time.time

    def at(self, when: float) -> None:
        """It is `when` now, in seconds since 1970."""
        self.seconds = when - self._time()

    def now(self) -> float:
        """Seconds since 1970."""
        return self._time() + self.seconds


class _Told:
    """A function of the module `time`: not a Python function, which a class would make a method of."""

    def __init__(self, tell: Callable[..., Any]) -> None:
        self._tell = tell

    def __call__(self, *given: Any) -> Any:
        return self._tell(*given)


@contextlib.contextmanager
def moved() -> Iterator[Clock]:
    """The process's clock, for the time of the block. One at a time."""
    clock = Clock()
    before = {name: getattr(time, name) for name in ("time", "time_ns", "clock_gettime", "clock_gettime_ns", *_TAKES)}

    def of(name: str, least: int) -> Callable[..., Any]:
        def tell(*given: Any) -> Any:
            if len(given) > least and given[least] is not None:
                return before[name](*given)
            second = clock.now()
            return before[name](
                *given[:least], second if name in ("localtime", "gmtime", "ctime") else before["localtime"](second)
            )

        return tell

    def read(name: str, ahead: Callable[[], float]) -> Callable[..., Any]:
        return lambda which: before[name](which) + (ahead() if which == time.CLOCK_REALTIME else 0)

    def ahead_ns() -> int:
        return int(clock.seconds * 10**9)

    told = {name: of(name, least) for name, least in _TAKES.items()}
    told |= {"time": clock.now, "time_ns": lambda: before["time_ns"]() + ahead_ns()}
    told |= {
        "clock_gettime": read("clock_gettime", lambda: clock.seconds),
        "clock_gettime_ns": read("clock_gettime_ns", ahead_ns),
    }
    for name, tell in told.items():
        setattr(time, name, _Told(tell))
    # `today` of a date asks the module `time`. `now` and `utcnow` do not, and a subclass instead of their class would not be
    # the class of what C makes.
    methods = gc.get_referents(datetime.datetime.__dict__)[0]
    kept = {name: methods[name] for name in ("now", "utcnow")}
    try:
        for name, method in kept.items():
            methods[name] = classmethod(_later(method, clock))
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(datetime.datetime))
        yield clock
    finally:
        methods.update(kept)
        ctypes.pythonapi.PyType_Modified(ctypes.py_object(datetime.datetime))
        for name, tell in before.items():
            setattr(time, name, tell)


def _later(method: Any, clock: Clock) -> Callable[..., Any]:
    def now(cls: type[datetime.datetime], *given: Any, **named: Any) -> Any:
        if (zone := next(iter((*given, *named.values())), None)) is None:
            return method.__get__(None, cls)() + datetime.timedelta(seconds=clock.seconds)
        return (method.__get__(None, cls)(datetime.UTC) + datetime.timedelta(seconds=clock.seconds)).astimezone(zone)

    return now
