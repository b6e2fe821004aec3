"""The tools of a served world over JSON-RPC, as OpenEnv's own MCP environments speak it: `tools/list` and `tools/call`.

It is also how its MCP client opens and closes sessions that have no socket. Promises: every request is answered by a response
of JSON-RPC 2.0, whatever it holds; a call through here is a step of the episode like any other.
"""

from __future__ import annotations

import json
from typing import Any

from pydantic import ValidationError

from troupe.envs.openenv import wire
from troupe.envs.openenv.session import Session
from troupe.envs.openenv.sessions import Sessions
from troupe.envs.openenv.wire import Refused, Rpc
from troupe.envs.tools import ToolWorld
from troupe.protocol.errors import TroupeError

_CODES = {wire.VALIDATION_ERROR: wire.INVALID_PARAMS, wire.SESSION_ERROR: wire.INVALID_PARAMS}
_CODES |= {wire.CAPACITY_REACHED: wire.SERVER_ERROR, wire.FACTORY_ERROR: wire.SERVER_ERROR}


class RpcError(Exception):
    """A response that is an error."""

    def __init__(self, code: int, message: str, data: Any = None) -> None:
        super().__init__(message)
        self.body = {"code": code, "message": message, "data": data}


async def answer(sessions: Sessions, said: str | bytes | dict[str, Any], session: Session | None = None) -> dict[str, Any]:
    """The response to a request. session: the one that its socket holds; else `params.session_id` names one, or it is a new
    one that ends with the response."""
    request_id = None
    try:
        request = _read(said)
        request_id = request.id
        return {"jsonrpc": "2.0", "id": request_id, "result": await _result(sessions, request, session)}
    except RpcError as error:
        body = error.body
    except Refused as error:
        body = {"code": _CODES.get(error.code, wire.INTERNAL_ERROR), "message": error.message, "data": error.more or None}
    except TroupeError as error:
        body = {"code": wire.INTERNAL_ERROR, "message": str(error), "data": None}
    return {"jsonrpc": "2.0", "id": request_id, "error": body}


def _read(said: str | bytes | dict[str, Any]) -> Rpc:
    try:
        data = said if isinstance(said, dict) else json.loads(said)
    except (ValueError, RecursionError) as error:
        raise RpcError(wire.PARSE_ERROR, f"Parse error: {error}") from None
    try:
        return Rpc.model_validate(data)
    except ValidationError as error:
        raise RpcError(wire.INVALID_REQUEST, f"Invalid request: {wire.malformed(error).message}") from None


async def _result(sessions: Sessions, request: Rpc, held: Session | None) -> Any:
    params = request.params
    match request.method:
        case "openenv/session/create":
            if held is not None:
                raise RpcError(wire.INVALID_REQUEST, "this socket has a session already")
            return {"session_id": sessions.open()[0]}
        case "openenv/session/close":
            name = _text(params, "session_id")
            if not sessions.ask_to_close(name):
                return {"session_id": name, "closed": False, "closing": True}
            await sessions.close(name)
            return {"session_id": name, "closed": True}
        case "tools/list" | "tools/call":
            if not issubclass(sessions.served.world, ToolWorld):
                raise RpcError(wire.INTERNAL_ERROR, "Environment does not support MCP: its actions are messages, not calls")
            session = held or (sessions.get(_text(params, "session_id")) if params.get("session_id") else None)
            if session is not None:
                return await _ask(session, request.method, params)
            async with sessions.opened() as (_, session):
                return await _ask(session, request.method, params)
    raise RpcError(wire.NO_METHOD, f"Method not found: {request.method[:60]}")


async def _ask(session: Session, method: str, params: dict[str, Any]) -> dict[str, Any]:
    if method == "tools/list":
        named = [{**tool, "inputSchema": tool["input_schema"]} for tool in await session.tools()]
        for tool in named:
            del tool["input_schema"]
        return {"tools": named}
    arguments = params.get("arguments", {})
    try:
        data = await session.step({"type": "call_tool", "tool_name": _text(params, "name"), "arguments": arguments})
    except ValidationError as error:
        raise wire.malformed(error) from None
    seen = data["observation"]
    return {
        "content": [{"type": "text", "text": seen["text"]}],
        "data": seen["text"],
        "isError": seen["error"] is not None,
        "_meta": {"reward": data["reward"], "done": data["done"]},
    }


def _text(params: dict[str, Any], name: str) -> str:
    value = params.get(name)
    if not isinstance(value, str) or not value:
        raise RpcError(wire.INVALID_PARAMS, f"Invalid params - '{name}' is required")
    return value
