"""Asking the store, which its supervisor may be replacing right now. Its answers are the same however often it is asked."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import TypeVar

from troupe.actors.context import Context, within
from troupe.protocol.errors import ActorLost, NotReady, Overloaded, TimedOut

T = TypeVar("T")

_TRIES = 60


async def patiently(context: Context, what: str, call: Callable[[], Awaitable[T]], each_s: float = 60.0) -> T:
    """The answer to `call`. It is called again, about a second later, while the store is lost, not ready, full, or silent for
    `each_s` seconds; `_TRIES` times in all. Raises TimedOut, which names `what`."""
    reason = ""
    for _ in range(_TRIES):
        try:
            return await within(each_s, what, call())
        except (ActorLost, NotReady, Overloaded, TimedOut) as error:
            reason = str(error)
            await asyncio.sleep(0.5 + context.rng.random())
    raise TimedOut(f"{what} failed {_TRIES} times: {reason}")
