"""The doors of a served world: OpenEnv's WebSocket and its HTTP routes, as a FastAPI application.

Promises:
- one world a socket, closed when the socket goes, however it goes; over capacity a socket is told so and closed;
- a frame that is no request is answered by OpenEnv's error and its code, and the session lives on;
- a socket that says nothing for `idle_s` is told so and closed;
- HTTP /reset and /step make a world for one call, as OpenEnv's do: they are for a look, not for episodes.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from fastapi import FastAPI, HTTPException, Request, WebSocket
from fastapi.responses import JSONResponse
from pydantic import ValidationError
from starlette.websockets import WebSocketDisconnect

from troupe.envs import calls
from troupe.envs.openenv import mcp, wire
from troupe.envs.openenv.session import Session, text_of
from troupe.envs.openenv.sessions import Sessions
from troupe.envs.openenv.wire import Message, Metadata, Refused
from troupe.envs.tools import ToolWorld
from troupe.protocol.errors import TroupeError

_STATUS = {wire.CAPACITY_REACHED: 503, wire.VALIDATION_ERROR: 422}
_ANSWERS = {"reset": "observation", "step": "observation", "state": "state", "mcp": "mcp"}


def application(sessions: Sessions) -> FastAPI:
    """The routes, in which `sessions` live as long as the application."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        async with sessions.reaped():
            yield

    app = FastAPI(title="OpenEnv Environment HTTP API", version=wire.VERSION, lifespan=lifespan)
    _look(app, sessions)
    _act(app, sessions)
    _sockets(app, sessions)

    @app.exception_handler(Refused)
    async def refused(request: Request, error: Refused) -> JSONResponse:
        return JSONResponse({"detail": error.body}, _STATUS.get(error.code, 500))

    @app.exception_handler(TroupeError)
    async def failed(request: Request, error: TroupeError) -> JSONResponse:
        return JSONResponse({"detail": {"message": str(error), "code": wire.EXECUTION_ERROR}}, 500)

    return app


def _look(app: FastAPI, sessions: Sessions) -> None:
    world = sessions.served.world

    @app.get("/health")
    async def health() -> dict[str, Any]:
        """Whether it takes work. degraded: worlds that do not return hold a quarter of its sessions."""
        stuck = calls.stuck()
        status = "degraded" if 4 * stuck > sessions.limit else "healthy"
        return {"status": status, "active_sessions": len(sessions), "max_sessions": sessions.limit, "stuck": stuck}

    @app.get("/metadata")
    async def metadata() -> Metadata:
        """What the world is."""
        about = (inspect.getdoc(world) or "").partition("\n\n")[0]
        if not about or about.startswith("Options"):
            about = (inspect.getdoc(sys.modules[world.__module__]) or world.__name__).partition("\n")[0]
        return Metadata(name=world.name or world.__name__, description=" ".join(about.split()), version=wire.VERSION)

    @app.get("/schema")
    async def schema() -> dict[str, Any]:
        """JSON schemas of actions, observations and states; the action's tells tools, turns and the system prompt too."""
        more: dict[str, Any] = {"system": world.system, "max_turns": world.max_turns}
        seen = wire.Observation
        if issubclass(world, ToolWorld):
            more["tools"] = [tool.spec for tool in world._tools.values()]
            more["judges"] = world.verify is not ToolWorld.verify
            seen = wire.ToolObservation
        return {
            "action": {**sessions.served.action.json_schema(), wire.EXTENSION: more},
            "observation": seen.model_json_schema(),
            "reset_observation": wire.Observation.model_json_schema(),
            "state": wire.State.model_json_schema(),
        }

    @app.get("/list_environments")
    async def list_environments() -> list[str]:
        """The one world that is served here."""
        return [world.name or world.__name__]


def _act(app: FastAPI, sessions: Sessions) -> None:
    @app.post("/reset")
    async def reset(asked: wire.Reset | None = None) -> dict[str, Any]:
        """The first observation of an episode that ends with this answer."""
        async with sessions.opened() as (_, session):
            return await session.reset(asked.model_dump(exclude_none=True) if asked else {})

    @app.post("/step")
    async def step(asked: wire.HttpStep) -> dict[str, Any]:
        """The first step of an episode that ends with this answer."""
        async with sessions.opened() as (_, session):
            try:
                return await session.step(asked.action)
            except ValidationError as error:
                raise HTTPException(422, wire.malformed(error).more["errors"]) from None

    @app.get("/state")
    async def state() -> wire.State:
        """The state of a world that no episode has begun in."""
        return wire.State()

    @app.post("/mcp")
    async def rpc(request: Request) -> dict[str, Any]:
        """JSON-RPC 2.0: tools/list, tools/call, openenv/session/create, openenv/session/close."""
        return await mcp.answer(sessions, await request.body())


def _sockets(app: FastAPI, sessions: Sessions) -> None:
    @app.websocket("/ws")
    async def ws(socket: WebSocket) -> None:
        name = socket.query_params.get("session_id")
        holding = sessions.attached(name) if name else sessions.opened()
        await _serve(socket, holding, sessions.idle_s, lambda session, said: _answer(sessions, session, said))

    @app.websocket("/mcp")
    async def rpc(socket: WebSocket) -> None:
        async def answer(session: Session, said: str) -> dict[str, Any]:
            return await mcp.answer(sessions, said, session)

        await _serve(socket, sessions.opened(), sessions.idle_s, answer)


async def _serve(
    socket: WebSocket,
    holding: AbstractAsyncContextManager[tuple[str, Session]],
    idle_s: float,
    answer: Callable[[Session, str], Awaitable[dict[str, Any] | None]],
) -> None:
    """A socket from its beginning to its end. answer: to a frame; None ends it. The world is closed before the socket is, so
    that whoever waits for that finds the place free."""
    await socket.accept()
    last: dict[str, Any] | None = None
    try:
        async with holding as (_, session):
            while (said := await _heard(socket, idle_s)) is not None:
                session.seen = time.monotonic()
                told = await answer(session, said)
                session.seen = time.monotonic()
                if told is None:
                    break
                await socket.send_text(text_of(told))
    except Refused as refused:
        last = _error(refused)
    except WebSocketDisconnect:
        return
    try:
        if last is not None:
            await socket.send_text(text_of(last))
        await socket.close()
    except (RuntimeError, WebSocketDisconnect):  # it is closed already
        pass


async def _heard(socket: WebSocket, idle_s: float) -> str | None:
    """The next frame; None if the other side has gone. Raises Refused after `idle_s`."""
    try:
        async with asyncio.timeout(idle_s):
            frame = await socket.receive()
    except TimeoutError:
        raise Refused(wire.SESSION_ERROR, f"nothing was said for {idle_s:g} s") from None
    if frame["type"] == "websocket.disconnect":
        return None
    return frame.get("text") or (frame.get("bytes") or b"").decode(errors="replace")


async def _answer(sessions: Sessions, session: Session, said: str) -> dict[str, Any] | None:
    """The frame that answers one of /ws; None for the one that closes."""
    try:
        message = _message(said)
        if message.type == "close":
            return None
        data = await _ask(sessions, session, message)
    except Refused as refused:
        return _error(refused)
    except ValidationError as error:
        return _error(wire.malformed(error))
    except TroupeError as error:
        return _error(Refused(wire.EXECUTION_ERROR, str(error)))
    return {"type": _ANSWERS[message.type], "data": data}


async def _ask(sessions: Sessions, session: Session, message: Message) -> dict[str, Any]:
    match message.type:
        case "reset":
            return await session.reset(message.data)
        case "step":
            return await session.step(message.data)
        case "state":
            return session.state()
        case _:
            return await mcp.answer(sessions, message.data, session)


def _message(said: str) -> Message:
    """Raises Refused or ValidationError."""
    try:
        data = json.loads(said)
    except (ValueError, RecursionError) as error:
        raise Refused(wire.INVALID_JSON, f"Invalid JSON: {error}") from None
    kind = data.get("type", "") if isinstance(data, dict) else None
    if kind is not None and kind not in (*_ANSWERS, "close"):
        raise Refused(wire.UNKNOWN_TYPE, f"Unknown message type: {str(kind)[:60]}")
    return Message.model_validate(data)


def _error(refused: Refused) -> dict[str, Any]:
    return {"type": "error", "data": refused.body}
