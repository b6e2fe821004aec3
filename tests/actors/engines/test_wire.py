"""HTTP to an engine's server (`actors/engines/wire.py`), without a server of theirs."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager

import pytest

from troupe.actors.engines import sglang_wire, vllm_wire
from troupe.actors.engines.wire import ServerWire
from troupe.protocol.errors import ActorLost

Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


@asynccontextmanager
async def served(kind: type[ServerWire], serve: Serve) -> AsyncIterator[ServerWire]:
    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    wire: ServerWire = kind("s", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")  # type: ignore[call-arg, arg-type]
    try:
        yield wire
    finally:
        await wire.close()
        server.close()


async def head(reader: asyncio.StreamReader) -> None:
    while (await reader.readline()).strip():
        pass


async def test_no_request_meets_a_server_that_closes_an_idle_connection() -> None:
    """This one closes a connection that was idle for 2 s just when a request comes on it, as any may at its own limit."""
    asked = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        loop, last = asyncio.get_running_loop(), float("inf")
        while await reader.readline() and loop.time() < last + 2.0:
            await head(reader)
            asked, last = asked + 1, loop.time()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        writer.close()

    async with served(vllm_wire.Wire, serve) as wire:
        for pause_s in (0.0, 0.0, 2.5):
            await asyncio.sleep(pause_s)
            assert await wire.call("/health") == {}
        assert asked == 3


@pytest.mark.parametrize("kind", [vllm_wire.Wire, sglang_wire.Wire])
@pytest.mark.parametrize("said", [b"", b"data: [DONE]\n\n"])
async def test_an_answer_without_a_last_word_is_of_a_server_that_is_lost_but_vllm_ends_so_what_it_had_not_begun(
    kind: type[ServerWire], said: bytes
) -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await head(reader)
        writer.write(b"HTTP/1.1 200 OK\r\nConnection: close\r\nContent-Type: text/event-stream\r\n\r\n" + said)
        await writer.drain()
        writer.close()

    asked = {"sampling_params": {"top_k": 0}}
    async with served(kind, serve) as wire:
        if said and kind is vllm_wire.Wire:
            ((piece, ended),) = [answer async for answer in wire.generate(asked)]
            assert not len(piece.tokens) and ended == {"type": "abort"}
        else:
            with pytest.raises(ActorLost, match="before its end"):
                assert not [answer async for answer in wire.generate(asked)]
