"""What the environment pools of a company tell of themselves: how long their worlds' calls take, and how they are now.

Owns the sum of all latencies that were told in this life of the director. Promises: what a pool tells twice counts once;
a pool that died and came back begins at zero and takes nothing away.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from troupe.actors.context import Context, within
from troupe.actors.env_pool import EnvPool
from troupe.protocol import latency
from troupe.protocol.errors import ActorLost, NotReady, Overloaded, TimedOut
from troupe.protocol.latency import Latencies
from troupe.protocol.messages import Health, Ping

_PASSING = (ActorLost, NotReady, Overloaded, TimedOut)


class PoolLoad:
    """Hears pools."""

    def __init__(self, context: Context) -> None:
        self._context = context
        self._heard: dict[str, tuple[float, Latencies]] = {}
        self.total: Latencies = {}

    async def look(self, pools: Iterable[str]) -> list[Health]:
        """Asks all of them at once. Those that do not answer are left out."""
        return [health for health in await asyncio.gather(*(self._ask(name) for name in pools)) if health is not None]

    def hear(self, health: Health) -> None:
        """Adds what is new in what a pool tells."""
        born, before = self._heard.get(health.name, (health.born, {}))
        if born != health.born:
            before = {}
        if _calls(health.latency) < _calls(before):
            return  # an answer that was overtaken by a later one
        latency.add(self.total, since(health.latency, before))
        self._heard[health.name] = health.born, latency.copied(health.latency)

    async def _ask(self, name: str) -> Health | None:
        try:
            health = await within(10.0, f"{name}.health", self._context.ref(name, EnvPool).health(Ping()))
        except _PASSING:
            return None
        self.hear(health)
        return health


def _calls(found: Latencies) -> int:
    return sum(histogram.count for calls in found.values() for histogram in calls.values())


def since(now: Latencies, earlier: Latencies) -> Latencies:
    """What came to `earlier` until `now`."""
    none = latency.Histogram()
    return {
        world: {call: histogram.since(earlier.get(world, {}).get(call, none)) for call, histogram in calls.items()}
        for world, calls in now.items()
    }


def columns(found: Latencies) -> dict[str, float]:
    """Metrics of all worlds together: `env_step_s_p50`, `_p90`, `_p99`, and the p90 of the other calls that there were."""
    named = {f"env_step_s_p{round(100 * q)}": latency.of_call(found, "step").quantile(q) for q in (0.5, 0.9, 0.99)}
    named |= {f"env_{call}_s_p90": latency.of_call(found, call).quantile(0.9) for call in ("reset", "verify", "close")}
    return {name: seconds for name, seconds in named.items() if seconds is not None}


def told(found: Latencies) -> dict[str, dict[str, dict[str, float]]]:
    """For a summary: world → call → count and seconds."""
    return {
        world: {
            call: {
                "count": h.count,
                "mean_s": h.seconds / max(1, h.count),
                **{f"p{round(100 * q)}_s": h.quantile(q) or 0.0 for q in (0.5, 0.9, 0.99)},
                "max_s": h.longest,
            }
            for call, h in sorted(calls.items())
        }
        for world, calls in sorted(found.items())
    }
