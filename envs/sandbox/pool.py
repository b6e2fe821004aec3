"""Warm sandboxes: some are open before they are asked for, so that an episode need not wait for one.

Promises:
- a sandbox is handed to one owner and never comes back: to give it up or to reset it is to discard it;
- at most `limit` are open at a time, warm ones included; who asks for more waits, at most `wait_s`;
- a pool that was closed has none open, whoever held them, and opens none.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Self

from troupe.envs import sandbox
from troupe.envs.sandbox.base import Sandbox
from troupe.envs.sandbox.settings import SandboxSettings
from troupe.protocol.errors import ConfigError, NotReady, Overloaded

_CLOSED = "the pool of sandboxes is closed"


class Pool:
    """Sandboxes of one kind. warm: how many are kept ready. limit: how many may be open. wait_s: seconds to wait for one."""

    def __init__(self, settings: SandboxSettings, *, warm: int = 2, limit: int = 16, wait_s: float = 60.0) -> None:
        if not 0 <= warm <= limit or limit < 1:
            raise ConfigError(
                f"a pool of {limit} sandboxes cannot keep {warm} warm; 0 <= warm <= limit, and limit is at least 1"
            )
        self.settings = settings
        self._warm, self._limit, self._wait_s = warm, limit, wait_s
        self._ready: deque[Sandbox] = deque()
        self._leased: set[Sandbox] = set()
        self._opening: set[asyncio.Task[None]] = set()
        self._asked: deque[asyncio.Future[Sandbox]] = deque()
        self._closed = False

    async def take(self, wait_s: float | None = None) -> Sandbox:
        """A sandbox that nobody has used. wait_s: other than the pool's.

        Raises Overloaded if there is none in time, NotReady if the pool is closed, and what `sandbox.open` raises.
        """
        if self._closed:
            raise NotReady(_CLOSED)
        wait_s = self._wait_s if wait_s is None else wait_s
        asked: asyncio.Future[Sandbox] = asyncio.get_running_loop().create_future()
        self._asked.append(asked)
        self._serve()
        try:
            async with asyncio.timeout(wait_s):
                return await asked
        except BaseException as error:
            if asked in self._asked:
                self._asked.remove(asked)
            if asked.done() and not asked.cancelled() and asked.exception() is None:
                await self.discard(asked.result())  # it came as we left
            if isinstance(error, TimeoutError):
                full = f"{len(self._leased)} of at most {self._limit} are held"
                raise Overloaded(f"no sandbox for {wait_s:g} s: {full}; raise the pool's limit or wait_s") from None
            raise

    async def discard(self, box: Sandbox) -> None:
        """Gives up a sandbox that was taken. May be called again."""
        if box not in self._leased:
            return
        try:
            await box.close()
        finally:
            self._leased.discard(box)
            self._serve()

    async def reset(self, box: Sandbox) -> Sandbox:
        """Another sandbox in place of `box`."""
        await self.discard(box)
        return await self.take()

    @asynccontextmanager
    async def lease(self) -> AsyncIterator[Sandbox]:
        """A sandbox for the length of a block."""
        box = await self.take()
        try:
            yield box
        finally:
            await self.discard(box)

    def keep(self, warm: int) -> None:
        """Changes how many are kept ready from now on; those that are ready already stay."""
        self._warm = min(warm, self._limit)
        self._serve()

    async def fill(self) -> None:
        """Waits until as many are warm as should be, or opening one failed."""
        self._serve()
        while self._opening:
            await asyncio.wait(self._opening)

    @property
    def ready(self) -> int:
        """How many wait to be taken."""
        return len(self._ready)

    async def close(self) -> None:
        """Closes all, also those that are held."""
        self._closed = True
        for task in tuple(self._opening):
            task.cancel()
        await asyncio.gather(*self._opening, return_exceptions=True)
        while self._asked:
            _fail(self._asked.popleft(), NotReady(_CLOSED))
        boxes = [*self._ready, *self._leased]
        self._ready.clear()
        self._leased.clear()
        await asyncio.gather(*(box.close() for box in boxes))

    async def __aenter__(self) -> Self:
        await self.fill()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    def _serve(self) -> None:
        """Hands what is ready to who has asked first, and opens as many as are asked for or should be warm."""
        if self._closed:
            return
        while self._asked and self._ready:
            asked = self._asked.popleft()
            if not asked.done():
                box = self._ready.popleft()
                self._leased.add(box)
                asked.set_result(box)
        wanted = self._warm + len(self._asked) - len(self._ready) - len(self._opening)
        room = self._limit - len(self._ready) - len(self._leased) - len(self._opening)
        for _ in range(min(wanted, room)):
            task = asyncio.create_task(self._open())
            self._opening.add(task)

    async def _open(self) -> None:
        """Opens one. Who has asked first meets the error; if nobody has, the next to ask will try again."""
        task = asyncio.current_task()
        assert task is not None
        try:
            box = await sandbox.open(self.settings)
        except Exception as error:
            if self._asked:
                _fail(self._asked.popleft(), error)
            return
        finally:
            self._opening.discard(task)
        self._ready.append(box)
        self._serve()


def _fail(asked: asyncio.Future[Sandbox], error: Exception) -> None:
    if not asked.done():
        asked.set_exception(error)
