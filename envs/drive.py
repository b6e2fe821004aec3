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

A call that does not return is ended as `calls.py` ends them; one of a cancelled episode at once if it is `async`, else when
the rest of its own time is over. The world of a synchronous call that was given up takes no more calls, and is closed, in its
thread, when the call has ended. What runs in a given executor cannot be killed, only counted. What blocks the event loop
itself (an `inline` world, or an `async` method that computes for ever) cannot be noticed from inside of it.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import time
from collections.abc import Callable
from concurrent.futures import Executor, Future
from functools import partial
from typing import Any

from pydantic_core import to_jsonable_python

from troupe.envs.base import Task, TextWorld, ToolCall, Turn
from troupe.envs.calls import KillableThread, Outcome, Overdue, close_quietly, count, leashed, outcome_of
from troupe.envs.returned import encodable, told, turn_from
from troupe.envs.tools import ToolWorld, lookup, observed, turn_of
from troupe.protocol.errors import (
    BadArguments,
    EnvironmentFailed,
    EpisodeError,
    InvalidAction,
    TimedOut,
    TroupeError,
    UnknownTool,
)


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
        self._own: KillableThread | None = None
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
        return encodable(text)

    async def step(self, text: str) -> Turn:
        """Applies the agent's action (its message without the think block).

        Raises InvalidAction (the episode goes on), EnvironmentFailed, TimedOut, or the world's own EpisodeError.
        """
        # The answer to a world with tools does nothing but ask for its verdict.
        call = "verify" if type(self.world).step is ToolWorld.step else "step"
        return await self._turn("step", partial(self.world.step, text), call=call)

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
            raise type(error)(encodable(str(error))) from None
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
        read: Callable[[Any], Any] | None = None,
        beside: bool = False,
        call: str = "step",
    ) -> Turn:
        """One call within an episode. read: makes a Turn or a str of what came back. beside: others may run meanwhile, so
        the episode may end before this call begins or before it returns."""
        if beside:
            self._not_over()
        if not self._playing:
            raise EnvironmentFailed(f"{self._where(method)} was called outside of an episode: reset it first")
        try:
            found = await self._call(method, function, call, beside)
            if beside:
                self._not_over()
            turn = turn_from(found if read is None else self._read(method, read, found), lambda: self._where(method))
        except (InvalidAction, ValueError) as error:
            raise InvalidAction(encodable(str(error))) from error
        except BaseException as error:
            self._playing = False
            if not self._over and isinstance(error, TroupeError):
                self.failure = error
            raise
        if turn.done:
            self._playing, self._over = False, True
        return turn

    def _not_over(self) -> None:
        if self._over:
            raise InvalidAction("the episode is over")

    async def _call(self, method: str, function: Callable[[], Any], call: str = "step", beside: bool = False) -> Any:
        """What `function` returns, awaited if need be. call: its kind. beside: see `_turn`."""
        began, left = self._clock(), self.timeout_s
        try:
            if self.world.inline or inspect.iscoroutinefunction(function):
                self._may_begin(method, beside)
                try:
                    result = function()
                except asyncio.CancelledError as error:  # nobody has cancelled: it is the world's own
                    raise self._failed(method, error) from error
            else:
                async with self._alone:
                    self._may_begin(method, beside)
                    clock = asyncio.get_running_loop().time
                    until = clock() + left
                    result = self._opened(method, await self._in_thread(function, until))
                    left = until - clock()
            if type(result) is not Turn and inspect.isawaitable(result):
                result = self._opened(method, await leashed(result, left))
        except Overdue:
            raise TimedOut(f"{self._where(method)} has not returned for {self.timeout_s:g} s") from None
        except (InvalidAction, ValueError, EpisodeError):
            raise
        except (Exception, SystemExit) as error:
            raise self._failed(method, error) from error
        finally:
            self._timed(call, max(0.0, self._clock() - began))
        return result

    def _may_begin(self, method: str, beside: bool) -> None:
        if self._lost:
            raise EnvironmentFailed(f"{self._where(method)}: an earlier call has not returned; make a new world")
        if beside:
            self._not_over()

    async def _in_thread(self, function: Callable[[], Any], until: float) -> Outcome:
        executor = self._executor
        if executor is None:
            executor = self._own = self._own or KillableThread(self.name)
        clock = asyncio.get_running_loop().time
        future: Future[Outcome] = executor.submit(outcome_of, function)
        answer = asyncio.wrap_future(future)
        try:
            await asyncio.wait({answer}, timeout=until - clock())
        finally:
            if late := not answer.done():  # or the episode was cancelled
                if not future.cancel():  # the world is in the middle of the call
                    self._give_up(future, until - clock())
                answer.cancel()
        if late:
            raise Overdue
        return answer.result()

    def _give_up(self, future: Future[Outcome], left: float) -> None:
        self._lost = True
        if self._own is not None:
            self._own.give_up(self.world.close, left)
        else:
            count(lambda: not future.done())
            future.add_done_callback(lambda _: close_quietly(self.world.close))

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

    def _text(self, method: str, function: Callable[[], Any]) -> str:
        try:
            text = function()
        except Exception as error:
            raise self._failed(method, error) from error
        if not isinstance(text, str):
            raise EnvironmentFailed(f"{self._where(method)} returned {type(text).__name__}, not str")
        return encodable(text)

    def _where(self, method: str) -> str:
        task = f" (task {self._task.id}, seed {self._task.seed})" if self._task else ""
        return f"{self.name}.{method}{task}"

    def _failed(self, method: str, error: BaseException) -> EnvironmentFailed:
        return EnvironmentFailed(f"{self._where(method)} raised {type(error).__name__}: {told(error)}")
