"""Which environment pools are members of a company, and which are on their way out.

Owns the wanted number of pools, and those that drain. Promises:
- a change is in the journal before it is begun, so that a new director goes on with it: it keeps the members, lets those on
  their way out finish, and brings the number about;
- each change is told with its reason; changes come one after the other, and do not wait for pools that are on their way out.
"""

from __future__ import annotations

import asyncio
import itertools
from typing import TYPE_CHECKING

from troupe.actors.context import Context
from troupe.actors.elastic import Elastic, drain
from troupe.actors.ledger import Ledger
from troupe.actors.pool_load import PoolLoad
from troupe.actors.settings import EnvSettings
from troupe.protocol.errors import ConfigError

if TYPE_CHECKING:
    from troupe.actors.company import Company


class Roster:
    """The pools of `company`. wanted: at its start. episode_s: the longest that an episode may take."""

    def __init__(
        self, company: Company, context: Context, settings: EnvSettings, ledger: Ledger, wanted: int, episode_s: float
    ) -> None:
        self._company, self._context, self._settings, self._ledger = company, context, settings, ledger
        self._drain_s = episode_s if settings.drain_s is None else settings.drain_s
        self._changing = asyncio.Lock()
        self._leaving: dict[str, asyncio.Task[None]] = {}
        self._elastic: Elastic | None = None
        self.load = PoolLoad(context)
        self.wanted = wanted
        self.scalings = 0
        """Times that the number was changed, in this life of the director."""

    def draining(self) -> list[str]:
        """Pools that finish what they run."""
        return sorted(self._leaving)

    def tasks(self) -> list[asyncio.Task[None]]:
        """What runs for pools that are on their way out."""
        return list(self._leaving.values())

    def opening(self) -> list[str]:
        """The pools to begin with. Those that a director before had sent away, or not come to, are sent away."""
        members, leaving = self._ledger.members("env-")
        for name in [*members[self.wanted :], *leaving]:
            self._send_off(name)
        return [*members[: self.wanted], *_new(self.wanted - len(members), self._ledger.names("env-"))]

    async def follow_the_load(self) -> None:
        """Changes the number with the load, until it is cancelled."""
        self._elastic = Elastic(self._context, self._settings, self.load, self._company.pools, self.change)
        await self._elastic.keep()

    async def scale(self, wanted: int) -> None:
        """Somebody wants that many. Raises ConfigError if the load would have them otherwise at once."""
        least, most = self._settings.bounds()
        if self._settings.elastic and not least <= wanted <= most:
            raise ConfigError(
                f"{wanted} pools are not within env.min_actors = {least} and env.max_actors = {most} of this run, which scales "
                "by itself: ask for a number within"
            )
        await self.change(wanted, "asked for by hand")

    async def change(self, wanted: int, why: str) -> None:
        """Brings about that many pools: new ones live when it returns."""
        async with self._changing:
            have = self._company.members("env-")
            if len(have) == wanted:
                return
            self.wanted = wanted
            self.scalings += 1
            self._ledger.note("scale", wanted=self._company.wanted(), pools=[len(have), wanted], why=why)
            self._ledger.say(f"pools {len(have)} → {wanted}: {why}")
            for name in have[wanted:]:
                self._send_off(name)
            new = _new(wanted - len(have), self._ledger.names("env-"))
            await asyncio.gather(*(self._company.ensure(name) for name in new))
            if self._elastic is not None:
                self._elastic.rule.rest()
        await self._company.inform()

    def _send_off(self, name: str) -> None:
        self._ledger.note("draining", actor=name)
        self._company.dismiss(name)
        self._leaving[name] = asyncio.ensure_future(self._company.keep(self._see_off(name)))

    async def _see_off(self, name: str) -> None:
        async def left() -> int | None:
            heard = await self._company.tell_pools()
            return heard.left.get(name) if heard is not None else None

        finished = await drain(self._context, name, left, self._drain_s, self.load.hear)
        self._ledger.note("retired", actor=name, finished=finished)
        del self._leaving[name]


def _new(count: int, taken: set[str]) -> list[str]:
    """Names for `count` more pools, none of which a pool of this run ever had: others may still think of that one."""
    free = (name for name in map("env-{}".format, itertools.count()) if name not in taken)
    return list(itertools.islice(free, max(0, count)))
