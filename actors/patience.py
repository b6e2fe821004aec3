"""How long to wait for an answer: for the store, which its supervisor may be replacing right now, by tries; for work of which
nobody can say how long it takes, by its progress."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import Awaitable, Callable
from typing import TypeVar

from troupe.actors.context import Context, within
from troupe.protocol.errors import ActorLost, NotReady, Overloaded, TimedOut

T = TypeVar("T")

_TRIES = 60
_LOOK_S = 0.5


async def patiently(context: Context, what: str, call: Callable[[], Awaitable[T]], each_s: float = 60.0) -> T:
    """The answer to `call`, which is the same however often it is asked for. It is called again, about a second later, while
    the store is lost, not ready, full, or silent for `each_s` seconds; `_TRIES` times in all. Raises TimedOut, which names
    `what`."""
    reason = ""
    for _ in range(_TRIES):
        try:
            return await within(each_s, what, call())
        except (ActorLost, NotReady, Overloaded, TimedOut) as error:
            reason = str(error)
            await asyncio.sleep(0.5 + context.rng.random())
    raise TimedOut(f"{what} failed {_TRIES} times: {reason}")


async def while_it_moves(
    context: Context, what: str, work: Awaitable[T], look: Callable[[], Awaitable[object]], silent_s: float, fix: str
) -> T:
    """What comes of `work`, however long it takes, while what `look` tells keeps changing. Raises TimedOut, which names `what`
    and the `fix`, when that has been the same for `silent_s` seconds. That `look` finds nobody is no news."""
    task = asyncio.ensure_future(work)
    seen, moved = None, context.clock.now()
    try:
        while not task.done():
            with contextlib.suppress(ActorLost, NotReady):
                if (now := await look()) != seen:
                    seen, moved = now, context.clock.now()
            if context.clock.now() > moved + silent_s:
                raise TimedOut(f"{what} has made no progress for {silent_s:g} s: {fix}")
            await asyncio.wait({task}, timeout=_LOOK_S)
        return await task
    finally:
        task.cancel()
