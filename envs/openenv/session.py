"""One client's world: its episodes, one after the other, as OpenEnv counts and tells them.

Promises:
- a reset with the same seed and split begins the same episode; without a seed it is the next task that no session has had;
- what the agent did wrong is an observation with an `error`, and the episode goes on; a world that broke or hung is refused
  with EXECUTION_ERROR, says which call and which task, and is replaced by a new one at the next reset;
- an episode ends at the world's turns as it does at a limit of Troupe's: with what was earned, and the world's verdict;
- one request at a time. A session that was never reset begins its next task when it is first asked to act.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from typing import Any

from pydantic import TypeAdapter

from troupe.envs import registry
from troupe.envs.base import Task, TextWorld, Turn, action_of
from troupe.envs.drive import Driver
from troupe.envs.openenv.wire import EXECUTION_ERROR, Refused, Reset, TextAction, ToolAction
from troupe.envs.tools import ToolWorld
from troupe.protocol.errors import BadArguments, EpisodeError, InvalidAction, TimedOut, UnknownTool

_KINDS = {UnknownTool: "tool_not_found", BadArguments: "invalid_args", InvalidAction: "execution_error"}


@dataclass(frozen=True, slots=True)
class Served:
    """Which world sessions have. options: its own. timeout_s: for each of its calls. next_index: of tasks nobody asked for."""

    world: type[TextWorld]
    options: Mapping[str, Any]
    timeout_s: float
    next_index: Callable[[], int]

    @property
    def action(self) -> TypeAdapter[Any]:
        """What its clients' actions are read with."""
        return _TOOL if issubclass(self.world, ToolWorld) else _TEXT

    def driver(self) -> Driver:
        """A new world. Raises ConfigError."""
        return Driver(registry.make(self.world, self.options), timeout_s=self.timeout_s)


_TEXT: TypeAdapter[Any] = TypeAdapter(TextAction)
_TOOL: TypeAdapter[Any] = TypeAdapter(ToolAction)


class Session:
    """See the top of the file. Methods take and give what stands in a frame's `data`; they raise Refused or ValidationError.

    seen: when it was last asked something, in `time.monotonic` seconds.
    """

    def __init__(self, served: Served) -> None:
        self._served = served
        self._action = served.action
        self._driver = served.driver()
        self._alone = asyncio.Lock()
        self._task: Task | None = None
        self._episode_id: str | None = None
        self._limit = served.world.max_turns
        self._steps, self._reward = 0, 0.0
        self._success: bool | None = None
        self._done = False
        self._broken = ""
        self.seen = time.monotonic()

    async def reset(self, data: dict[str, Any]) -> dict[str, Any]:
        """Begins an episode; returns its first observation."""
        asked = Reset.model_validate(data)
        async with self._alone:
            return await self._begin(asked)

    async def step(self, data: dict[str, Any]) -> dict[str, Any]:
        """One action; returns what came of it."""
        action = self._action.validate_python(data)
        async with self._alone:
            await self._playing()
            if isinstance(action, ToolAction) and action.type == "list_tools":
                return self._observation("", 0.0, tools=self._tools())
            return await self._act(action)

    async def tools(self) -> list[dict[str, Any]]:
        """What the agent may call now: name, description and input_schema of each."""
        async with self._alone:
            await self._playing(over=True)
            return self._tools()

    def state(self) -> dict[str, Any]:
        """Where the episode stands."""
        task = self._task
        return {
            "episode_id": self._episode_id,
            "step_count": self._steps,
            "task_id": task and task.id,
            "split": task and task.split,
            "seed": task and task.seed,
            "reward": self._reward,
            "done": self._done,
            "success": self._success,
            "state_key": self._state_key(),
        }

    async def close(self) -> None:
        """Releases the world. Raises EnvironmentFailed or TimedOut."""
        await self._driver.close()

    # -- one at a time from here on --------------------------------------------------------------------------------------

    async def _begin(self, asked: Reset) -> dict[str, Any]:
        if self._broken:
            await self._replace()
        world = self._served.world
        index = asked.index if asked.index is not None else asked.seed
        try:
            task = world.task(asked.split, self._served.next_index() if index is None else index)
        except Exception as error:  # the world's own code: it may raise anything
            raise Refused(EXECUTION_ERROR, f"{world.__name__} has no such task: {error}") from error
        if asked.index is not None and asked.seed is not None:
            task = replace(task, seed=asked.seed)
        self._task, self._episode_id = task, asked.episode_id or task.id
        self._limit = asked.max_turns or world.max_turns
        self._steps, self._reward, self._success, self._done = 0, 0.0, None, False
        async with _broken(self):
            text = await self._driver.reset(task)
            tools = self._tools()
        about: dict[str, Any] = {"task": asdict(task), "system": world.system, "max_turns": self._limit}
        if tools:
            about["tools"] = tools
        return self._observation(text, None, metadata=about)

    async def _playing(self, over: bool = False) -> None:
        """Sees to it that there is an episode. over: it may have ended."""
        if self._task is None:
            await self._begin(Reset())
        if self._broken:
            raise Refused(EXECUTION_ERROR, f"this episode is broken: {self._broken}; reset to begin another")
        if self._done and not over:
            raise Refused(EXECUTION_ERROR, "the episode is over; reset to begin another")

    async def _act(self, action: TextAction | ToolAction) -> dict[str, Any]:
        self._steps += 1
        more: dict[str, Any] = {}
        call = isinstance(action, ToolAction) and action.type == "call_tool"
        try:
            async with _broken(self):
                turn = await self._turn(action)
        except (InvalidAction, UnknownTool, BadArguments) as error:
            kind = _KINDS[type(error)] if call else "invalid_action"
            turn = Turn(f"Error: {error}" if call else f"Invalid action: {error}")
            more["error"] = {"error_type": kind, "message": str(error)}
        if isinstance(action, ToolAction) and call:
            more |= {"tool_name": action.tool_name, "result": None if "error" in more else turn.text}
        more["truncated"] = turn.truncated
        if self._steps >= self._limit and not turn.done:
            more["truncated"] = True
            turn = await self._cut(turn)
        if turn.success is not None:
            self._success = turn.success
        elif turn.done and self._success is None:
            self._success = turn.reward > 0
        self._reward += turn.reward
        self._done = turn.done
        return self._observation(turn.text, turn.reward, parts=turn.parts, **more)

    async def _turn(self, action: TextAction | ToolAction) -> Turn:
        if isinstance(action, TextAction) or action.type == "message":
            return await self._driver.step(action_of(action.message))
        if action.type == "call_tool":
            return await self._driver.call(action.tool_name, action.arguments)
        return replace(await self._driver.verify() or Turn(""), done=True)

    async def _cut(self, turn: Turn) -> Turn:
        """The last turn that there may be, with the world's verdict, if it gives one unasked."""
        async with _broken(self):
            verdict = await self._driver.verify() or Turn("")
        return Turn(
            turn.text,
            turn.reward + verdict.reward,
            done=True,
            success=turn.success if verdict.success is None else verdict.success,
            parts={name: turn.parts.get(name, 0.0) + verdict.parts.get(name, 0.0) for name in {**turn.parts, **verdict.parts}},
        )

    async def _replace(self) -> None:
        old, self._driver, self._broken = self._driver, self._served.driver(), ""
        with suppress(EpisodeError, TimedOut):  # it was told already that this world is broken
            await old.close()

    def _tools(self) -> list[dict[str, Any]]:
        return [
            {"name": spec["name"], "description": spec.get("description", ""), "input_schema": spec["parameters"]}
            for spec in self._driver.tools()
        ]

    def _state_key(self) -> str:
        return "" if self._done or self._broken or self._task is None else self._driver.state_key()

    def _observation(self, text: str, reward: float | None, **more: Any) -> dict[str, Any]:
        """The data of an observation frame."""
        assert self._task is not None
        about = more.pop("metadata", {})
        seen = {
            "text": text,
            "parts": {},
            "success": self._success,
            "truncated": False,
            "state_key": self._state_key(),
            "seed": self._task.seed,
            "split": self._task.split,
            "error": None,
            **more,
            "metadata": about,
        }
        data = {"observation": seen, "reward": reward, "done": self._done}
        return {**data, "metadata": about} if about else data


class _broken:
    """Within it, an episode that breaks is marked as such and refused by its code."""

    def __init__(self, session: Session) -> None:
        self._session = session

    async def __aenter__(self) -> None:
        return

    async def __aexit__(self, kind: Any, error: BaseException | None, trace: Any) -> None:
        if isinstance(error, asyncio.CancelledError):
            self._session._broken = "it was given up in the middle of a call"
        elif isinstance(error, EpisodeError | TimedOut):
            self._session._broken = str(error)
            raise Refused(EXECUTION_ERROR, str(error)) from error


def text_of(data: Any) -> str:
    """`data` as a frame of JSON, which no lone surrogate in a world's text can break."""
    return json.dumps(data, separators=(",", ":"), default=str)
