"""One replica of the policy: an engine, its weights, its version.

Promises:
- it takes no work before it has proved weights: `load_weights` fails unless the checksum of the tensors that it really
  holds equals the learner's (law 4);
- an engine that broke takes the actor with it, so that its supervisor replaces both;
- one load at a time; requests in flight go on, and each token names the version that sampled it.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections.abc import Callable

from troupe.actors.context import Context
from troupe.actors.engines.base import Engine
from troupe.protocol.errors import ActorLost, CheckpointError, RemoteError
from troupe.protocol.messages import (
    Abort,
    Ack,
    EndSession,
    Generate,
    Generated,
    GetSpans,
    Health,
    Ping,
    Spans,
    Weights,
    WeightsHeld,
)
from troupe.protocol.spans import InFlight, SpanLog


class Generator:
    """Wraps the engine that `make_engine(name)` builds."""

    def __init__(self, context: Context, make_engine: Callable[[str], Engine]) -> None:
        self._context = context
        self._engine = make_engine(context.name)
        self._loading = asyncio.Lock()
        self._log = SpanLog(context.clock.now)
        self._requests = InFlight(self._log, "sampling", "requests in flight")
        self._looked = context.clock.now()
        self._looking = threading.Lock()  # health is answered on a thread of its own

    async def start(self) -> None:
        await self._engine.start()

    async def generate(self, message: Generate) -> Generated:
        """Samples a continuation; see `Engine.generate`."""
        try:
            with self._requests:
                return await self._engine.generate(message)
        except (RemoteError, ActorLost) as error:
            self._context.die(f"its engine is gone: {error}")
            raise

    async def abort(self, message: Abort) -> Ack:
        """Ends a request early; one that is unknown, or over, is ignored."""
        await self._engine.abort(message.request)
        return Ack()

    async def end_session(self, message: EndSession) -> Ack:
        """Drops a session's cache."""
        await self._engine.end_session(message.session)
        return Ack()

    async def load_weights(self, message: Weights) -> WeightsHeld:
        """Takes over the weights and proves them. Raises CheckpointError if what it holds is not what was sent."""
        async with self._loading:
            if message.version < self._engine.version:
                raise CheckpointError(
                    f"{self._context.name} holds version {self._engine.version}; version {message.version} came too late"
                )
            with self._log.of("load weights", track="weights", version=message.version):
                tensors = await self._context.blobs.get(message.tensors)
                held = await self._engine.load_weights(message.version, tensors)
        if held != message.checksum:
            raise CheckpointError(
                f"{self._context.name} holds {held} after loading version {message.version}, whose checksum is "
                f"{message.checksum}: the replica must be replaced"
            )
        return WeightsHeld(self._context.name, message.version, held)

    async def health(self, message: Ping) -> Health:
        """Load, busy share since somebody last looked, and tokens so far."""
        stats = self._look()
        return Health(
            self._context.name,
            os.getpid(),
            load=int(stats.get("load", 0)),
            busy=float(stats.get("busy", 0.0)),
            detail={"version": self._engine.version, "tokens": stats.get("tokens", 0.0)},
        )

    async def spans(self, message: GetSpans) -> Spans:
        """When there were requests in flight and weights came; of the totals, "busy" is the engine's own."""
        self._look()
        self._requests.cut()
        return self._log.told(self._context.name, message)

    def _look(self) -> dict[str, float]:
        """The engine's figures; its busy share is of the time since the last look, whoever that was."""
        with self._looking:
            stats, now = self._engine.stats(), self._context.clock.now()
            self._log.tally("busy", stats.get("busy", 0.0) * max(0.0, now - self._looked))
            self._looked = now
        return stats
