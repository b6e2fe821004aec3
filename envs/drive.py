"""The one way in which pools and checks drive a world, whether its methods are synchronous or `async`.

Promises:
- the world's chance is seeded from the task before each reset;
- what comes back has been looked at: an observation is text, a reward is a finite number, or the world has failed;
- an action that the world cannot read raises InvalidAction; every other exception of the world becomes
  EnvironmentFailed, with its type and message; errors that already say how an episode broke (EpisodeError) pass;
- a call that takes too long raises TimedOut, which names the world, the method, the seconds, the task and its seed;
- all synchronous methods of one world run in one thread, unless an executor is given, and never two at a time.

A thread cannot be killed. After a synchronous call that hangs, the driver takes no more calls and closes the world when
(if ever) the call returns; the thread is a daemon, so it does not keep the process alive.
"""

from __future__ import annotations

import asyncio
import inspect
import math
import queue
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future
from contextlib import suppress
from functools import partial
from typing import Any

from troupe.envs.base import Task, TextWorld, Turn, rng_of
from troupe.protocol.errors import EnvironmentFailed, EpisodeError, InvalidAction, TimedOut


class Driver:
    """Drives one world through one episode after another.

    world: a TextWorld. executor: where its synchronous methods run; None: in a thread of the driver's own. Worlds
    with `inline = True` are called directly, on the event loop, without a time limit. timeout_s: for each call.
    """

    def __init__(self, world: TextWorld, *, executor: Executor | None = None, timeout_s: float = 30.0) -> None:
        self.world = world
        self.timeout_s = timeout_s
        self.name = type(world).__name__
        self._executor = executor
        self._own: _Thread | None = None
        self._task: Task | None = None
        self._playing = False
        self._lost = False
        self._closed = False

    async def reset(self, task: Task) -> str:
        """Starts the episode of `task` and returns the first observation.

        Raises EnvironmentFailed, TimedOut, or the world's own EpisodeError (TaskFailed: this task cannot be run).
        """
        self._task, self._playing = task, False
        self.world.rng = rng_of(task)
        try:
            text = await self._call("reset", task)
        except (ValueError, InvalidAction) as error:  # nothing was asked of the agent yet: this is the world's fault
            raise self._failed("reset", error) from error
        if not isinstance(text, str):
            raise EnvironmentFailed(f"{self._where('reset')} returned {type(text).__name__}, not a str to observe")
        self._playing = True
        return text

    async def step(self, text: str) -> Turn:
        """Applies the agent's action (its message without the think block).

        Raises InvalidAction (the episode goes on), EnvironmentFailed, TimedOut, or the world's own EpisodeError.
        """
        if not self._playing:
            raise EnvironmentFailed(f"{self._where('step')} was called outside of an episode: reset it first")
        try:
            turn = self._checked(await self._call("step", text))
        except InvalidAction:
            raise
        except ValueError as error:
            raise InvalidAction(str(error)) from error
        except BaseException:
            self._playing = False
            raise
        self._playing = not turn.done
        return turn

    def state_key(self) -> str:
        """The state that the next action is taken from. Raises EnvironmentFailed."""
        return self._text("state_key", self.world.state_key)

    def play(self, rng: Any, noise: float) -> str | None:
        """The scripted player's next message, None if the world has no player. Raises EnvironmentFailed."""
        try:
            message = self.world.play(rng, noise)
        except Exception as error:
            raise self._failed("play", error) from error
        return None if message is None else self._text("play", lambda: message)

    async def close(self) -> None:
        """Releases the world, once. A lost world is not waited for. Raises EnvironmentFailed or TimedOut."""
        if self._closed:
            return
        self._closed, self._playing = True, False
        try:
            if not self._lost:
                await self._call("close")
        except (ValueError, InvalidAction) as error:
            raise self._failed("close", error) from error
        finally:
            if self._own is not None:
                self._own.shutdown(wait=False)

    # -- calling -----------------------------------------------------------------------------------------------------

    async def _call(self, method: str, *args: Any) -> Any:
        if self._lost:
            raise EnvironmentFailed(f"{self._where(method)}: an earlier call has not returned; make a new world")
        function = getattr(self.world, method)
        limit = asyncio.timeout(self.timeout_s)
        try:
            if self.world.inline and not inspect.iscoroutinefunction(function):
                return function(*args)
            async with limit:
                if inspect.iscoroutinefunction(function):
                    return await function(*args)
                result = await self._in_thread(function, args)
                return await result if inspect.isawaitable(result) else result
        except (InvalidAction, ValueError, EpisodeError):
            raise
        except TimeoutError as error:
            if not limit.expired():
                raise self._failed(method, error) from error
            seconds = f"{self.timeout_s:g} s"
            raise TimedOut(f"{self._where(method)} has not returned for {seconds}") from None
        except (Exception, SystemExit) as error:
            raise self._failed(method, error) from error

    async def _in_thread(self, function: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        executor = self._executor
        if executor is None:
            executor = self._own = self._own or _Thread(self.name)
        future = executor.submit(_outcome, function, args)
        try:
            result, error = await asyncio.wrap_future(future)
        except asyncio.CancelledError:  # timed out, or the episode was cancelled
            if not future.cancel():  # the world is in the middle of the call
                self._lost = True
                future.add_done_callback(lambda _: self._close_late())
            raise
        if error is not None:
            raise error
        return result

    def _close_late(self) -> None:
        with suppress(Exception):  # nobody is left to tell: the episode has already been reported as broken
            self.world.close()

    # -- looking at what came back -----------------------------------------------------------------------------------

    def _checked(self, turn: Any) -> Turn:
        if isinstance(turn, str):
            return Turn(turn)
        if not isinstance(turn, Turn):
            raise EnvironmentFailed(f"{self._where('step')} returned {type(turn).__name__}, not a Turn or a str")
        if not isinstance(turn.text, str):
            raise EnvironmentFailed(f"{self._where('step')}: Turn.text is {type(turn.text).__name__}, not str")
        if not isinstance(turn.parts, dict):
            raise EnvironmentFailed(f"{self._where('step')}: Turn.parts is {type(turn.parts).__name__}, not dict")
        turn.reward = self._number("Turn.reward", turn.reward)
        turn.parts = {str(name): self._number(f"Turn.parts[{name!r}]", value) for name, value in turn.parts.items()}
        turn.done = bool(turn.done)
        turn.success = None if turn.success is None else bool(turn.success)
        return turn

    def _number(self, name: str, value: Any) -> float:
        """`value` as a float. NaN, infinity or no number at all is a broken world, not a reward (law 6)."""
        try:
            number = math.nan if isinstance(value, str) else float(value)
        except (TypeError, ValueError, OverflowError):
            number = math.nan
        if not math.isfinite(number):
            raise EnvironmentFailed(f"{self._where('step')}: {name} is {value!r}, not a finite number")
        return number

    def _text(self, method: str, function: Callable[[], Any]) -> str:
        try:
            text = function()
        except Exception as error:
            raise self._failed(method, error) from error
        if not isinstance(text, str):
            raise EnvironmentFailed(f"{self._where(method)} returned {type(text).__name__}, not str")
        return text

    def _where(self, method: str) -> str:
        task = f" (task {self._task.id}, seed {self._task.seed})" if self._task else ""
        return f"{self.name}.{method}{task}"

    def _failed(self, method: str, error: BaseException) -> EnvironmentFailed:
        return EnvironmentFailed(f"{self._where(method)} raised {type(error).__name__}: {error}")


def _outcome(function: Callable[..., Any], args: tuple[Any, ...]) -> tuple[Any, BaseException | None]:
    """(result, error): as a value, because asyncio's futures refuse some exceptions (StopIteration) and then hang."""
    try:
        return function(*args), None
    except BaseException as error:
        return None, error


class _Thread(Executor):
    """An executor of one daemon thread: the standard one keeps a process alive until its last call returns."""

    def __init__(self, name: str) -> None:
        self._work: queue.SimpleQueue[tuple[Future[Any], Callable[[], Any]] | None] = queue.SimpleQueue()
        threading.Thread(target=self._run, name=f"world-{name}", daemon=True).start()

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        self._work.put((future, partial(function, *args, **kwargs)))
        return future

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._work.put(None)

    def _run(self) -> None:
        while (work := self._work.get()) is not None:
            future, function = work
            if future.set_running_or_notify_cancel():
                try:
                    future.set_result(function())
                except BaseException as error:
                    future.set_exception(error)
            del work, future, function  # an idle thread must not keep the last episode's objects alive
