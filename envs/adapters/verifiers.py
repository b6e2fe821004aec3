"""Tasksets of verifiers (its v1 API) as worlds: `verifiers:ID` for an installed taskset, or `verifiers:module:Class`,
`verifiers:path/file.py:Class`.

The agent reads a task's prompt and answers; what that is worth say the task's own rewards. Tools of the task's toolsets are the
agent's tools, called in this process. Where the taskset brings an environment with one agent and a user who answers, that
environment's `run` leads the conversation.

What is used of verifiers: the plugin loader, `Taskset`, `Task.score`, `Trace` and its messages, `Toolset`, and of an
environment `run` and `finalize`. Not used: harnesses, runtimes, clients, servers.

Promises:
- a task is of one split only, by the digest of what it says (`belongs`);
- what a taskset needs and a world has not (a container, a runtime for its rewards, hooks that stop or rewrite model calls,
  several agents) is refused when the world is made, in one sentence;
- a reward that was not computed has broken the episode. A total reward of `success_at` or more is a success.
"""

from __future__ import annotations

import inspect
import json
import random
from collections.abc import Callable, Iterator
from functools import lru_cache, wraps
from typing import TYPE_CHECKING, Any, ClassVar

from troupe.envs.adapters import verifiers_talk as talk
from troupe.envs.base import InvalidAction, Task, TextWorld, Turn, belongs
from troupe.envs.tools import Rewards, ToolWorld
from troupe.protocol.errors import ConfigError, TaskFailed
from troupe.protocol.importing import module_at

if TYPE_CHECKING:
    import verifiers.v1 as vf

_LIMIT = 10_000


def world(name: str) -> type[TextWorld]:
    """The world of the taskset `name`. Raises ConfigError: not installed, no such taskset, or one that needs more than that."""
    try:
        import verifiers.v1 as vf
    except ImportError as error:
        raise ConfigError(f"'verifiers:{name}' needs verifiers ({error}): pip install 'troupe-rl[verifiers]'") from error
    try:
        taskset = _taskset(name)
        env = talk.environment(name) if ":" not in name else None
    except (Exception, SystemExit) as error:  # another project's code: it may raise anything
        raise ConfigError(f"'verifiers:{name}': {type(error).__name__}: {(str(error).splitlines() or [''])[0]}") from error
    kind = taskset.task_type()
    if kind.NEEDS_CONTAINER:
        raise ConfigError(f"'verifiers:{name}' is refused: its tasks need a container")
    for hook in ("setup", "finalize"):
        if getattr(kind, hook) is not getattr(vf.Task, hook) and "runtime" in inspect.signature(getattr(kind, hook)).parameters:
            raise ConfigError(f"'verifiers:{name}' is refused: {kind.__name__}.{hook} needs a runtime of verifiers")
    tools = (
        taskset.toolsets.__func__ is not vf.Taskset.toolsets.__func__ or kind.toolsets.__func__ is not vf.Task.toolsets.__func__
    )
    if tools and env is not None:
        raise ConfigError(f"'verifiers:{name}' is refused: it has both tools and an environment of its own")
    base = VerifiersTools if tools else VerifiersTalk if env is not None else Verifiers
    attributes = {
        "name": f"verifiers:{name}",
        "taskset": taskset,
        "ident": name,
        "__doc__": f"The taskset {name} of verifiers.",
    }
    return type(base.__name__, (base,), attributes)


class _Base(TextWorld):
    """Options: limit: of tasks that are loaded. success_at: total reward of a success. All others are the taskset's own."""

    taskset: ClassVar[Any] = None
    ident: ClassVar[str] = ""
    max_turns: ClassVar[int] = 8

    def __init__(self, limit: int = 1_000, success_at: float = 1.0, **options: Any) -> None:
        if not 1 <= limit <= _LIMIT:
            raise ValueError(f"limit is {limit}; it is 1 to {_LIMIT}")
        self._success_at = success_at
        self._config, self._tasks = _loaded(self.taskset, self.ident, limit, json.dumps(options, sort_keys=True))

    def _chosen(self, task: Task) -> vf.Task[Any, Any, Any]:
        """Draws a task, and begins its trace."""
        among = [each for each in self._tasks if belongs(_content(each), task.split)]
        if not among:
            raise TaskFailed(f"{self.name} has no task of split '{task.split}' among {len(self._tasks)}")
        self._task = self.rng.choice(among)
        self._trace = talk.trace(self._task)
        return self._task

    async def _opened(self, task: Task) -> str:
        chosen = self._chosen(task)
        if chosen.data.prompt is None:
            raise TaskFailed(
                f"{self.name}: task {chosen.data.idx} has no prompt, and there is no user to open the conversation"
            )
        await talk.set_up(chosen, self._trace)
        return talk.opening(chosen, self._trace)

    async def _judged(self, answer: str) -> Turn:
        talk.said(self._trace, answer)
        await talk.score(self._task, self._trace)
        return self._turn(self._trace, "")

    def _turn(self, trace: Any, told: str) -> Turn:
        parts = talk.parts(trace)
        total = sum(parts.values())
        text = told or f"reward {total:g}"
        return Turn(text, total, done=True, success=total >= self._success_at, parts=parts if len(parts) > 1 else {})

    def play(self, rng: random.Random, noise: float) -> str | None:
        """Says the task's `answer` field, at random that of another. None where tasks have none."""
        task = rng.choice(self._tasks) if rng.random() < noise else self._task
        answer = getattr(task.data, "answer", None)
        return answer if isinstance(answer, str) else None

    @classmethod
    def corpus(cls) -> Iterator[str]:
        try:
            tasks = cls()._tasks
        except ValueError:  # it has options without a default
            return
        for task in tasks[:256]:
            yield "\n".join((task.data.system_prompt or "", task.data.prompt_text, getattr(task.data, "answer", None) or ""))


class Verifiers(_Base):
    """A prompt, a message, its rewards."""

    async def reset(self, task: Task) -> str:
        return await self._opened(task)

    async def step(self, text: str) -> Turn:
        if not text.strip():
            raise InvalidAction("write an answer")
        return await self._judged(text)

    def state_key(self) -> str:
        return _content(self._task)


class VerifiersTools(_Base, ToolWorld):
    """The same, with the tools of its toolsets. Those are made anew for each episode."""

    async def reset(self, task: Task) -> str:
        text = await self._opened(task)
        made = (*type(self._task).toolsets(self._task.config), *self.taskset.toolsets(self._config))
        for toolset in made:
            toolset._inert_state = self._trace.state  # what its tools read and write as `self.state`
            await toolset.setup()
            await toolset.setup_task(self._task.data)
            for name, function in talk.tools(toolset):
                self.add_tool(self._recorded(name, function), name)
        return text

    async def verify(self) -> Rewards:
        turn = await self._judged(self.answer)
        verdict = Rewards(outcome=turn.reward)
        verdict.success = bool(turn.success)
        return verdict

    def _recorded(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        trace = self._trace

        @wraps(function)
        async def call(**arguments: Any) -> Any:
            result = function(**arguments)
            result = await result if inspect.isawaitable(result) else result
            talk.called(trace, name, arguments, result)
            return result

        call.__doc__ = inspect.getdoc(function) or f"The tool {name}."
        return call


class VerifiersTalk(_Base):
    """The taskset's environment leads a conversation between its user and the agent."""

    max_turns: ClassVar[int] = 20
    _led: talk.Led | None = None

    async def reset(self, task: Task) -> str:
        await self._ended()
        chosen = self._chosen(task)
        self._led = talk.Led(self.ident, self._config, chosen)
        return await self._led.told()

    async def step(self, text: str) -> Turn:
        if not text.strip():
            raise InvalidAction("write an answer")
        assert self._led is not None
        told = await self._led.answered(text)
        return Turn(told) if not self._led.over else self._turn(self._led.trace, told)

    def close(self) -> Any:
        return self._ended()

    async def _ended(self) -> None:
        if self._led is not None:
            await self._led.close()


def _taskset(name: str) -> Any:
    import verifiers.v1 as vf
    from verifiers.v1.utils.loaders import taskset_class

    place, colon, attribute = name.rpartition(":")
    if not colon:
        return taskset_class(name)
    found = getattr(module_at(place), attribute)
    if not (inspect.isclass(found) and issubclass(found, vf.Taskset)):
        raise TypeError(f"{attribute} is no Taskset")
    return found


@lru_cache(maxsize=16)
def _loaded(taskset: Any, ident: str, limit: int, options: str) -> tuple[Any, list[Any]]:
    """(config, tasks), once a process. Raises ValueError: options that it does not take, or tasks that no world can have."""
    import verifiers.v1 as vf
    from verifiers.v1.utils.decorators import discover_decorated
    from verifiers.v1.utils.generic import concrete_type

    kind = concrete_type(taskset, vf.TasksetConfig, origin=vf.Taskset) or vf.TasksetConfig
    try:
        config = kind.model_validate({**json.loads(options), "id": ident})
    except ValueError as error:
        raise ValueError(" ".join(str(error).split())[:300]) from error
    tasks = list(taskset(config).take(limit))
    if not tasks:
        raise ValueError("the taskset has no tasks")
    for hook in ("reward", "metric"):
        for function in tasks[0].hooks(hook):
            asked = inspect.signature(function).parameters.get("runtime")
            if asked is not None and asked.default is asked.empty:
                raise ValueError(f"its {hook} {function.__name__} needs a runtime of verifiers")
    if tasks[0].hooks("stop") or discover_decorated(tasks[0], "intercept"):
        raise ValueError("it stops or rewrites model calls of verifiers (@vf.stop, @vf.intercept)")
    return config, tasks


def _content(task: Any) -> str:
    """What a task says, without its place in the taskset."""
    return str(task.data.model_dump_json(exclude={"idx"}))
