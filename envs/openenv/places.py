"""Where an OpenEnv server is: at an address, or in containers that are started for those who play in it."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from typing import Protocol

from troupe.envs.openenv import container
from troupe.envs.openenv.container import Container
from troupe.protocol.errors import ConfigError, EnvironmentFailed


class Place(Protocol):
    """A server that worlds play on; as text it is what follows `openenv:`."""

    def for_a_look(self) -> AbstractContextManager[str]:
        """The server's URL, for the time of the block. Raises ConfigError."""

    async def enter(self) -> str:
        """The URL of a server with a place for one more world. Raises EnvironmentFailed."""

    async def leave(self, url: str) -> None:
        """One world of the server at `url` has ended."""


@dataclass(frozen=True, slots=True)
class Server:
    """A server that somebody else runs."""

    url: str

    def __str__(self) -> str:
        return self.url

    @contextmanager
    def for_a_look(self) -> Iterator[str]:
        yield self.url

    async def enter(self) -> str:
        return self.url

    async def leave(self, url: str) -> None:
        return


@dataclass(frozen=True, slots=True)
class Image:
    """A container image of an OpenEnv environment: each world has a container of its own, as OpenEnv's own client has."""

    name: str
    _open: dict[str, Container] = field(default_factory=dict)
    """By URL."""

    def __str__(self) -> str:
        return f"image:{self.name}"

    @contextmanager
    def for_a_look(self) -> Iterator[str]:
        try:
            started = container.start(self.name)
        except EnvironmentFailed as error:
            raise ConfigError(f"openenv:{self}: {error}") from error
        try:
            yield started.url
        finally:
            started.close()

    async def enter(self) -> str:
        starting = asyncio.ensure_future(asyncio.to_thread(container.start, self.name))
        try:
            started = await asyncio.shield(starting)
        except asyncio.CancelledError:  # nobody waits for it any more: it goes as soon as it is there
            starting.add_done_callback(_closed_late)
            raise
        except ConfigError as error:
            raise EnvironmentFailed(str(error)) from error
        self._open[started.url] = started
        return started.url

    async def leave(self, url: str) -> None:
        await asyncio.to_thread(self._open.pop(url).close)


def _closed_late(starting: asyncio.Future[Container]) -> None:
    if not starting.cancelled() and starting.exception() is None:
        starting.result().close()
