"""The one way in which pools and checks drive a world, whether its methods are synchronous or `async`.

Promises:
- the world's chance is seeded from the task before each reset;
- what comes back has been looked at: an observation is text that can be encoded, a reward is a finite number, or the
  world has failed; a tool runs only with arguments of the types that it asks for;
- an action that the world cannot read raises InvalidAction (for a tool call also UnknownTool or BadArguments); every other
  exception of the world becomes EnvironmentFailed, with its type and message; errors that already say how an episode broke
  (EpisodeError) pass;
- an episode is over once: of calls that run at the same time, nothing counts after the first Turn that is done;
- a call that takes too long raises TimedOut, which names the world, the method, the seconds, the task and its seed;
- all synchronous methods of one world run in one thread, unless an executor is given, and never two at a time. `async`
  methods run on the event loop, each call as a task of its own; tools that are called together run concurrently.

A call that does not return is ended, and whoever waited for it is told in time whatever the world does:
- a synchronous call: `WorldKilled` is raised in its thread, again and again for some seconds if it is caught. That ends
  Python code of any kind, but not one long call into C (`time.sleep(1e9)`, a read from a socket): Python has no means for
  that. Such a thread is abandoned and counted by `stuck` until it ends; it is a daemon, so the process can exit;
- an `async` call: it is cancelled. If it ignores that, it is never resumed again; what it holds cannot be freed, so it is
  counted by `stuck` for good. If it waits for a task that the world itself has started and that ignores it as well, that
  task goes on, and is counted until it ends;
- a call of a cancelled episode is cancelled at once if it is `async`; if it is synchronous it has the rest of its own time
  to return, and is then ended as above.
The world of a synchronous call that was given up takes no more calls, and is closed, in its thread, when the call has ended.
What runs in a given executor cannot be killed, only counted. What blocks the event loop itself (an `inline` world, or an
`async` method that computes for ever) cannot be noticed from inside of it.
"""

from __future__ import annotations

import asyncio
import ctypes
import inspect
import json
import math
import queue
import threading
import time
from collections.abc import Awaitable, Callable, Generator
from concurrent.futures import Executor, Future
from contextlib import suppress
from functools import partial
from typing import Any, TypeGuard

from pydantic_core import to_jsonable_python

from troupe.envs.base import Task, TextWorld, ToolCall, Turn, finite
from troupe.envs.tools import ToolWorld, lookup, observed, short, turn_of
from troupe.protocol.errors import (
    BadArguments,
    EnvironmentFailed,
    EpisodeError,
    InvalidAction,
    TimedOut,
    TroupeError,
    UnknownTool,
)

_LONGEST_TEXT = 4_000  # characters of what an error says
_GRACE_S = 1.0  # for an `async` call to end once it is cancelled
_CLOSE_S = 5.0  # for a world to close once its call was killed
_STRIKES_S = (0.02, 0.2, 0.5, 1.0, 2.0)  # pauses after each WorldKilled

Outcome = tuple[Any, BaseException | None]
"""(result, error) of a call: as a value, because futures and tasks treat some exceptions as their own."""


def _nothing() -> None:
    pass


class WorldKilled(BaseException):
    """Raised in the thread of a world's call that has not returned in time. Not to be caught."""


def stuck() -> int:
    """Calls of this process that were given up and have not ended: each keeps a thread, a task or a coroutine until it does.

    May be asked from any thread. A process with many of them is best replaced.
    """
    with _guard:
        _given_up[:] = [goes_on for goes_on in _given_up if goes_on()]
        return len(_given_up)


class Driver:
    """Drives one world through one episode after another.

    world: a TextWorld. executor: where its synchronous methods run; None: in a thread of the driver's own. Worlds
    with `inline = True` are called directly, on the event loop, without a time limit. timeout_s: for each call.
    timed: told of each call that ended, however it did: "reset", "step" (tools too), "verify" (also of an answer) or
    "close", and its seconds by `clock` (an event loop's own may be as coarse as a millisecond).
    """

    def __init__(
        self,
        world: TextWorld,
        *,
        executor: Executor | None = None,
        timeout_s: float = 30.0,
        timed: Callable[[str, float], None] = lambda call, seconds: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self.world = world
        self.timeout_s = timeout_s
        self.name = type(world).__name__
        self._executor, self._timed, self._clock = executor, timed, clock
        self._own: _Thread | None = None
        self._alone = asyncio.Lock()
        self._task: Task | None = None
        self._playing = False
        self._over = False
        self._lost = False
        self._closed = False
        self.failure: TroupeError | None = None
        """What broke the episode, even if whoever called has caught it."""

    async def reset(self, task: Task) -> str:
        """Starts the episode of `task` and returns the first observation.

        Raises EnvironmentFailed, TimedOut, or the world's own EpisodeError (TaskFailed: this task cannot be run).
        """
        self._task, self._playing, self._over = task, False, False
        self.world._begin(task)
        try:
            text = await self._call("reset", partial(self.world.reset, task), call="reset")
        except (ValueError, InvalidAction) as error:  # nothing was asked of the agent yet: this is the world's fault
            raise self._failed("reset", error) from error
        if not isinstance(text, str):
            raise EnvironmentFailed(f"{self._where('reset')} returned {type(text).__name__}, not a str to observe")
        self._playing = True
        return _encodable(text)

    async def step(self, text: str) -> Turn:
        """Applies the agent's action (its message without the think block).

        Raises InvalidAction (the episode goes on), EnvironmentFailed, TimedOut, or the world's own EpisodeError.
        """
        # The answer to a world with tools does nothing but ask for its verdict.
        call = "verify" if type(self.world).step is ToolWorld.step else "step"
        return await self._turn("step", partial(self.world.step, text), lambda found: found, call=call)

    def tools(self) -> list[dict[str, Any]]:
        """What the agent may call now, as OpenAI function objects; [] for a world without tools. Raises EnvironmentFailed."""
        try:
            specs = self.world.tools() if isinstance(self.world, ToolWorld) else []
        except Exception as error:
            raise self._failed("tools", error) from error
        for spec in specs:
            match spec:
                case {"name": str(), "parameters": dict()}:
                    continue
            raise EnvironmentFailed(f"{self._where('tools')}: {str(spec)[:80]} is not {{name, description, parameters}}")
        return specs

    async def call(self, name: str, arguments: dict[str, Any]) -> Turn:
        """Runs a tool. Its text is what the tool returned: a str as it is, None as "", a Turn, anything else as JSON.

        Raises UnknownTool, BadArguments or InvalidAction (the tool refused, or the episode is over already), each of which
        the agent is told while the episode goes on; EnvironmentFailed, TimedOut, or the world's own EpisodeError.
        """
        if not isinstance(self.world, ToolWorld):
            raise UnknownTool(f"no tool '{name[:60]}': {self.name} has none")
        try:
            tool = lookup(self.world, name)
            ready = tool.validated(arguments)
        except (UnknownTool, BadArguments) as error:
            raise type(error)(_encodable(str(error))) from None
        except Exception as error:
            self._playing = False
            raise self._failed(name, error) from error
        return await self._turn(name, partial(tool.run, **ready), observed, beside=True)

    async def verify(self) -> Turn | None:
        """The world's verdict on its state as it is, which ends the episode; None if it has no `verify`.

        For an episode that a limit ends. Raises EnvironmentFailed, TimedOut, or the world's own EpisodeError.
        """
        if not isinstance(self.world, ToolWorld) or type(self.world).verify is ToolWorld.verify:
            return None
        try:
            return await self._turn("verify", self.world.verify, turn_of, call="verify")
        except InvalidAction as error:  # nobody is there to be told
            self._playing = False
            raise self._failed("verify", error.__cause__ or error) from error

    def state_key(self) -> str:
        """The state that the next action is taken from. Raises EnvironmentFailed."""
        return self._text("state_key", self.world.state_key)

    async def state(self) -> dict[str, Any]:
        """A snapshot of the episode as JSON has it, hidden parts included. The episode goes on whatever comes of it.

        Raises EnvironmentFailed for what is no dict that JSON can say, TimedOut, or the world's own EpisodeError.
        """
        snapshot = self.world.state if callable(self.world.state) else partial(TextWorld.state, self.world)  # self.state = …
        try:
            found = to_jsonable_python(await self._call("state", snapshot))
            json.dumps(found, allow_nan=False)
        except (TypeError, ValueError, InvalidAction, RecursionError) as error:
            raise self._failed("state", error) from error
        if not isinstance(found, dict):
            raise EnvironmentFailed(f"{self._where('state')} returned {type(found).__name__}, not a dict")
        return found

    def play(self, rng: Any, noise: float) -> str | ToolCall | None:
        """The scripted player's next message or call, None if the world has no player. Raises EnvironmentFailed."""
        try:
            message = self.world.play(rng, noise)
        except Exception as error:
            raise self._failed("play", error) from error
        return message if message is None or isinstance(message, ToolCall) else self._text("play", lambda: message)

    async def close(self) -> None:
        """Releases the world, once. A lost world is not waited for. Raises EnvironmentFailed or TimedOut."""
        if self._closed:
            return
        self._closed, self._playing = True, False
        try:
            await self.release()
        finally:
            if self._own is not None:
                self._own.shutdown(wait=False)

    async def release(self) -> None:
        """The world's own `close`, as `close` calls it; for who wants to see it called twice."""
        try:
            if not self._lost and type(self.world).close is not TextWorld.close:  # the default does nothing: no thread for it
                await self._call("close", self.world.close, call="close")
        except (ValueError, InvalidAction) as error:
            raise self._failed("close", error) from error

    # -- calling -----------------------------------------------------------------------------------------------------

    async def _turn(
        self,
        method: str,
        function: Callable[[], Any],
        read: Callable[[Any], Any],
        beside: bool = False,
        call: str = "step",
    ) -> Turn:
        """One call within an episode. read: makes a Turn or a str of what came back. beside: others may run meanwhile, so
        the episode may end before this call begins or before it returns."""

        still_playing = self._still_playing if beside else _nothing
        still_playing()
        if not self._playing:
            raise EnvironmentFailed(f"{self._where(method)} was called outside of an episode: reset it first")
        try:
            found = await self._call(method, function, still_playing, call)
            still_playing()
            turn = self._checked(method, self._read(method, read, found))
        except (InvalidAction, ValueError) as error:
            raise InvalidAction(_encodable(str(error))) from error
        except BaseException as error:
            self._playing = False
            if not self._over and isinstance(error, TroupeError):
                self.failure = error
            raise
        if turn.done:
            self._playing, self._over = False, True
        return turn

    def _still_playing(self) -> None:
        if self._over:
            raise InvalidAction("the episode is over")

    async def _call(
        self, method: str, function: Callable[[], Any], before: Callable[[], None] = _nothing, call: str = "step"
    ) -> Any:
        """What `function` returns, awaited if need be. before: may raise, when it is the call's turn. call: its kind."""
        clock = asyncio.get_running_loop().time
        began = self._clock()
        try:
            if self.world.inline or inspect.iscoroutinefunction(function):
                self._not_lost(method)
                before()
                until = clock() + self.timeout_s
                try:
                    result = function()
                except asyncio.CancelledError as error:  # nobody has cancelled: it is the world's own
                    raise self._failed(method, error) from error
            else:
                async with self._alone:
                    self._not_lost(method)
                    before()
                    until = clock() + self.timeout_s
                    result = self._opened(method, await self._in_thread(function, until))
            if type(result) is not Turn and inspect.isawaitable(result):
                result = self._opened(method, await self._awaited(result, until))
        except _Overdue:
            raise TimedOut(f"{self._where(method)} has not returned for {self.timeout_s:g} s") from None
        except (InvalidAction, ValueError, EpisodeError):
            raise
        except (Exception, SystemExit) as error:
            raise self._failed(method, error) from error
        finally:
            self._timed(call, max(0.0, self._clock() - began))
        return result

    async def _in_thread(self, function: Callable[[], Any], until: float) -> Outcome:
        executor = self._executor
        if executor is None:
            executor = self._own = self._own or _Thread(self.name)
        clock = asyncio.get_running_loop().time
        future: Future[Outcome] = executor.submit(_outcome, function)
        answer = asyncio.wrap_future(future)
        try:
            await asyncio.wait({answer}, timeout=until - clock())
        finally:
            if late := not answer.done():  # or the episode was cancelled
                if not future.cancel():  # the world is in the middle of the call
                    self._give_up(future, until - clock())
                answer.cancel()
        if late:
            raise _Overdue
        return answer.result()

    async def _awaited(self, awaitable: Awaitable[Any], until: float) -> Outcome:
        leash = _Leash(awaitable)
        task = asyncio.ensure_future(leash.outcome())
        try:
            await asyncio.wait({task}, timeout=until - asyncio.get_running_loop().time())
        except asyncio.CancelledError:
            await _end(task, leash)
            raise
        if not task.done():
            await _end(task, leash)
            raise _Overdue
        return (None, asyncio.CancelledError("without being asked to")) if task.cancelled() else task.result()

    def _give_up(self, future: Future[Outcome], left: float) -> None:
        self._lost = True
        if self._own is not None:
            self._own.give_up(self.world.close, left)
        else:
            _count(lambda: not future.done())
            future.add_done_callback(lambda _: _close_quietly(self.world.close))

    def _not_lost(self, method: str) -> None:
        if self._lost:
            raise EnvironmentFailed(f"{self._where(method)}: an earlier call has not returned; make a new world")

    def _opened(self, method: str, outcome: Outcome) -> Any:
        result, error = outcome
        if isinstance(error, Exception):
            raise error
        if error is not None:  # SystemExit, CancelledError and the like: they are the world's, not ours to obey
            raise self._failed(method, error) from error
        return result

    # -- looking at what came back -----------------------------------------------------------------------------------

    def _read(self, method: str, read: Callable[[Any], Any], found: Any) -> Any:
        try:
            return read(found)
        except (TypeError, ValueError, RecursionError) as error:
            kind = type(found).__name__
            raise EnvironmentFailed(f"{self._where(method)} returned {kind}, which is no JSON: {error}") from error

    def _checked(self, method: str, turn: Any) -> Turn:
        if _sound(turn):
            turn.text = _encodable(turn.text)
            return turn
        if isinstance(turn, str):
            return Turn(_encodable(turn))
        where = self._where(method)
        if not isinstance(turn, Turn):
            raise EnvironmentFailed(f"{where} returned {type(turn).__name__}, not a Turn or a str")
        if not isinstance(turn.text, str):
            raise EnvironmentFailed(f"{where}: Turn.text is {type(turn.text).__name__}, not str")
        if not isinstance(turn.parts, dict):
            raise EnvironmentFailed(f"{where}: Turn.parts is {type(turn.parts).__name__}, not dict")
        turn.text = _encodable(turn.text)
        turn.reward = finite(f"{where}: Turn.reward", turn.reward)
        turn.parts = {
            _encodable(str(name)): finite(f"{where}: Turn.parts[{name!r}]", value) for name, value in turn.parts.items()
        }
        turn.done = self._truth(f"{where}: Turn.done", turn.done)
        turn.truncated = self._truth(f"{where}: Turn.truncated", turn.truncated)
        turn.success = None if turn.success is None else self._truth(f"{where}: Turn.success", turn.success)
        return turn

    def _truth(self, name: str, value: Any) -> bool:
        """Whatever is as good as a bool: numpy's, 0 or 1. A text such as "False" is not."""
        with suppress(Exception):  # == of an array is no answer
            if value in (True, False):
                return bool(value)
        raise EnvironmentFailed(f"{name} is {short(repr(value))}, not True or False")

    def _text(self, method: str, function: Callable[[], Any]) -> str:
        try:
            text = function()
        except Exception as error:
            raise self._failed(method, error) from error
        if not isinstance(text, str):
            raise EnvironmentFailed(f"{self._where(method)} returned {type(text).__name__}, not str")
        return _encodable(text)

    def _where(self, method: str) -> str:
        task = f" (task {self._task.id}, seed {self._task.seed})" if self._task else ""
        return f"{self.name}.{method}{task}"

    def _failed(self, method: str, error: BaseException) -> EnvironmentFailed:
        return EnvironmentFailed(f"{self._where(method)} raised {type(error).__name__}: {told(error)}")


def _sound(turn: Any) -> TypeGuard[Turn]:
    """Whether all of it is exactly what a Turn promises, as it mostly is: then there is nothing to convert or to refuse."""
    return (
        type(turn) is Turn
        and type(turn.text) is str
        and type(turn.reward) is float
        and math.isfinite(turn.reward)
        and type(turn.parts) is dict
        and not turn.parts
        and type(turn.done) is bool
        and type(turn.truncated) is bool
        and (turn.success is None or type(turn.success) is bool)
    )


def told(error: BaseException) -> str:
    """What an exception says, if it can, at most a few lines of it."""
    try:
        return _encodable(str(error))[:_LONGEST_TEXT]
    except Exception as again:
        return f"(and cannot say what: {type(again).__name__})"


def _encodable(text: str) -> str:
    """Without lone surrogates, which JSON can smuggle in and no tokenizer takes: an agent could break its episode so."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


# -- calls that do not return ----------------------------------------------------------------------------------------


class _Overdue(Exception):
    """A call has used up its time."""


_guard = threading.Lock()
_given_up: list[Callable[[], bool]] = []
"""For each call that was given up: does it still go on?"""


def _count(goes_on: Callable[[], bool]) -> None:
    stuck()  # forgets those that have ended: the list is as long as there are threads, no longer
    with _guard:
        _given_up.append(goes_on)


def _outcome(function: Callable[[], Any]) -> Outcome:
    try:
        return function(), None
    except BaseException as error:
        return None, error


def _close_quietly(close: Callable[[], Any]) -> None:
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
    _count(lambda: True)


async def leashed(awaitable: Awaitable[Any]) -> Outcome:
    """What comes of code that is not ours: its result, or its error as a value. It ends when the caller is cancelled,
    even if it swallows that."""
    leash = _Leash(awaitable)
    task = asyncio.ensure_future(leash.outcome())
    try:
        await asyncio.wait({task})
    except asyncio.CancelledError:
        await _end(task, leash)
        raise
    return (None, asyncio.CancelledError("without being asked to")) if task.cancelled() else task.result()


async def killable(function: Callable[[], Any], seconds: float, name: str) -> Outcome:
    """What comes of synchronous code that is not ours, in a thread of its own: its result, or its error as a value.

    Raises TimeoutError after `seconds`. The call is then ended as a world's is, also when the caller is cancelled."""
    thread = _Thread(name)
    answer: asyncio.Future[Outcome] = asyncio.wrap_future(thread.submit(_outcome, function))
    try:
        await asyncio.wait({answer}, timeout=seconds)
    finally:
        if late := not answer.done():
            answer.cancel()
            thread.give_up(lambda: None, 0.0)
        else:
            thread.shutdown(wait=False)
    if late:
        raise TimeoutError
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
    _count(lambda: not task.done() and not loop.is_closed())


class _Thread(Executor):
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
            _count(self._thread.is_alive)
        threading.Thread(target=self._kill, args=(seconds,), name=f"{self._thread.name}-killer", daemon=True).start()

    def _kill(self, seconds: float) -> None:
        for act, patience in enumerate((seconds, _CLOSE_S)):
            self._thread.join(max(0.0, patience))
            if act == 0 and seconds > 0 and self._thread.is_alive():
                _count(self._thread.is_alive)
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
                _close_quietly(self._close)
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
