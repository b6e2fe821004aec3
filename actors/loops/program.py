"""Your own harness as the loop: an async function that is handed a chat client and the episode.

    async def run(client: ChatClient, episode: Episode) -> str | None: ...

Whatever it says to the client is recorded token by token: any library that speaks OpenAI's chat completions works when
it is given the client's address and transport, in this process, without a port. Promises:
- the run's sampling settings hold: a program may ask for fewer tokens and for stop strings, never for another temperature;
- a conversation that goes on extends the sampled ids; one that the program rewrites becomes another branch;
- `client.agent(name)` speaks for another agent of the same episode, with a conversation (and branches) of its own;
- what the program returns, if it is a text and the world has not ended the episode, is the answer given to the world;
- a program that raises breaks its episode, with its name and the reason; one that a limit stopped ends it normally.
"""

from __future__ import annotations

import inspect
import json
import time
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from troupe.actors.loops.base import LimitReached, Loop, Reply, Stage
from troupe.actors.loops.react import run_call
from troupe.actors.rendering import Message, SaidCall, Tool
from troupe.envs.base import Task, Turn
from troupe.envs.calls import leashed
from troupe.envs.returned import told
from troupe.protocol.errors import ConfigError, EpisodeError, InvalidAction, TroupeError, nearest
from troupe.protocol.importing import module_at
from troupe.protocol.trajectory import Call, Step

if TYPE_CHECKING:
    import httpx2
    import openai

_HOST = "http://episode.invalid"
"""Never looked up: requests are answered in this process."""


class ProgramFailed(EpisodeError):
    """The harness raised: its own fault or a fault that it could not handle; nothing was rewarded."""


@dataclass(slots=True)
class Episode:
    """The world, as a program may use it. observation: the first one. tools: OpenAI function tools; may be empty."""

    task: Task
    observation: str
    system: str
    tools: list[Tool]
    _stage: Stage

    async def step(self, text: str) -> Turn:
        """Gives a message to the world. Raises InvalidAction if it cannot read it: tell the agent, and go on."""
        turn = await self._stage.driver.step(text)
        self._credit(turn)
        return turn

    async def call(self, name: str, arguments: dict[str, Any]) -> str:
        """Runs a tool of the world and returns what the agent should be told, be it an error."""
        record = Call("", name, json.dumps(arguments, default=str), "ok")
        if _calls_so_far(self._stage) >= self._stage.limits.max_tool_calls:
            record.status = "refused"
        turn = await run_call(self._stage, SaidCall(name, arguments, record.arguments, "ok"), record)
        self._credit(turn)
        self._stage.outcome.steps[-1].calls.append(record)
        return turn.text

    def _credit(self, turn: Turn) -> None:
        if not self._stage.outcome.steps:  # the program acted before the agent said anything
            self._stage.outcome.steps.append(Step(state_key=self._stage.driver.state_key()))
        self._stage.outcome.credit(turn)


class ChatClient:
    """The policy as a chat API. base_url, api_key and http are what OpenAI-compatible libraries ask for."""

    api_key = "troupe"
    model = "policy"

    def __init__(self, stage: Stage, agent: str = "main") -> None:
        self._stage, self._agent = stage, agent
        self.base_url = f"{_HOST}/{agent}/v1"
        self.stopped: LimitReached | TroupeError | None = None
        """Why the policy would not answer: a limit, or what broke."""
        self._http: httpx2.AsyncClient | None = None
        self._others: dict[str, ChatClient] = {}

    def agent(self, name: str) -> ChatClient:
        """A client that speaks for the agent called `name`."""
        if name == self._agent:
            return self
        return self._others.setdefault(name, ChatClient(self._stage, name))

    @property
    def http(self) -> httpx2.AsyncClient:
        """An HTTP client whose requests are answered by the policy in this process."""
        import httpx2

        if self._http is None:
            self._http = httpx2.AsyncClient(transport=httpx2.MockTransport(self._serve))
        return self._http

    @property
    def openai(self) -> openai.AsyncOpenAI:
        """OpenAI's own client. What is told to it is answered by the policy."""
        import openai

        return openai.AsyncOpenAI(base_url=self.base_url, api_key=self.api_key, http_client=self.http, max_retries=0)

    async def complete(
        self,
        messages: list[Message],
        tools: list[Tool] | None = None,
        *,
        max_tokens: int | None = None,
        stop: list[str] | None = None,
    ) -> Reply:
        """The next turn of a conversation. Raises LimitReached when the episode has no turn left."""
        try:
            if _calls_so_far(self._stage) >= self._stage.limits.max_tool_calls:
                raise LimitReached("max_tool_calls")
            reply = await self._stage.turn(messages, tools, agent=self._agent, max_tokens=max_tokens, stop=stop)
        except ConfigError:
            raise  # a request that means nothing: the program's to mend
        except (LimitReached, TroupeError) as error:
            self.stopped = error
            raise
        self.stopped = None  # a program that made its history shorter, or asked again, goes on
        return reply

    def why_stopped(self) -> LimitReached | TroupeError | None:
        """Why the policy would not answer this client, or that of another agent; what broke comes before a limit."""
        found = [self.stopped, *(client.why_stopped() for client in self._others.values())]
        return min((why for why in found if why), key=lambda why: isinstance(why, LimitReached), default=None)

    async def close(self) -> None:
        """Ends the connections, which lead nowhere."""
        if self._http is not None:
            await self._http.aclose()
        for client in self._others.values():
            await client.close()

    # -- OpenAI's wire -----------------------------------------------------------------------------------------------

    async def _serve(self, request: httpx2.Request) -> httpx2.Response:
        import httpx2

        if not request.url.path.endswith("/chat/completions"):
            return httpx2.Response(404, json=_error(f"no '{request.url.path}' here: a program has /chat/completions only"))
        try:
            asked = json.loads(request.content)
            messages, tools = asked["messages"], [tool["function"] for tool in asked.get("tools") or []]
        except (ValueError, KeyError, TypeError) as error:
            return httpx2.Response(400, json=_error(f"not a chat completion request: {error!r}"))
        if asked.get("n") not in (None, 1):
            return httpx2.Response(400, json=_error("n must be 1: an episode goes on in one way; ask again for another branch"))
        stop = asked.get("stop") or []
        try:
            reply = await self.complete(
                messages,
                tools or None,
                max_tokens=asked.get("max_completion_tokens") or asked.get("max_tokens"),
                stop=[stop] if isinstance(stop, str) else list(stop),
            )
        except LimitReached as limit:
            code = "context_length_exceeded" if limit.stop in ("context_window", "max_tokens") else limit.stop
            return httpx2.Response(400, json=_error(str(limit), code))
        except (ConfigError, TypeError, AttributeError, ValueError) as error:
            return httpx2.Response(400, json=_error(f"not a conversation that can be told to the policy: {error}"))
        except TroupeError as error:
            return httpx2.Response(500, json=_error(str(error), type(error).__name__))
        if asked.get("stream"):
            return httpx2.Response(200, text=_stream(reply, asked), headers={"content-type": "text/event-stream"})
        return httpx2.Response(200, json=_completion(reply))


def program(path: str) -> Loop:
    """The loop that runs the function at `path` (module:function or file.py:function). Raises ConfigError."""
    function = _load(path)

    async def loop(stage: Stage) -> None:
        observation = await stage.driver.reset(stage.task)
        client = ChatClient(stage)
        episode = Episode(stage.task, observation, stage.system, stage.driver.tools(), stage)
        try:
            answer, error = await leashed(function(client, episode))
        finally:
            await client.close()
        if stage.driver.failure is not None:  # whatever the program made of it
            raise stage.driver.failure from error
        stopped = client.why_stopped()
        if isinstance(stopped, TroupeError):  # it comes back through libraries in many shapes: the cause itself is known here
            raise stopped from error
        if error is not None and stopped is None:
            if isinstance(error, TroupeError) and not isinstance(error, InvalidAction):
                raise error
            raise ProgramFailed(f"the program '{path}' raised {type(error).__name__}: {told(error)}") from error
        steps = stage.outcome.steps
        if isinstance(stopped, LimitReached):
            await stage.conclude(stopped.stop)
            return
        if isinstance(answer, str) and not stage.outcome.over:
            if not steps:
                steps.append(Step(state_key=stage.driver.state_key()))
            try:
                stage.outcome.credit(await stage.driver.step(answer))
            except InvalidAction:
                steps[-1].invalid = True
        await stage.conclude("terminated")

    return loop


def _load(path: str) -> Callable[[ChatClient, Episode], Awaitable[Any]]:
    module_name, colon, name = path.rpartition(":")
    if not colon or not module_name or not name:
        raise ConfigError(f"agent.program is '{path}': write module:function or path/to/file.py:function")
    try:
        module = module_at(module_name)
    except FileNotFoundError as error:
        raise ConfigError(f"agent.program: {error}") from error
    except Exception as error:  # user code: it may raise anything
        raise ConfigError(f"agent.program: '{module_name}' cannot be imported: {type(error).__name__}: {error}") from error
    function = getattr(module, name, None)
    if not inspect.iscoroutinefunction(function):
        if function is None:
            raise ConfigError(f"agent.program: there is no '{name}' in '{module_name}'.{nearest(name, vars(module))}")
        raise ConfigError(f"agent.program: '{name}' in '{module_name}' is not an async function: define it with `async def`")
    return function


def _calls_so_far(stage: Stage) -> int:
    return sum(len(step.calls) for step in stage.outcome.steps)


def _message(reply: Reply) -> dict[str, Any]:
    return {**reply.message, "content": reply.text or (None if reply.calls else "")}


def _finish(reply: Reply) -> str:
    return "tool_calls" if reply.calls and reply.finish == "stop" else "length" if reply.finish == "length" else "stop"


def _completion(reply: Reply) -> dict[str, Any]:
    return {
        "id": f"chatcmpl-{id(reply):x}",
        "object": "chat.completion",
        "created": int(time.time()),
        "model": ChatClient.model,
        "choices": [{"index": 0, "message": _message(reply), "finish_reason": _finish(reply), "logprobs": None}],
        "usage": _usage(reply),
    }


def _stream(reply: Reply, asked: dict[str, Any]) -> str:
    """The whole turn as one chunk: it is sampled at once."""
    base = {**_completion(reply), "object": "chat.completion.chunk"}
    del base["usage"]
    message = _message(reply)
    message["tool_calls"] = [{**call, "index": at} for at, call in enumerate(message.get("tool_calls", []))]
    chunks = [
        {**base, "choices": [{"index": 0, "delta": message, "finish_reason": None}]},
        {**base, "choices": [{"index": 0, "delta": {}, "finish_reason": _finish(reply)}]},
    ]
    if (asked.get("stream_options") or {}).get("include_usage"):
        chunks.append({**base, "choices": [], "usage": _usage(reply)})
    return "".join(f"data: {json.dumps(chunk)}\n\n" for chunk in chunks) + "data: [DONE]\n\n"


def _usage(reply: Reply) -> dict[str, int]:
    total = reply.prompt_tokens + reply.tokens
    return {"prompt_tokens": reply.prompt_tokens, "completion_tokens": reply.tokens, "total_tokens": total}


def _error(message: str, code: str | None = None) -> dict[str, Any]:
    return {"error": {"message": message, "type": "invalid_request_error", "param": None, "code": code}}
