"""Sandboxes that all worlds of a process share: one pool of each kind, bounded together.

Promises:
- worlds of one event loop with equal settings and limit share one pool: together they hold at most `limit` sandboxes;
- who finds none free waits, at most `WAIT_S`, and the error says who holds them and what to change;
- a pool opens with its first sandbox and closes with the last world that used it; what a world still holds when it closes
  is discarded;
- sandboxes are kept warm only while several worlds use the pool: one alone would throw them away.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from weakref import WeakKeyDictionary

from troupe.envs import sandbox
from troupe.envs.sandbox.base import Sandbox
from troupe.envs.sandbox.pool import Pool
from troupe.envs.sandbox.settings import SandboxSettings
from troupe.protocol.errors import ConfigError, NotReady

WAIT_S = 15.0
"""Seconds to wait for a sandbox. Shorter than a world's call may take (`rollout.env_step_s`), so that the wait names itself."""

_WARM = 2
_CLOSED = "the world is closed, and so are its sandboxes"
_pools: WeakKeyDictionary[asyncio.AbstractEventLoop, dict[tuple[SandboxSettings, int], _Users]] = WeakKeyDictionary()


class _Users:
    """A pool and who uses it."""

    def __init__(self, pool: Pool) -> None:
        self.pool = pool
        self.of: set[Shared] = set()


class Shared:
    """One world's way to them. limit: sandboxes that all worlds of this kind may hold together. wait_s: for a free one.

    Raises ConfigError, of one line, if there can be no such sandbox on this machine.
    """

    def __init__(self, settings: SandboxSettings, limit: int = 16, wait_s: float = WAIT_S) -> None:
        if limit < 1:
            raise ConfigError(f"{limit} sandboxes are none; allow at least 1")
        sandbox.check(settings)
        self.settings = settings
        self._limit, self._wait_s = limit, wait_s
        self._held: set[Sandbox] = set()
        self._users: _Users | None = None
        self._closed = False

    async def take(self) -> Sandbox:
        """A sandbox that nobody has used. Raises Overloaded if none is free in time, NotReady if this was closed."""
        pool = self._join().pool
        box = await pool.take(self._wait_s)
        if self._closed:  # while we waited
            await pool.discard(box)
            raise NotReady(_CLOSED)
        self._held.add(box)
        return box

    async def discard(self, box: Sandbox) -> None:
        """Gives up a sandbox that was taken. May be called again."""
        if box in self._held and self._users is not None:
            self._held.discard(box)
            await self._users.pool.discard(box)

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[Sandbox]:
        """A sandbox for the length of a block."""
        box = await self.take()
        try:
            yield box
        finally:
            await self.discard(box)

    async def close(self) -> None:
        """Discards what is held, and the pool if nobody else uses it. May be called again."""
        self._closed = True
        users, self._users = self._users, None
        if users is None:
            return
        users.of.discard(self)
        if users.of:
            users.pool.keep(_warm(users))
            await asyncio.gather(*(users.pool.discard(box) for box in self._held))
        else:
            pools = _pools[asyncio.get_running_loop()]
            if pools.get(self._key) is users:
                del pools[self._key]
            await users.pool.close()

    @property
    def _key(self) -> tuple[SandboxSettings, int]:
        return self.settings, self._limit

    def _join(self) -> _Users:
        if self._closed:
            raise NotReady(_CLOSED)
        if self._users is None:
            pools = _pools.setdefault(asyncio.get_running_loop(), {})
            if self._key not in pools:
                pools[self._key] = _Users(Pool(self.settings, warm=0, limit=self._limit))
            users = self._users = pools[self._key]
            users.of.add(self)
            users.pool.keep(_warm(users))
        return self._users


def _warm(users: _Users) -> int:
    return _WARM if len(users.of) > 1 else 0
