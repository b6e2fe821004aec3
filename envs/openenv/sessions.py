"""The sessions of a server: how many there may be, and when the last of each is over.

Promises: there are never more than `limit`; every session is closed once, whatever ended it; one that is held by name only (the
HTTP sessions of MCP clients) is closed when nobody has asked it anything for `idle_s`.
"""

from __future__ import annotations

import asyncio
import sys
import time
import uuid
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress

from troupe.envs.openenv.session import Served, Session
from troupe.envs.openenv.wire import CAPACITY_REACHED, FACTORY_ERROR, SESSION_ERROR, Refused
from troupe.protocol.errors import EpisodeError, TimedOut, TroupeError

_LOOK_S = 5.0


class Sessions:
    """See the top of the file. The methods that open raise Refused."""

    def __init__(self, served: Served, limit: int, idle_s: float) -> None:
        self.served, self.limit, self.idle_s = served, limit, idle_s
        self._held: dict[str, Session] = {}
        self._attached: set[str] = set()
        self._closing: set[str] = set()
        """Attached sessions that were asked to close: they do so when their socket goes."""

    def __len__(self) -> int:
        return len(self._held)

    def open(self) -> tuple[str, Session]:
        """A new session and its name, to be closed by `close`."""
        if len(self._held) >= self.limit:
            raise Refused(
                CAPACITY_REACHED,
                f"Server at capacity: {len(self._held)}/{self.limit} sessions active. Start it with more: --sessions N",
                active_sessions=len(self._held),
                max_sessions=self.limit,
            )
        name = str(uuid.uuid4())
        try:
            self._held[name] = session = Session(self.served)
        except TroupeError as error:
            factory = self.served.world.__name__
            raise Refused(FACTORY_ERROR, f"Failed to create the environment: {error}", factory_name=factory) from error
        return name, session

    def get(self, name: str) -> Session:
        """The session of that name."""
        if name not in self._held:
            raise Refused(SESSION_ERROR, f"Unknown session_id: {name[:60]}")
        return self._held[name]

    @asynccontextmanager
    async def opened(self) -> AsyncIterator[tuple[str, Session]]:
        """A session for the time of the block."""
        name, session = self.open()
        try:
            yield name, session
        finally:
            await asyncio.shield(self.close(name))

    @asynccontextmanager
    async def attached(self, name: str) -> AsyncIterator[tuple[str, Session]]:
        """A session that was opened before, held by a socket for the time of the block; by one socket only."""
        session = self.get(name)
        if name in self._attached:
            raise Refused(SESSION_ERROR, f"Session {name} already has an attached WebSocket")
        self._attached.add(name)
        try:
            yield name, session
        finally:
            self._attached.discard(name)
            session.seen = time.monotonic()
            if name in self._closing:
                await asyncio.shield(self.close(name))

    def ask_to_close(self, name: str) -> bool:
        """Whether the session may be closed now; False: it closes when its socket goes."""
        self.get(name)
        if name in self._attached:
            self._closing.add(name)
            return False
        return True

    async def close(self, name: str) -> None:
        """Closes the session, if there is one. Its world's trouble in doing so is told on stderr: no client hears it."""
        session = self._held.get(name)
        if session is None:
            return
        try:
            await session.close()
        except (EpisodeError, TimedOut) as error:
            print(f"troupe: a session could not be closed: {error}", file=sys.stderr)
        finally:  # only now is its place free
            self._held.pop(name, None)
            self._closing.discard(name)

    async def close_all(self) -> None:
        """Closes what is left."""
        await asyncio.gather(*(self.close(name) for name in list(self._held)))

    @asynccontextmanager
    async def reaped(self) -> AsyncIterator[None]:
        """Closes idle sessions for the time of the block, and all at its end."""
        task = asyncio.create_task(self._reap())
        try:
            yield
        finally:
            task.cancel()
            with suppress(asyncio.CancelledError):
                await task
            await self.close_all()

    async def _reap(self) -> None:
        while True:
            await asyncio.sleep(min(_LOOK_S, self.idle_s / 2))
            late = time.monotonic() - self.idle_s
            for name in [n for n, session in self._held.items() if n not in self._attached and session.seen < late]:
                await self.close(name)
