"""The gateway over HTTP: a FastAPI application, which Ray Serve hosts in `app.py`.

Promises: every error is a JSON body in OpenAI's shape whose `code` is the name of our error class; a stream that breaks
after it began ends with such a body as its last event, because its status has been sent by then.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.exceptions import HTTPException

from troupe.protocol.errors import (
    ActorLost,
    CheckpointError,
    ConfigError,
    NotReady,
    Overloaded,
    TaskFailed,
    TimedOut,
    TroupeError,
)
from troupe.serve import chat
from troupe.serve.chat import ChatRequest, WeightsRequest
from troupe.serve.checkpoints import CheckpointMissing
from troupe.serve.gateway import Gateway, Held, InTraining, Piece

_STATUS: list[tuple[type[TroupeError], int]] = [
    (CheckpointMissing, 404),
    (CheckpointError, 409),
    (InTraining, 409),
    (ConfigError, 400),
    (TaskFailed, 400),
    (Overloaded, 429),
    (NotReady, 503),
    (TimedOut, 503),
    (ActorLost, 503),
]


def application(gateway: Gateway) -> FastAPI:
    """The routes of `gateway`, which starts and closes with the application."""

    @contextlib.asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        await gateway.start()
        try:
            yield
        finally:
            await gateway.close()

    app = FastAPI(title="Troupe", lifespan=lifespan)

    @app.post("/v1/chat/completions")
    async def complete(request: ChatRequest) -> Any:
        """The policy's next turn in a conversation."""
        prompt, pieces = await gateway.answer(request)
        shapes = chat.Shapes(gateway.model)
        if not request.stream:
            return await _whole(shapes, request, prompt, pieces)
        # The first piece is awaited here, so that what is wrong with the request is still an HTTP status.
        first = await anext(pieces)
        events = _events(shapes, request, prompt, first, pieces)
        return StreamingResponse(events, media_type="text/event-stream", headers={"Cache-Control": "no-cache"})

    @app.get("/v1/models")
    async def models() -> dict[str, Any]:
        """The one policy that is served here."""
        return {"object": "list", "data": [_model(gateway)]}

    @app.get("/v1/models/{name}")
    async def model(name: str) -> dict[str, Any]:
        """The policy by its name."""
        if name != gateway.model:
            raise HTTPException(404, f"there is no model '{name}' here, only '{gateway.model}'")
        return _model(gateway)

    @app.get("/weights")
    async def weights() -> dict[str, Any]:
        """The version that answers, and its proof."""
        return _weights(gateway, await gateway.weights())

    @app.post("/weights")
    async def load(request: WeightsRequest) -> dict[str, Any]:
        """Changes to a newer version without a restart."""
        if (request.version is None) == (request.checkpoint is None):
            raise ConfigError('say either {"version": N} or {"checkpoint": "step-N or a checkpoint folder"}')
        return _weights(gateway, await gateway.load(request))

    @app.get("/healthz")
    async def health() -> dict[str, Any]:
        """200 once a version can answer; 503 with the reason before."""
        held = gateway.ready()
        if not held.generators:
            raise NotReady("every generator is being replaced")
        return {"status": "ok", "version": held.version, "generators": len(held.generators)}

    @app.exception_handler(TroupeError)
    async def refused(request: Request, error: TroupeError) -> JSONResponse:
        status = _status(error)
        headers = {"Retry-After": "1"} if status in (429, 503) else None
        return JSONResponse(_body(error), status, headers)

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        if first["type"] == "json_invalid":
            text, param = f"the body is not JSON: {first['ctx']['error']}", None
        else:
            param = ".".join(str(part) for part in first["loc"][1:]) or None
            text = f"{param or 'body'}: {first['msg']}"
        return JSONResponse(chat.error(text, type="invalid_request_error", param=param), 400)

    @app.exception_handler(HTTPException)
    async def elsewhere(request: Request, error: HTTPException) -> JSONResponse:
        text = f"{request.method} {request.url.path}: {error.detail}"
        return JSONResponse(chat.error(text, type="invalid_request_error"), error.status_code, error.headers)

    @app.exception_handler(Exception)
    async def broken(request: Request, error: Exception) -> JSONResponse:
        return JSONResponse(_body(error), 500)

    return app


async def _whole(shapes: chat.Shapes, request: ChatRequest, prompt: int, pieces: AsyncIterator[Piece]) -> dict[str, Any]:
    choices = request.n or 1
    texts: list[str] = [""] * choices
    tokens: list[list[tuple[str, float]]] = [[] for _ in range(choices)]
    last: list[Piece] = [Piece(i, "") for i in range(choices)]
    async for piece in pieces:
        texts[piece.choice] += piece.text
        tokens[piece.choice] += piece.tokens
        last[piece.choice] = piece
    body = [
        {
            "index": i,
            "message": _message(texts[i], last[i]),
            "logprobs": chat.logprobs(tokens[i]) if request.logprobs else None,
            "finish_reason": last[i].finish,
        }
        for i in range(choices)
    ]
    usage = chat.usage(prompt, sum(piece.sampled for piece in last))
    return shapes.whole(body, usage, max(piece.version for piece in last))


async def _events(
    shapes: chat.Shapes, request: ChatRequest, prompt: int, first: Piece, rest: AsyncIterator[Piece]
) -> AsyncIterator[str]:
    with_usage = request.stream_options is not None and request.stream_options.include_usage
    sampled: dict[int, int] = {}
    version = first.version
    try:
        for index in range(request.n or 1):
            opening = {"index": index, "delta": {"role": "assistant", "content": ""}, "finish_reason": None}
            yield _event(shapes.chunk([opening], version, None, with_usage))
        async for piece in _with_first(first, rest):
            sampled[piece.choice] = piece.sampled
            version = max(version, piece.version)
            if not (piece.text or piece.tokens or piece.finish):
                continue
            calls = [{"index": at, **call} for at, call in enumerate(piece.calls)]
            choice = {
                "index": piece.choice,
                "delta": {**({"content": piece.text} if piece.text else {}), **({"tool_calls": calls} if calls else {})},
                "logprobs": chat.logprobs(piece.tokens) if request.logprobs else None,
                "finish_reason": piece.finish,
            }
            yield _event(shapes.chunk([choice], version, None, with_usage))
        if with_usage:
            yield _event(shapes.chunk([], version, chat.usage(prompt, sum(sampled.values())), True))
        yield "data: [DONE]\n\n"
    except TroupeError as error:
        yield _event(_body(error))


async def _with_first(first: Piece, rest: AsyncIterator[Piece]) -> AsyncIterator[Piece]:
    yield first
    async for piece in rest:
        yield piece


def _message(text: str, last: Piece) -> dict[str, Any]:
    message: dict[str, Any] = {"role": "assistant", "content": text, "refusal": None}
    if last.calls:
        message = {**message, "content": text or None, "tool_calls": last.calls}
    return message


def _event(body: dict[str, Any]) -> str:
    return f"data: {json.dumps(body, ensure_ascii=False, separators=(',', ':'))}\n\n"


def _model(gateway: Gateway) -> dict[str, Any]:
    return {"id": gateway.model, "object": "model", "created": gateway.since, "owned_by": "troupe"}


def _weights(gateway: Gateway, held: Held) -> dict[str, Any]:
    return {"run": gateway.model, **asdict(held), "checkpoint": held.checkpoint or None}


def _status(error: Exception) -> int:
    return next((status for cls, status in _STATUS if isinstance(error, cls)), 500)


def _body(error: Exception) -> dict[str, Any]:
    status = _status(error)
    kind = {429: "rate_limit_error"}.get(status, "invalid_request_error" if status < 500 else "server_error")
    return chat.error(str(error) or type(error).__name__, type=kind, code=type(error).__name__)
