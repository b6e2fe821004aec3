"""Time limits of many waits at once: one timer for all that last equally long, instead of one each.

Owns who waits with a limit on which event loop. Waits of the same length end in the order in which they began, so a timer for
the first of them is enough; a limit is then an entry in a dict, where `asyncio.timeout` makes, starts and cancels a timer.
Promises, as `asyncio.timeout` does:
- a wait that is over its limit is cancelled and leaves its block as TimeoutError;
- a cancellation by somebody else stays one, even if it comes together with the limit;
- a wait that ends in time leaves nothing behind but the timer, which finds nobody.
"""

from __future__ import annotations

import asyncio
from contextvars import Context
from types import TracebackType
from weakref import WeakKeyDictionary


class Deadline:
    """`with Deadline(seconds):` around what the running task awaits."""

    __slots__ = ("_before", "_queue", "_seconds", "_task", "at", "expired")

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self.at = 0.0
        """The moment of the loop's clock at which the wait is over."""
        self.expired = False
        """Has it ended the wait?"""

    def __enter__(self) -> None:
        loop = asyncio.get_running_loop()
        task = asyncio.current_task(loop)
        if task is None:
            raise RuntimeError("a deadline is for what a task awaits")
        self._task, self._before = task, task.cancelling()
        self._queue = _queue_of(loop, self._seconds)
        self._queue.add(self, loop)

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self._queue.waiting.pop(self, None)
        if self.expired and self._task.uncancel() <= self._before and kind is asyncio.CancelledError:
            raise TimeoutError from error

    def expire(self) -> None:
        """Ends the wait."""
        self.expired = True
        self._task.cancel()


class _Queue:
    """All that wait equally long, in the order in which they began. (It does not hold the loop, whose it is.)"""

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._timed = False
        self.waiting: dict[Deadline, None] = {}

    def add(self, one: Deadline, loop: asyncio.AbstractEventLoop) -> None:
        one.at = loop.time() + self._seconds
        self.waiting[one] = None
        if not self._timed:
            self._timed = True
            loop.call_at(one.at, self._look, context=Context())

    def _look(self) -> None:
        loop = asyncio.get_running_loop()
        for one in list(self.waiting):
            if one.at > loop.time():
                loop.call_at(one.at, self._look, context=Context())
                return
            del self.waiting[one]
            one.expire()
        del _queues[loop][self._seconds]  # until somebody waits so long again


_queues: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[float, _Queue]] = WeakKeyDictionary()


def _queue_of(loop: asyncio.AbstractEventLoop, seconds: float) -> _Queue:
    queues = _queues.get(loop)
    if queues is None:
        queues = _queues[loop] = {}
    queue = queues.get(seconds)
    if queue is None:
        queue = queues[seconds] = _Queue(seconds)
    return queue
