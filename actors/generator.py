"""One replica of the policy: an engine, its weights, its version.

Promises:
- it takes no work before it has proved weights: `load_weights` fails unless the checksum of the tensors that it really
  holds equals the learner's (law 4);
- no token leaves it that was sampled with weights which it has not proved: an answer waits for the proof, and is none if that
  fails. A replica that failed once is of no more use: a later proof says nothing of the tokens before it;
- a request that asks for weights no older than some version is refused by a replica whose weights are older;
- an engine that broke takes the actor with it, so that its supervisor replaces both;
- one load at a time, and each token names the version that sampled it. What becomes of the turns in flight is said by
  `in_flight`. "update": they go on, with the new weights from the next token. "finish": new requests wait, those in flight
  end, then the weights change. "restart": those in flight are cut short and nothing of them is kept. Both wait for at most
  `finish_s`: what has not ended by then goes on as with "update", and "restart" drops it when it ends;
- a replica that drains takes no more requests. With "update" it hands over its turns: they end, as finish "abort", with what
  was sampled, from which their callers go on elsewhere; with "finish" they end here; with "restart" nothing of them is kept.
"""

from __future__ import annotations

import asyncio
import os
import threading
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Literal

from troupe.actors import transfer
from troupe.actors.collective import Receiver
from troupe.actors.context import Context, within
from troupe.actors.engines.base import Engine
from troupe.actors.line import Offer
from troupe.actors.transfer import Fetched
from troupe.protocol.errors import ActorLost, CheckpointError, NotReady, Overloaded, RemoteError, TimedOut
from troupe.protocol.messages import (
    Abort,
    Ack,
    Drain,
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

_ABORT_AGAIN_S = 1.0
"""A request that was on its way into the engine when it was aborted is asked to end again."""
_HELD_S = 10.0
"""Seconds that a request waits for new weights before its caller is told to ask again."""


class Generator:
    """Wraps the engine that `make_engine(name)` builds."""

    def __init__(
        self,
        context: Context,
        make_engine: Callable[[str], Engine],
        in_flight: Literal["finish", "update", "restart"] = "update",
        finish_s: float = 60.0,
    ) -> None:
        self._context = context
        self._engine = make_engine(context.name)
        self._in_flight, self._finish_s = in_flight, finish_s
        self._loading = asyncio.Lock()
        self._receiver = Receiver(context.name)
        self._proved = -1
        """Newest version that it has proved; -1: none."""
        self._failed = ""
        """What it held in the place of what it was sent."""
        self._flying: Counter[str] = Counter()
        self._landed = asyncio.Event()
        self._open = asyncio.Event()
        self._open.set()
        self._draining = False
        self._restarts = 0
        self._log = SpanLog(context.clock.now, busy="sampling")
        self._requests = InFlight(self._log, "sampling", "requests in flight")
        self._looked = context.clock.now()
        self._looking = threading.Lock()  # health is answered on a thread of its own

    async def start(self) -> None:
        await self._engine.start()

    async def generate(self, message: Generate) -> Generated:
        """Samples a continuation; see `Engine.generate`. One that is cut short, or to be sampled anew, has finish "abort" and
        the tokens from which the caller may go on. Raises NotReady when it drains, holds no proved weights or too old ones,
        and Overloaded while it waits to change them."""
        await self._enter(message)
        restarts = self._restarts
        self._flying[message.request] += 1
        try:
            with self._requests:
                made = await self._engine.generate(message)
            if restarts != self._restarts or (self._in_flight == "restart" and made.finish == "abort"):
                return replace(
                    made, tokens=made.tokens[:0], logprobs=made.logprobs[:0], versions=made.versions[:0], finish="abort"
                )
            await self._proof(message, made)
            return made
        except (RemoteError, ActorLost) as error:
            self._context.die(f"its engine is gone: {error}")
            raise
        finally:
            self._flying -= Counter([message.request])
            self._landed.set()

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
            if not self._failed:
                with self._log.of("load weights", track="weights", version=message.version):
                    tensors = await self._fetch(message)
                    held = await self._take(message.version, tensors)
                base = self._engine.base if message.base else ""
                if (held, base) == (message.checksum, message.base):
                    self._proved = message.version
                    return WeightsHeld(self._context.name, message.version, held)
                found, sent = (
                    (f"an adapter over the base {base}", message.base) if base != message.base else (held, message.checksum)
                )
                self._failed = f"holds {found} after loading version {message.version}, whose checksum is {sent}"
        raise CheckpointError(f"{self._context.name} {self._failed}: the replica must be replaced")

    async def drain(self, message: Drain) -> Health:
        """Takes no more requests from now on; how many are left is the load."""
        self._draining = True
        if message.now and self._in_flight != "finish":
            await self._cut()
        return await self.health(Ping())

    async def health(self, message: Ping) -> Health:
        """Load, busy share since somebody last looked, and tokens so far."""
        stats = self._look()
        return Health(
            self._context.name,
            os.getpid(),
            load=max(int(stats.get("load", 0)), self._flying.total()),
            busy=float(stats.get("busy", 0.0)),
            detail={"version": self._engine.version, "tokens": stats.get("tokens", 0.0)},
        )

    async def spans(self, message: GetSpans) -> Spans:
        """When there were requests in flight and weights came; of the totals, "busy" is the engine's own."""
        self._look()
        self._requests.cut()
        return self._log.told(self._context.name, message)

    # -- private -----------------------------------------------------------------------------------------------------

    async def _enter(self, message: Generate) -> None:
        """Lets a request in. Nothing is awaited after its last look at the weights."""
        name = self._context.name
        if not self._open.is_set():
            try:
                await within(_HELD_S, name, self._open.wait())
            except TimedOut as error:
                raise Overloaded(f"{name} lets its turns in flight end before it takes new weights") from error
        if self._draining:
            raise NotReady(f"{name} takes no more requests: it is being drained")
        if self._proved < 0 or self._failed:
            raise NotReady(f"{name} has not proved its weights")
        if self._engine.version < message.min_version:
            raise NotReady(
                f"{name} holds version {self._engine.version} and '{message.request}' takes none before {message.min_version}"
            )

    async def _fetch(self, message: Weights) -> Fetched | Offer:
        """The tensors, or for an engine that fetches them itself where they are to be had."""
        found = await self._context.blobs.get(message.tensors)
        if isinstance(found, Offer) and self._engine.capabilities.pulls:
            return found
        return await transfer.opened(found, self._receiver)

    async def _take(self, version: int, tensors: Fetched | Offer) -> str:
        """Lets the engine load, once the turns in flight are out of the way; returns its checksum."""
        try:
            if version > self._engine.version and self._in_flight != "update":
                self._open.clear()
                await self._clear(cut=self._in_flight == "restart")
                self._restarts += self._in_flight == "restart"
            return await self._engine.load_weights(version, tensors)
        except (RemoteError, ActorLost, TimedOut) as error:  # it holds neither these nor the old ones
            self._context.die(f"its engine is gone: {error}")
            raise
        finally:
            self._open.set()

    async def _proof(self, message: Generate, made: Generated) -> None:
        """Returns when the weights that sampled `made` are proved."""
        newest = int(made.versions[-1]) if len(made.versions) else -1
        if newest > self._proved:
            async with self._loading:  # until the proof is there, or is not
                pass
        if newest > self._proved or self._failed:
            raise NotReady(f"{self._context.name} sampled '{message.request}' with weights that it could not prove")

    async def _clear(self, cut: bool) -> None:
        """Waits until nothing is in flight, at most `finish_s`. cut: ends it early."""
        clock = self._context.clock
        deadline = clock.now() + self._finish_s
        while self._flying and clock.now() < deadline:
            if cut:
                await self._cut()
            self._landed.clear()
            if self._flying:
                left = deadline - clock.now()
                try:
                    await within(min(left, _ABORT_AGAIN_S) if cut else left, self._context.name, self._landed.wait())
                except TimedOut:
                    continue

    async def _cut(self) -> None:
        await asyncio.gather(*(self._engine.abort(request) for request in list(self._flying)))

    def _look(self) -> dict[str, float]:
        """The engine's figures; its busy share is of the time since the last look, whoever that was."""
        with self._looking:
            stats, now = self._engine.stats(), self._context.clock.now()
            self._log.tally("busy", stats.get("busy", 0.0) * max(0.0, now - self._looked))
            self._looked = now
        return stats
