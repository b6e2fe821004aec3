"""A socket to an OpenEnv server: one request, one answer, and the end of it.

Promises: whatever is wrong with the server is EnvironmentFailed and names its address; what the server says in an error
frame is `ServerSaid`; a request that was given up closes the socket, so that no late answer is taken for another's.
"""

from __future__ import annotations

import asyncio
import ipaddress
import json
from contextlib import suppress
from typing import Any
from urllib.parse import urlsplit

from websockets.asyncio.client import ClientConnection, connect
from websockets.exceptions import ConnectionClosed, InvalidHandshake

from troupe.envs.openenv import wire
from troupe.envs.tools import short
from troupe.protocol.errors import EnvironmentFailed

OPEN_S = 15.0
_CLOSE_S = 3.0
_FRAME = 100 * 2**20
_ANSWERS = {"reset": "observation", "step": "observation", "state": "state", "mcp": "mcp"}


class ServerSaid(Exception):
    """An error frame."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


class Link:
    """A connection to the server at `url` (http, https, ws or wss, without a path to /ws)."""

    def __init__(self, url: str) -> None:
        self.url = url
        self._socket: ClientConnection | None = None
        self._alone = asyncio.Lock()

    async def ask(self, kind: str, data: dict[str, Any] | None = None) -> dict[str, Any]:
        """The data of the answer to one frame. Raises ServerSaid, EnvironmentFailed."""
        said = json.dumps({"type": kind} if data is None else {"type": kind, "data": data}, ensure_ascii=False)
        frame = said.encode("utf-8", "replace").decode()  # a lone surrogate in a message would break many a server
        async with self._alone:
            socket = self._socket = self._socket or await self._opened()
            try:
                with suppress(ConnectionClosed):  # a server that is full says so, and closes: what it said can still be read
                    await socket.send(frame)
                answer = await socket.recv()
            except BaseException as error:
                self._socket = None
                socket.transport.abort()
                if isinstance(error, ConnectionClosed):
                    raise EnvironmentFailed(f"the OpenEnv server at {self.url} has gone: {short(str(error), 200)}") from None
                raise
        return self._read(kind, answer)

    async def close(self) -> None:
        """Says good-bye, and waits a little until the server has closed its world."""
        socket, self._socket = self._socket, None
        if socket is None:
            return
        with suppress(ConnectionClosed, TimeoutError):
            async with asyncio.timeout(_CLOSE_S):
                await socket.send('{"type":"close"}')
                await socket.wait_closed()
        await socket.close()

    async def _opened(self) -> ClientConnection:
        url = urlsplit(self.url)
        scheme = {"http": "ws", "https": "wss"}.get(url.scheme, url.scheme)
        address = url._replace(scheme=scheme, path=url.path.rstrip("/") + "/ws")
        more: dict[str, Any] = {"proxy": None} if is_local(self.url) else {}
        try:
            return await connect(
                address.geturl(), open_timeout=OPEN_S, close_timeout=_CLOSE_S, max_size=_FRAME, compression=None, **more
            )
        except (OSError, InvalidHandshake, ConnectionClosed, EOFError, TimeoutError) as error:
            why = short(str(error), 200) or type(error).__name__
            raise EnvironmentFailed(f"the OpenEnv server at {self.url} cannot be reached: {why}") from None

    def _read(self, kind: str, said: str | bytes) -> dict[str, Any]:
        try:
            answer = json.loads(said)
            found, data = answer["type"], answer["data"]
            if not isinstance(data, dict):
                raise TypeError
        except (ValueError, TypeError, KeyError, RecursionError):
            said = short(str(said[:200]))
            raise EnvironmentFailed(f"the OpenEnv server at {self.url} does not speak OpenEnv: {said}") from None
        if found == "error":
            message, code = short(str(data.get("message")), 500), str(data.get("code"))
            if code == wire.CAPACITY_REACHED:
                raise EnvironmentFailed(
                    f"the OpenEnv server at {self.url} is full ({message}): give it more sessions, or play fewer at once"
                )
            raise ServerSaid(code, message)
        if found != _ANSWERS[kind]:
            raise EnvironmentFailed(f"the OpenEnv server at {self.url} answered '{kind}' with '{short(str(found))}'")
        return data


def is_local(url: str) -> bool:
    """Whether `url` is of this machine: no proxy leads there."""
    host = urlsplit(url).hostname or ""
    try:
        return host == "localhost" or ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False
