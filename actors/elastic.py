"""Environment pools that come and go: looks at their load and asks for more or fewer, and takes one away politely.

`actors/scaling.py` has the rule, docs/pools.md explains it. Promises:
- a pool that is drained takes no more episodes and finishes those it has; what it has not finished when its time is up is
  moved: it runs again elsewhere, same task and seed, and counts neither as failed nor as tried;
- a pool is ended only when it and the dispatcher both say that nothing of it is left, or its time is up.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import suppress

from troupe.actors.context import Context, within
from troupe.actors.dispatcher import Dispatcher
from troupe.actors.env_pool import EnvPool
from troupe.actors.pool_load import PoolLoad, since
from troupe.actors.scaling import Sample, Scaling
from troupe.actors.settings import EnvSettings
from troupe.protocol import latency
from troupe.protocol.errors import ActorLost, NotReady, Overloaded, TimedOut
from troupe.protocol.messages import Drain, Health, Ping

LOOK_S = 2.0
_PASSING = (ActorLost, NotReady, Overloaded, TimedOut)
_POLL_S = 0.2
_GRACE_S = 30.0
"""For episodes that were cut off to be stored."""


async def drain(
    context: Context,
    name: str,
    left: Callable[[], Awaitable[int | None]],
    limit_s: float,
    hear: Callable[[Health], None] = lambda health: None,
) -> bool:
    """Ends the pool called `name` once it has finished its episodes, after `limit_s` whatever it runs. Returns whether it
    had finished. left: tells the dispatcher that the pool drains, and returns how many episodes it has there; None: it did
    not hear."""
    pool, deadline = context.ref(name, EnvPool), context.clock.now() + limit_s
    done = False
    while await context.exists(name):
        late = context.clock.now() - deadline
        waiting, health = await left(), None
        with suppress(*_PASSING):
            health = await within(10.0, f"{name}.drain", pool.drain(Drain(now=late >= 0)))
            hear(health)
        done = waiting == 0 and health is not None and health.load == 0
        if done or late >= _GRACE_S:
            break
        await asyncio.sleep(_POLL_S)
    await context.kill(name)
    return done


class Elastic:
    """Scales the pools of one company by their load. scale: brings the wanted number about, and says why."""

    def __init__(
        self,
        context: Context,
        settings: EnvSettings,
        load: PoolLoad,
        pools: Callable[[], list[str]],
        scale: Callable[[int, str], Awaitable[None]],
    ) -> None:
        self._context, self._load, self._pools, self._scale = context, load, pools, scale
        self._slots = settings.slots
        least, most = settings.bounds()
        self.rule = Scaling(least, most, settings.scale_out_s, settings.scale_in_s, settings.slow_step_s)

    async def keep(self) -> None:
        """Looks and acts until it is cancelled."""
        while True:
            await asyncio.sleep(LOOK_S)
            sample = await self._look()
            decision = self.rule.decide(sample) if sample is not None else None
            if decision is not None:
                await self._scale(decision.pools, decision.why)

    async def _look(self) -> Sample | None:
        """What is seen now; None if the dispatcher does not answer, or does not know of every pool yet."""
        pools, before = self._pools(), latency.copied(self._load.total)
        healths = await self._load.look(pools)
        try:
            dispatcher = self._context.ref("dispatcher", Dispatcher)
            status = await within(10.0, "dispatcher.status", dispatcher.status(Ping()))
        except _PASSING:
            return None
        if not pools or status.slots < len(pools) * self._slots:
            return None
        return Sample(
            at=self._context.clock.now(),
            pools=len(pools),
            slots=self._slots,
            used=status.used,
            queued=status.waiting,
            step_s=latency.of_call(since(self._load.total, before), "step").quantile(0.9),
            lag=sum(health.lag for health in healths) / max(1, len(healths)),
        )
