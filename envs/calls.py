"""Code that is not ours is called, and ended when it does not return.

Promises: whoever waits for it is told in time, whatever the code does.
- A synchronous call: `WorldKilled` is raised in its thread, again and again for some seconds if it is caught. That ends
  Python code of any kind, but not one long call into C (`time.sleep(1e9)`, a read from a socket): Python has no means for
  that. Such a thread is abandoned and counted by `stuck` until it ends; it is a daemon, so the process can exit.
- An `async` call: it is cancelled. If it ignores that, it is never resumed again; what it holds cannot be freed, so it is
  counted by `stuck` for good. If it waits for a task that the code itself has started and that ignores it as well, that
  task goes on, and is counted until it ends.

What blocks the event loop itself cannot be noticed from inside of it.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import queue
import threading
from collections.abc import Awaitable, Callable, Generator
from concurrent.futures import Executor, Future
from contextlib import suppress
from functools import partial
from typing import Any

_GRACE_S = 1.0  # for an `async` call to end once it is cancelled
_CLOSE_S = 5.0  # for a world to close once its call was killed
_STRIKES_S = (0.02, 0.2, 0.5, 1.0, 2.0)  # pauses after each WorldKilled

Outcome = tuple[Any, BaseException | None]
"""(result, error) of a call: as a value, because futures and tasks treat some exceptions as their own."""


class WorldKilled(BaseException):
    """Raised in the thread of a call that has not returned in time. Not to be caught."""


class Overdue(TimeoutError):
    """A call has used up its time."""


_guard = threading.Lock()
_given_up: list[Callable[[], bool]] = []
"""For each call that was given up: does it still go on?"""


def stuck() -> int:
    """Calls of this process that were given up and have not ended: each keeps a thread, a task or a coroutine until it does.

    May be asked from any thread. A process with many of them is best replaced.
    """
    with _guard:
        _given_up[:] = [goes_on for goes_on in _given_up if goes_on()]
        return len(_given_up)


def count(goes_on: Callable[[], bool]) -> None:
    """One more call that was given up. goes_on: has it not ended yet?"""
    stuck()  # forgets those that have ended: the list is as long as there are threads, no longer
    with _guard:
        _given_up.append(goes_on)


def outcome_of(function: Callable[[], Any]) -> Outcome:
    """Calls it."""
    try:
        return function(), None
    except BaseException as error:
        return None, error


def close_quietly(close: Callable[[], Any]) -> None:
    """Releases what a call that was given up has held."""
    with suppress(BaseException):  # nobody is left to tell: the episode has already been reported as broken
        late = close()
        if inspect.iscoroutine(late):
            asyncio.run(late)


class _Leash:
    """Awaits something of a world's until it is cut: then it is never resumed, whatever it would catch."""

    def __init__(self, awaitable: Awaitable[Any]) -> None:
        self._awaitable = awaitable
        self.cut = False

    async def outcome(self) -> Outcome:
        try:
            return await self, None
        except (asyncio.CancelledError, KeyboardInterrupt):
            raise
        except BaseException as error:
            return None, error

    def __await__(self) -> Generator[Any, Any, Any]:
        inner = _plain(self._awaitable)
        thrown: BaseException | None = None
        while True:
            try:
                waits_for = inner.send(None) if thrown is None else inner.throw(thrown)
            except StopIteration as end:
                return end.value
            thrown = None
            try:
                yield waits_for
            except BaseException as error:
                if self.cut:
                    _keep_for_ever(inner)
                    raise
                thrown = error


def _keep_for_ever(coroutine: Any) -> None:
    """Its memory is the price: freeing a coroutine resumes it once more, and one that catches everything would then go on
    inside of the garbage collector, where nothing can end it."""
    ctypes.pythonapi.Py_IncRef(ctypes.py_object(coroutine))
    count(lambda: True)


async def leashed(awaitable: Awaitable[Any], seconds: float | None = None) -> Outcome:
    """What comes of code that is not ours: its result, or its error as a value. It ends after `seconds` (Overdue), and when
    the caller is cancelled, even if it swallows that."""
    leash = _Leash(awaitable)
    task = asyncio.ensure_future(leash.outcome())
    try:
        await asyncio.wait({task}, timeout=seconds)
    except asyncio.CancelledError:
        await _end(task, leash)
        raise
    if not task.done():
        await _end(task, leash)
        raise Overdue
    return (None, asyncio.CancelledError("without being asked to")) if task.cancelled() else task.result()


async def killable(function: Callable[[], Any], seconds: float, name: str) -> Outcome:
    """What comes of synchronous code that is not ours, in a thread of its own: its result, or its error as a value.

    Raises Overdue after `seconds`. The call is then ended as a world's is, also when the caller is cancelled."""
    thread = KillableThread(name)
    answer: asyncio.Future[Outcome] = asyncio.wrap_future(thread.submit(outcome_of, function))
    try:
        await asyncio.wait({answer}, timeout=seconds)
    finally:
        if late := not answer.done():
            answer.cancel()
            thread.give_up(lambda: None, 0.0)
        else:
            thread.shutdown(wait=False)
    if late:
        raise Overdue
    return answer.result()


async def _plain(awaitable: Awaitable[Any]) -> Any:
    return await awaitable


async def _end(task: asyncio.Task[Outcome], leash: _Leash) -> None:
    """Ends a world's task: first as it may want to end, then as it must."""
    try:
        for cut in (False, True):
            leash.cut = cut
            task.cancel()
            await asyncio.wait({task}, timeout=_GRACE_S)
            if task.done():
                return
    except asyncio.CancelledError:  # whoever waits here does so no longer
        leash.cut = True
        task.cancel()
        raise
    loop = task.get_loop()  # it waits for a task of the world's own, which ignores being cancelled
    count(lambda: not task.done() and not loop.is_closed())


class KillableThread(Executor):
    """An executor of one daemon thread (the standard one keeps a process alive until its last call returns), for functions
    that do not raise. It can be given up: then its call is killed, if that is possible, and it ends."""

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        self._changing = threading.Lock()
        self._act = 0
        """What the thread does: 0 the world's calls, 1 its late close, 2 nothing. Only 0 and 1 may be struck."""
        self._struck = False
        """Was a strike meant for this act? It may land at any moment, or have landed."""
        self._close: Callable[[], Any] | None = None
        self._thread = threading.Thread(target=self._run, name=f"world-{name}", daemon=True)
        self._thread.start()

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._work.put((future, partial(function, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._work.put(None)

    def give_up(self, close: Callable[[], Any], seconds: float) -> None:
        """The call under way has `seconds` left, then it is killed; `close` is the last thing that the thread does."""
        self._close = close
        self._work.put(None)
        if seconds <= 0:
            count(self._thread.is_alive)
        threading.Thread(target=self._kill, args=(seconds,), name=f"{self._thread.name}-killer", daemon=True).start()

    def _kill(self, seconds: float) -> None:
        for act, patience in enumerate((seconds, _CLOSE_S)):
            self._thread.join(max(0.0, patience))
            if act == 0 and seconds > 0 and self._thread.is_alive():
                count(self._thread.is_alive)
            for pause in _STRIKES_S:
                if not self._strike(act):
                    break
                self._thread.join(pause)

    def _strike(self, act: int) -> bool:
        """Raises WorldKilled in the thread, as soon as it runs Python code, if it is in that act."""
        with self._changing:
            self._struck = self._struck or self._act == act
            return self._act == act and bool(_raise_in(self._thread, WorldKilled))

    def _enter(self, act: int) -> None:
        """No strike that was meant for an earlier act lands in this one."""
        while self._act != act:
            with suppress(WorldKilled):
                with self._changing:
                    self._act, struck, self._struck = act, self._struck, False
                if struck:  # perhaps it has not landed yet: it does so here. (To take it back would leave CPython 3.11
                    _raise_in(self._thread, WorldKilled)  # spinning for ever as soon as anybody profiles or traces.)
                    while True:
                        pass

    def _run(self) -> None:
        with suppress(WorldKilled):
            self._serve()
        with suppress(WorldKilled):
            self._enter(1)
            if self._close is not None:
                close_quietly(self._close)
            self._enter(2)

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            future, function = work
            if future.set_running_or_notify_cancel():
                future.set_result(function())
            del work, future, function  # an idle thread must not keep the last episode's objects alive


def _raise_in(thread: threading.Thread, error: type[BaseException]) -> int:
    """Raises `error` in a thread that lives, in the place of one that has not been raised yet."""
    return int(ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread.ident or 0), ctypes.py_object(error)))
