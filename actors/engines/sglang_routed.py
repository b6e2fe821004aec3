"""SGLang servers behind an sglang-router, spoken to as one: requests go to the router, all else to each server.

Promises:
- a pause, new weights and the end of a pause have reached every server before anything else is done. Each proves what it
  holds; if they hold different weights, the error tells which holds what. The router's list must still be that of the start;
- an abort is told to all servers, so it reaches the one that has the request: the router does not pass it on;
- a server that is gone is named in the error of the requests that it had.

A router leaves out of a request what it does not know, `stream_interval` for one: tokens then come one by one.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from typing import Any

from troupe.actors.engines.base import Piece
from troupe.actors.engines.sglang_wire import Wire
from troupe.protocol.errors import ActorLost, RemoteError, TimedOut

_ANSWER_S = 20.0


class Routed(Wire):
    """name: of all together, in errors. url: of the router. servers: those behind it."""

    def __init__(self, name: str, url: str, servers: list[Wire]) -> None:
        super().__init__(f"{name} behind the router", url)
        self.servers = servers

    async def call(self, path: str, body: dict[str, Any] | None = None, *, limit_s: float = 60.0) -> dict[str, Any]:
        """To each server, and when all have answered, the first one's answer; what is the router's own, to the router."""
        if path in ("/generate", "/workers"):
            return await super().call(path, body, limit_s=limit_s)
        calls = (server.call(path, body, limit_s=limit_s) for server in self.servers)
        answers = await asyncio.gather(*calls, return_exceptions=True)
        for answer in answers:
            if isinstance(answer, BaseException):
                raise answer
        return answers[0]  # type: ignore[return-value]

    async def generate(self, body: dict[str, Any]) -> AsyncIterator[tuple[Piece, dict[str, Any] | None]]:
        """See `Wire`. Raises ActorLost naming the server that is gone, if one is."""
        try:
            async for piece, ended in super().generate(body):
                yield piece, ended
                if ended:
                    return
        except (ActorLost, RemoteError) as error:
            for server in self.servers:
                if not await server.up():
                    raise ActorLost(f"{server._name}, behind the router, does not answer: {error}") from error
            raise

    async def held(self, limit_s: float) -> str:
        """See `Wire`. Raises RemoteError if they hold different weights, or if the router knows others by now."""
        known, listed = {server.url for server in self.servers}, {entry["url"] for entry in await self.listed()}
        if known != listed:
            raise RemoteError(f"{self._name} has other servers than before: {', '.join(sorted(known ^ listed))} came or went")
        sums = await asyncio.gather(*(server.held(limit_s) for server in self.servers))
        if len(set(sums)) > 1:
            told = ", ".join(f"{server._name} holds {held}" for server, held in zip(self.servers, sums, strict=True))
            raise RemoteError(f"servers behind one router hold different weights: {told}")
        return sums[0]

    async def close(self) -> None:
        await asyncio.gather(super().close(), *(server.close() for server in self.servers))


async def found(name: str, wire: Wire) -> Wire:
    """What answers at the wire's address: itself if that is a server, or all behind it if it is a router.

    Servers that a router lists and that do not answer are taken off its list: it would go on sending requests there. Raises
    ActorLost if none is left.
    """
    try:
        listed = await wire.listed()
    except RemoteError:
        return wire
    all_of_them = [Wire(name, entry["url"]) for entry in listed]
    answers = await asyncio.gather(*(_answers(server) for server in all_of_them))
    for entry, server, answered in zip(listed, all_of_them, answers, strict=True):
        if not answered:
            await server.close()
            await _take_off(wire, entry)
    if not any(answers):
        raise ActorLost(f"{name}: no server behind the router at {wire.url} answers; it listed {len(listed)}")
    await wire.close()
    return Routed(name, wire.url, [server for server, answered in zip(all_of_them, answers, strict=True) if answered])


async def _answers(server: Wire) -> bool:
    deadline = time.monotonic() + _ANSWER_S
    while not await server.up():
        if time.monotonic() > deadline:
            return False
        await asyncio.sleep(0.5)
    return True


async def _take_off(router: Wire, entry: dict[str, Any]) -> None:
    await router.take_off(entry)
    deadline = time.monotonic() + _ANSWER_S
    while any(other["id"] == entry["id"] for other in await router.listed()):
        if time.monotonic() > deadline:
            raise TimedOut(f"the router at {router.url} still lists {entry['url']}, which does not answer")
        await asyncio.sleep(0.2)
