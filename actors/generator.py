"""One replica of the policy: an engine, its weights, its version.

Promises:
- it takes no work before it has proved weights: `load_weights` fails unless the checksum of the tensors that it really
  holds equals the learner's (law 4);
- no token leaves it that was sampled with weights which it has not proved: an answer waits for the proof, and is none if that
  fails;
- an engine that broke takes the actor with it, so that its supervisor replaces both;
- one load at a time; requests in flight go on, and each token names the version that sampled it;
- once it drains it takes no more requests, and finishes those that it has.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable

from troupe.actors import transfer
from troupe.actors.context import Context
from troupe.actors.engines.base import Engine
from troupe.protocol.errors import ActorLost, CheckpointError, NotReady, RemoteError
from troupe.protocol.messages import (
    Abort,
    Ack,
    Drain,
    EndSession,
    Generate,
    Generated,
    Health,
    Ping,
    Weights,
    WeightsHeld,
)


class Generator:
    """Wraps the engine that `make_engine(name)` builds."""

    def __init__(self, context: Context, make_engine: Callable[[str], Engine]) -> None:
        self._context = context
        self._engine = make_engine(context.name)
        self._loading = asyncio.Lock()
        self._proved = -1
        """Newest version that it has proved; -1: none, or it failed to."""
        self._draining = False
        self._requests = 0

    async def start(self) -> None:
        await self._engine.start()

    async def generate(self, message: Generate) -> Generated:
        """Samples a continuation; see `Engine.generate`. Raises NotReady while it holds no proved weights, or drains."""
        if self._draining:
            raise NotReady(f"{self._context.name} finishes what it runs and takes nothing new")
        if self._proved < 0:
            raise NotReady(f"{self._context.name} has not proved its weights")
        self._requests += 1
        try:
            made = await self._engine.generate(message)
            newest = int(made.versions[-1]) if len(made.versions) else -1
            if newest > self._proved:
                async with self._loading:  # until the proof is there, or is not
                    pass
            if newest > self._proved:
                raise NotReady(f"{self._context.name} sampled '{message.request}' with weights that it could not prove")
            return made
        except (RemoteError, ActorLost) as error:
            self._context.die(f"its engine is gone: {error}")
            raise
        finally:
            self._requests -= 1

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
            tensors = await transfer.fetch(self._context.blobs, message)
            held = await self._engine.load_weights(message.version, tensors)
            self._proved = message.version if held == message.checksum else -1
        if held != message.checksum:
            raise CheckpointError(
                f"{self._context.name} holds {held} after loading version {message.version}, whose checksum is "
                f"{message.checksum}: the replica must be replaced"
            )
        return WeightsHeld(self._context.name, message.version, held)

    async def drain(self, message: Drain) -> Health:
        """Takes no more requests. Load is what it still has to finish."""
        self._draining = True
        return await self.health(Ping())

    async def health(self, message: Ping) -> Health:
        """Load, busy share and tokens so far."""
        stats = self._engine.stats()
        return Health(
            self._context.name,
            os.getpid(),
            load=self._requests,
            busy=float(stats.get("busy", 0.0)),
            detail={"version": self._engine.version, "tokens": stats.get("tokens", 0.0)},
        )
