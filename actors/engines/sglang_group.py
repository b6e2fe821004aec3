"""Weights from the learner's own process into an SGLang server's, in a group of the two.

Promises:
- the group is made once, and anew when the learner was replaced;
- what fails before the learner has begun to send is NotReady, and the server goes on with what it has; what fails later leaves
  it with neither, and is any other error;
- a call to the server that would wait for a learner which is gone is given up.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import Awaitable
from typing import Any

from troupe.actors.collective import dtype_of
from troupe.actors.engines.sglang_wire import Wire
from troupe.actors.line import Line, Offer
from troupe.protocol.errors import ActorLost, NotReady, RemoteError, TimedOut

_LOOK_S = 0.5


class Group:
    """What the engine called `name` has of it: the connection to the learner. The server has the rest."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._line: Line | None = None
        self._token, self._group = "", ""

    async def enter(self, wire: Wire, offer: Offer) -> None:
        """Returns when the server is in a group with the learner that made the offer."""
        if self._token == offer.token and self._line is not None and not self._line.gone(0.0):
            return
        self.close()
        if self._group:
            with contextlib.suppress(RemoteError):
                await wire.call("/destroy_weights_update_group", {"group_name": self._group})
        self._group = uuid.uuid4().hex
        try:
            self._line = await asyncio.to_thread(Line.to, offer, self._group, self._name)
        except ActorLost as error:
            raise NotReady(f"{self._name} gets no weights: {error}") from error
        place = {"master_address": offer.host, "master_port": offer.store, "rank_offset": 1, "world_size": 2}
        call = wire.call(
            "/init_weights_update_group",
            place | {"group_name": self._group, "backend": offer.backend},
            limit_s=offer.limit_s + 30.0,
        )
        try:
            await self._while_the_learner_lives(call)
        except ActorLost as error:
            self.close()
            raise NotReady(f"{self._name} gets no weights: {error}") from error
        self._token = offer.token

    async def begin(self, offer: Offer) -> None:
        """Has the learner send."""
        assert self._line is not None
        try:
            await asyncio.to_thread(self._line.ask, offer.version)
        except (ActorLost, TimedOut) as error:
            self.close()
            raise NotReady(f"{self._name} gets no weights: {error}") from error

    async def take(self, wire: Wire, offer: Offer, flush: bool, limit_s: float) -> None:
        """Has the server receive, and load."""
        assert self._line is not None
        body = {
            "names": [name for name, _, _ in offer.layout],
            "dtypes": [str(dtype_of(dtype)).removeprefix("torch.") for _, dtype, _ in offer.layout],
            "shapes": [list(shape) for _, _, shape in offer.layout],
            "group_name": self._group,
            "flush_cache": flush,
            "weight_version": str(offer.version),
        }
        await wire.call("/begin_weight_update", {}, limit_s=limit_s)
        await self._while_the_learner_lives(wire.call("/update_weights_from_distributed", body, limit_s=limit_s))
        await wire.call("/end_weight_update", {}, limit_s=limit_s)
        await asyncio.to_thread(self._line.sent, offer.version, offer.limit_s)

    def close(self) -> None:
        """Leaves the learner."""
        if self._line is not None:
            self._line.close()
        self._line, self._token = None, ""

    async def _while_the_learner_lives(self, call: Awaitable[Any]) -> None:
        assert self._line is not None
        work = asyncio.ensure_future(call)
        try:
            while not (await asyncio.wait({work}, timeout=_LOOK_S))[0]:
                if self._line.gone(0.0):
                    raise ActorLost(f"the learner left {self._name} alone in the middle of new weights")
            work.result()
        finally:
            work.cancel()
