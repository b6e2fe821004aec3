"""The conversation of one task of verifiers: its trace, its score, its tools, and an environment's lead."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from typing import Any

from troupe.envs.tools import observed
from troupe.protocol.errors import EnvironmentFailed, TroupeError


def trace(task: Any) -> Any:
    """An empty trace of `task`."""
    import verifiers.v1 as vf
    from verifiers.v1.state import state_cls

    return vf.Trace(
        task=vf.TraceTask(type=type(task).__name__, data=task.data, key=task.key, hash=task.hash),
        state=state_cls(type(task))(),
        agent=vf.AgentInfo(config=vf.AgentConfig()),
        verifiers=vf.VersionInfo(version=""),
    )


def _add(trace: Any, message: Any, sampled: bool) -> None:
    import verifiers.v1 as vf

    trace.nodes.append(vf.MessageNode(parent=len(trace.nodes) - 1 if trace.nodes else None, message=message, sampled=sampled))


def opening(task: Any, trace: Any) -> str:
    """Puts the task's prompt into the trace. Returns what the agent reads of it."""
    from verifiers.v1.types import SystemMessage, UserMessage, content_text

    prompt = task.data.prompt
    messages = [SystemMessage(content=task.data.system_prompt)] if task.data.system_prompt else []
    messages += [UserMessage(content=prompt)] if isinstance(prompt, str) else list(prompt or [])
    for message in messages:
        _add(trace, message, sampled=False)
    return "\n\n".join(filter(None, (content_text(message.content) for message in messages)))


def said(trace: Any, text: str) -> None:
    """The agent's message."""
    from verifiers.v1.types import AssistantMessage

    _add(trace, AssistantMessage(content=text), sampled=True)


def heard(trace: Any, text: str) -> None:
    """The user's message."""
    from verifiers.v1.types import UserMessage

    _add(trace, UserMessage(content=text), sampled=False)


def called(trace: Any, name: str, arguments: dict[str, Any], result: Any) -> None:
    """A tool call of the agent's, and its result."""
    from verifiers.v1.types import AssistantMessage, ToolCall, ToolMessage

    call = ToolCall(id=f"call_{len(trace.nodes)}", name=name, arguments=json.dumps(arguments, default=str))
    _add(trace, AssistantMessage(tool_calls=[call]), sampled=True)
    _add(trace, ToolMessage(tool_call_id=call.id, name=name, content=str(observed(result))), sampled=False)


def tools(toolset: Any) -> Iterator[tuple[str, Any]]:
    """(name, function) of its tools, named as its server would."""
    from verifiers.v1.utils.decorators import discover_decorated

    for function in discover_decorated(toolset, "tool"):
        name = getattr(function, "tool_name", None) or function.__name__
        yield (f"{toolset.server_name}_{name}" if toolset.server_name else name), function


async def set_up(task: Any, trace: Any) -> None:
    """Before the agent is asked. Raises EnvironmentFailed."""
    await _hook(task, "setup", trace)


async def score(task: Any, trace: Any) -> None:
    """The task's own rewards, on the trace. Raises EnvironmentFailed if they, or what prepares them, fail."""
    await _hook(task, "finalize", trace)
    try:
        await task.score(trace)
    except Exception as error:
        raise EnvironmentFailed(
            f"{type(task).__name__} cannot be scored: {type(error).__name__}: {str(error)[:300]}"
        ) from error


async def _hook(task: Any, name: str, trace: Any) -> None:
    import verifiers.v1 as vf

    if getattr(type(task), name) is getattr(vf.Task, name):
        return
    try:
        await getattr(task, name)(trace=trace)
    except Exception as error:
        raise EnvironmentFailed(f"{type(task).__name__}.{name} raised {type(error).__name__}: {str(error)[:300]}") from error


def parts(trace: Any) -> dict[str, float]:
    """Weighted rewards by name. Raises EnvironmentFailed if there are none, or one was not computed."""
    missing = [name for name, reward in trace.rewards.items() if reward is None]
    if missing or not trace.rewards:
        raise EnvironmentFailed(f"no reward was computed{f' for {missing[0]}' if missing else ''}")
    return {name: float(reward.value) for name, reward in trace.rewards.items()}


# -- an environment that leads ---------------------------------------------------------------------------------------


def environment(ident: str) -> Any:
    """The environment that the taskset brings, None if it has none. Raises ValueError if that has several agents."""
    import verifiers.v1 as vf
    from verifiers.v1.utils.loaders import env_config_type, environment_class

    found = environment_class(ident)
    if found is vf.SingleAgentEnv:
        return None
    roles = [name for name, field in env_config_type(ident).model_fields.items() if isinstance(field.default, vf.AgentConfig)]
    if len(roles) != 1:
        raise ValueError(f"its environment {found.__name__} has several agents ({', '.join(roles)}): a world has one")
    return found


class Led:
    """One conversation, led by an environment's `run`, which is a task of its own between our calls."""

    def __init__(self, ident: str, config: Any, task: Any) -> None:
        from verifiers.v1.utils.loaders import env_config_type, environment_class

        self.task = task
        self.over = False
        self.trace: Any = None
        self._asked: asyncio.Queue[str] = asyncio.Queue()
        self._answers: asyncio.Queue[str] = asyncio.Queue()
        env = environment_class(ident)
        self._env = env(env_config_type(ident).model_validate({"taskset": config.model_dump()}))
        self._run = asyncio.ensure_future(self._led())

    async def told(self) -> str:
        """What the agent is asked next; empty when the conversation is over. Raises EnvironmentFailed."""
        asked = asyncio.ensure_future(self._asked.get())
        await asyncio.wait({asked, self._run}, return_when=asyncio.FIRST_COMPLETED)
        if asked.done():
            return asked.result()
        asked.cancel()
        try:
            self._run.result()
        except TroupeError:
            raise
        except Exception as error:
            kind = type(self._env).__name__
            raise EnvironmentFailed(f"{kind} raised {type(error).__name__}: {str(error)[:300]}") from error
        if self.trace is None:
            raise EnvironmentFailed(f"{type(self._env).__name__}.run asked no agent")
        self.over = True
        return ""

    async def answered(self, text: str) -> str:
        """The agent's answer; what it is asked then."""
        self._answers.put_nowait(text)
        return await self.told()

    async def close(self) -> None:
        self._run.cancel()
        with suppress(asyncio.CancelledError, Exception):
            await self._run

    async def _led(self) -> None:
        import verifiers.v1 as vf

        await self._env.setup(self)
        await self._env.run(self.task, self)
        if type(self._env).finalize is not vf.Env.finalize and self.trace is not None:
            kind = type(self.task).__name__
            about = vf.TraceTask(type=kind, data=self.task.data, key=self.task.key, hash=self.task.hash)
            episode = vf.Episode(env=vf.EnvInfo(id=self._env.config.env_id), task=about, traces=[self.trace])
            await self._env.finalize(self.task, episode)

    # -- what `run` sees as its agents, and as the one among them --

    def __getattr__(self, name: str) -> Led:
        if name.startswith("_"):
            raise AttributeError(name)
        return self

    async def run(self, task: Any) -> Any:
        async with self.interaction(task) as interaction:
            await interaction.turn()
        return interaction.trace

    @asynccontextmanager
    async def interaction(self, task: Any) -> AsyncIterator[_Interaction]:
        held = _Interaction(task, self._asked, self._answers)
        await set_up(task, held.trace)
        self.trace = held.trace
        yield held
        await score(task, held.trace)


class _Interaction:
    """As `verifiers.v1.Interaction`: the environment's user speaks, the agent answers."""

    def __init__(self, task: Any, asked: asyncio.Queue[str], answers: asyncio.Queue[str]) -> None:
        self.trace = trace(task)
        self._opening = opening(task, self.trace)
        self._asked, self._answers = asked, answers

    async def turn(self, message: Any = None) -> Any:
        import verifiers.v1 as vf
        from verifiers.v1.types import AssistantMessage, content_text

        text = message if isinstance(message, str) else "\n\n".join(content_text(each.content) for each in message or [])
        if text:
            heard(self.trace, text)
        self._asked.put_nowait("\n\n".join(filter(None, (self._opening, text))))
        self._opening = ""
        answer = await self._answers.get()
        said(self.trace, answer)
        return vf.Segment(messages=[AssistantMessage(content=answer)])
