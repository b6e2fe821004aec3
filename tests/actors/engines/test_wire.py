"""HTTP to an engine's server (`actors/engines/wire.py`), without a server of theirs."""

from __future__ import annotations

import asyncio

from troupe.actors.engines.vllm_wire import Wire


async def test_no_request_meets_a_server_that_closes_an_idle_connection() -> None:
    """This one closes a connection that was idle for 2 s just when a request comes on it, as any may at its own limit."""
    asked = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        loop, last = asyncio.get_running_loop(), float("inf")
        while await reader.readline() and loop.time() < last + 2.0:
            while (await reader.readline()).strip():
                pass
            asked, last = asked + 1, loop.time()
            writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\n{}")
        writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    wire = Wire("s", f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}")
    try:
        for pause_s in (0.0, 0.0, 2.5):
            await asyncio.sleep(pause_s)
            assert await wire.call("/health") == {}
        assert asked == 3
    finally:
        await wire.close()
        server.close()
