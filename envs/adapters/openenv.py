"""Any OpenEnv server as a world: `openenv:ws://HOST:PORT`, `openenv:http://HOST:PORT`, `openenv:image:NAME`.

The server's `/schema` says what an action is, and so what is made of the agent's message; where an action is a tool call, the
server's tools are offered to the agent. A server started by `troupe env serve` is recognised, and gives all that its world has:
splits, the system prompt, named reward parts, states, the verdict on an episode that a limit ends.

Promises:
- a server that refuses, is full, vanishes or answers nonsense breaks the episode (EnvironmentFailed); it never scores zero;
- what the server refuses as an action is told to the agent;
- a task is told by its seed, and the seeds of the two splits have none in common;
- one connection a world, closed with it. A container is removed with the last world in it.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar
from urllib.parse import urlsplit

import httpx

from troupe.envs import json_schema
from troupe.envs.base import InvalidAction, Task, TextWorld, Turn
from troupe.envs.openenv import actions, wire
from troupe.envs.openenv.actions import Form
from troupe.envs.openenv.link import Link, ServerSaid, is_local
from troupe.envs.openenv.places import Image, Place, Server
from troupe.envs.tools import Rewards, ToolWorld, short, untitled
from troupe.protocol.errors import ConfigError, EnvironmentFailed

_MAX_TURNS = 32
_UNLIMITED = 1_000_000
_SHOWN = ("text", "message", "prompt", "question", "content", "observation", "output", "result", "response")
"""Fields of an observation that are what the agent is told, if the server has one of them; the first of them."""
_ASK_S = 10.0
_TRIES = 3


@dataclass(frozen=True, slots=True)
class About:
    """What a server says of itself. ours: what `troupe env serve` adds, None for other servers."""

    place: Place
    name: str
    description: str
    action: dict[str, Any]
    ours: Mapping[str, Any] | None


def world(place: str) -> type[TextWorld]:
    """The world class of the server at `place`, which is asked for its schema now. Raises ConfigError."""
    kind, colon, image = place.partition(":")
    if kind == "image" and colon and image:
        found: Place = Image(image)
    elif kind in ("ws", "wss", "http", "https") and urlsplit(place).hostname:
        found = Server(place.rstrip("/"))
    else:
        raise ConfigError(f"openenv:{place}: give openenv:ws://HOST:PORT, openenv:http://HOST:PORT or openenv:image:NAME")
    with found.for_a_look() as url:
        about = _asked(found, url)
        tools = actions.has_tools(about.action) or (not actions.fields(about.action) and _lists_tools(url))
    given: dict[str, Any] = {"about": about, "name": f"openenv_{_slug(about.name)}", "__doc__": about.description}
    base: type[TextWorld] = _Tools
    if about.ours is not None:
        given |= {"system": str(about.ours.get("system", "")), "max_turns": int(about.ours.get("max_turns", _MAX_TURNS))}
        base = _JudgedTools if about.ours.get("judges") else _OurTools
    if tools:
        return type("OpenEnv", (base,), given)
    try:
        given["form"] = form = actions.form(about.action)
    except ValueError as error:
        raise ConfigError(f"openenv:{place}: the server's action schema is none: {error}") from None
    told = {"system": "\n\n".join(filter(None, (about.description, form.ask)))}
    return type("OpenEnv", (_Text,), told | given)


class _Played:
    """The episodes of one world, over one link. show: name of the observation's field that the agent is told, "json" for all
    of them, "" to choose. reset: what each reset also asks for."""

    def __init__(self, about: About, show: str, reset: Mapping[str, Any] | None) -> None:
        self.about, self.show, self.more = about, show, dict(reset or {})
        self.state_key = ""
        self.rewarded = False
        self._link: Link | None = None

    async def begin(self, task: Task) -> dict[str, Any]:
        """The first observation."""
        if self._link is None:
            self._link = Link(await self.about.place.enter())
        if self.about.ours is not None:  # its limit is not ours: the loop that plays here counts turns
            asked: dict[str, Any] = {"index": task.seed, "split": task.split, "max_turns": _UNLIMITED}
        else:
            asked = {"seed": 2 * task.seed + (task.split == "heldout")}
        self.rewarded = False
        return self._seen(await self.ask("reset", {**asked, **self.more}))

    async def ask(self, kind: str, data: dict[str, Any]) -> dict[str, Any]:
        """Raises EnvironmentFailed, and InvalidAction for an action that the server does not take."""
        if self._link is None:
            raise EnvironmentFailed("the world is closed")
        try:
            return await self._link.ask(kind, data)
        except ServerSaid as said:
            if said.code == wire.VALIDATION_ERROR and kind == "step":
                raise InvalidAction(said.message) from None
            raise EnvironmentFailed(f"{self._link.url}: {said.message} ({said.code})") from None

    async def act(self, action: dict[str, Any]) -> tuple[dict[str, Any], Turn]:
        """What the server observed, and the same as a turn."""
        data = await self.ask("step", action)
        seen = self._seen(data)
        reward, done = data.get("reward"), bool(data.get("done"))
        self.rewarded = self.rewarded or reward is not None
        if done and not self.rewarded:
            raise EnvironmentFailed("the server ended the episode and never gave a reward")
        success = seen.get("success")
        parts = seen.get("parts")
        return seen, Turn(
            self.text(seen),
            reward=0.0 if reward is None else reward,
            done=done,
            success=success if done and isinstance(success, bool) else None,
            parts=parts if isinstance(parts, dict) else {},
            truncated=done and seen.get("truncated") is True,
        )

    async def tools(self) -> list[dict[str, Any]]:
        """What the server offers now, as MCP describes it."""
        answer = await self.ask("mcp", {"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}})
        if "error" in answer:
            raise EnvironmentFailed(f"the server lists no tools: {short(str(answer['error']), 300)}")
        try:
            return [dict(tool) for tool in answer["result"]["tools"]]
        except (TypeError, KeyError, ValueError):
            raise EnvironmentFailed(f"the server's list of tools is none: {short(str(answer), 300)}") from None

    def text(self, seen: dict[str, Any]) -> str:
        """What the agent is told of an observation."""
        if self.show and self.show != "json":
            if self.show not in seen:
                raise EnvironmentFailed(f"the observation has no '{self.show}' to show; it has {', '.join(sorted(seen))}")
            return _said(seen[self.show])
        if not self.show:
            texts = [name for name, value in seen.items() if isinstance(value, str)]
            name = next((name for name in _SHOWN if name in texts), texts[0] if len(texts) == 1 else None)
            if name is not None:
                return str(seen[name])
        return json.dumps({n: v for n, v in seen.items() if n != "metadata"}, ensure_ascii=False, separators=(",", ":"))

    async def close(self) -> None:
        link, self._link = self._link, None
        if link is not None:
            try:
                await link.close()
            finally:
                await self.about.place.leave(link.url)

    def _seen(self, data: dict[str, Any]) -> dict[str, Any]:
        seen = data.get("observation")
        if not isinstance(seen, dict):
            raise EnvironmentFailed(f"the server's observation is {short(str(seen))}, not an object")
        key = seen.get("state_key")
        self.state_key = key if isinstance(key, str) else ""
        return seen


class _Text(TextWorld):
    about: ClassVar[About]
    form: ClassVar[Form]
    max_turns: ClassVar[int] = _MAX_TURNS

    def __init__(self, show: str = "", reset: dict[str, Any] | None = None) -> None:
        self.played = _Played(self.about, show, reset)

    async def reset(self, task: Task) -> str:
        return self.played.text(await self.played.begin(task))

    async def step(self, text: str) -> Turn:
        return _told(*await self.played.act(self.form.read(text)))

    def state_key(self) -> str:
        return self.played.state_key

    async def close(self) -> None:  # type: ignore[override]
        await self.played.close()


class _Tools(ToolWorld):
    """Of a server that is not ours: it has tools, and no place for an answer."""

    about: ClassVar[About]
    max_turns: ClassVar[int] = _MAX_TURNS

    def __init__(self, show: str = "", reset: dict[str, Any] | None = None) -> None:
        self.played = _Played(self.about, show, reset)

    async def reset(self, task: Task) -> str:
        opening = self.played.text(await self.played.begin(task))
        for spec in await self.played.tools():
            name, schema = str(spec.get("name")), spec.get("inputSchema", spec.get("input_schema")) or {}
            try:
                run = partial(self._call, name)
                self.add_tool(json_schema.tool(name, str(spec.get("description") or name), untitled(schema), run))
            except (TypeError, ValueError) as error:
                raise EnvironmentFailed(f"the server's tool '{short(name)}' cannot be described: {error}") from None
        return opening

    async def step(self, text: str) -> Turn:
        raise InvalidAction("this world is played by tool calls only: call one of the tools")

    async def _call(self, name: str, /, **arguments: Any) -> Turn:
        seen, turn = await self.played.act({"type": "call_tool", "tool_name": name, "arguments": arguments})
        error = seen.get("error")
        if isinstance(error, dict):
            if error.get("error_type") in ("timeout", "transport_error"):
                raise EnvironmentFailed(f"{name}: {short(str(error.get('message')), 500)}")
            raise InvalidAction(short(str(error.get("message")), 500))
        result = seen.get("result")
        if isinstance(result, dict) and (result.get("is_error") or result.get("isError")):
            raise InvalidAction(_said(result))
        if "text" not in seen and "result" in seen and not self.played.show:
            turn.text = _said(result)
        return turn

    def state_key(self) -> str:
        return self.played.state_key

    async def close(self) -> None:  # type: ignore[override]
        await self.played.close()


class _OurTools(_Tools):
    """Of `troupe env serve`: an answer is a message."""

    async def step(self, text: str) -> Turn:
        return _told(*await self.played.act({"type": "message", "message": text}))


class _JudgedTools(_OurTools):
    """Of a world that can be asked for its verdict."""

    async def verify(self) -> Rewards:
        _, turn = await self.played.act({"type": "end"})
        parts = {"outcome": 0.0, **turn.parts}
        return Rewards(parts.pop("outcome"), None, **parts)


# -- helpers ---------------------------------------------------------------------------------------------------------


def _told(seen: dict[str, Any], turn: Turn) -> Turn:
    """The turn. Raises InvalidAction where a world of ours could not read the action."""
    error = seen.get("error")
    if isinstance(error, dict) and error.get("error_type") == "invalid_action":
        raise InvalidAction(str(error.get("message")))
    return turn


def _said(result: Any) -> str:
    """What a tool returned: the text in it, or all of it as JSON."""
    if isinstance(result, dict) and isinstance(result.get("content"), list):
        texts = [block["text"] for block in result["content"] if isinstance(block, dict) and isinstance(block.get("text"), str)]
        if texts:
            return "\n".join(texts)
        result = result.get("data", result)
    if result is None:
        return ""
    return result if isinstance(result, str) else json.dumps(result, ensure_ascii=False, separators=(",", ":"))


def _asked(place: Place, url: str) -> About:
    with _http(url) as http:
        schema = _got(http, place, "/schema")
        metadata = _got(http, place, "/metadata")
    action = schema.get("action")
    if not isinstance(action, dict):
        raise ConfigError(f"openenv:{place}: /schema tells no action: is it an OpenEnv server?")
    ours = action.get(wire.EXTENSION)
    about = str(metadata.get("description") or "An OpenEnv environment.")
    action = {key: value for key, value in action.items() if key != wire.EXTENSION}
    return About(place, str(metadata.get("name") or "world"), about, action, ours if isinstance(ours, dict) else None)


def _http(url: str) -> httpx.Client:
    base = urlsplit(url)
    base = base._replace(scheme={"ws": "http", "wss": "https"}.get(base.scheme, base.scheme))
    return httpx.Client(base_url=base.geturl(), timeout=_ASK_S, trust_env=not is_local(url))


def _got(http: httpx.Client, place: Place, path: str) -> dict[str, Any]:
    reason = ""
    for again in range(_TRIES):
        time.sleep(0.5 * again)
        try:
            answer = http.get(path)
            answer.raise_for_status()
            found: dict[str, Any] = answer.json()
            return found if isinstance(found, dict) else {}
        except httpx.HTTPStatusError as error:
            reason = f"{path} is answered with {error.response.status_code}"
        except (httpx.HTTPError, httpx.InvalidURL, ValueError) as error:
            reason = short(str(error), 200) or type(error).__name__
    raise ConfigError(f"openenv:{place}: no OpenEnv server answers ({reason}): start one, as with troupe env serve NAME")


def _lists_tools(url: str) -> bool:
    with _http(url) as http:
        try:
            answer = http.post("/mcp", json={"jsonrpc": "2.0", "id": 1, "method": "tools/list", "params": {}}).json()
        except (httpx.HTTPError, ValueError):
            return False
    return isinstance(answer, dict) and "result" in answer


def _slug(name: str) -> str:
    return "".join(letter if letter.isalnum() else "_" for letter in name.lower())[:40] or "world"
