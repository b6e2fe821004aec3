"""HTTP to an engine's server: calls, and answers that stream.

Promises: a server that cannot be reached, does not answer in time or refuses is ActorLost, TimedOut or RemoteError; each
names it. No request is sent on a connection that the server may be closing because nothing was asked on it.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator
from typing import Any

import httpx

from troupe.actors.engines.base import Piece
from troupe.protocol.errors import ActorLost, RemoteError, TimedOut

_NO_SILENCE_LIMIT = httpx.Timeout(None, connect=30.0)
"""A paused server is silent for as long as it is paused; the engine looks after it otherwise."""
_IDLE_S = 1.0
"""An idle connection is closed here after this time. Servers do it after 5 s, as httpx would: then the two may meet."""


class ServerWire(ABC):
    """name: of the server, in errors. url: http://host:port. ready: the path that answers 200 once it serves."""

    def __init__(self, name: str, url: str, ready: str) -> None:
        self.url, self._name, self._ready = url, f"{name} ({url})", ready
        limits = httpx.Limits(max_connections=None, max_keepalive_connections=128, keepalive_expiry=_IDLE_S)
        self._http = httpx.AsyncClient(base_url=url, limits=limits, trust_env=False)

    @abstractmethod
    def addressed(self, body: dict[str, Any], rid: str, salt: str, said: list[int]) -> dict[str, Any]:
        """What is sent for a request that has said these tokens so far, of its name `rid`.

        It shares keys and values with those only of the same salt.
        """

    @abstractmethod
    def generate(self, body: dict[str, Any]) -> AsyncIterator[tuple[Piece, dict[str, Any] | None]]:
        """Pieces of one request as they come, each with the reason for which it is the last one, or None."""

    @abstractmethod
    async def abort(self, rid: str) -> None:
        """Has the server end a request; unknown ones are ignored."""

    async def close(self) -> None:
        await self._http.aclose()

    async def call(self, path: str, body: dict[str, Any] | None = None, *, limit_s: float = 60.0) -> dict[str, Any]:
        """POSTs `body`, or GETs. Returns the answer's object, empty if it is none."""
        return await self._asked("GET" if body is None else "POST", path, body, limit_s)

    async def _asked(self, method: str, path: str, body: dict[str, Any] | None, limit_s: float) -> dict[str, Any]:
        try:
            answer = await self._http.request(method, path, json=body, timeout=limit_s)
        except httpx.TimeoutException as error:
            raise TimedOut(f"{self._name} has not answered {path} within {limit_s:g} s") from error
        except httpx.TransportError as error:
            raise ActorLost(f"{self._name} cannot be reached: {type(error).__name__} {error}") from error
        if not answer.is_success:
            raise RemoteError(f"{self._name} refused {path}: {_message(answer.text) or answer.status_code}")
        try:
            found = answer.json()
        except ValueError:
            return {}
        return found if isinstance(found, dict) else {}

    async def up(self) -> bool:
        """Whether it serves by now."""
        return await self._serves(self._ready)

    async def _serves(self, path: str) -> bool:
        try:
            return (await self._http.get(path, timeout=5.0)).status_code == 200
        except httpx.HTTPError:
            return False

    async def chunks(self, path: str, body: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The objects of an answer that streams, up to its own mark of its end. An end without one is ActorLost."""
        try:
            async with self._http.stream("POST", path, json={**body, "stream": True}, timeout=_NO_SILENCE_LIMIT) as answer:
                if answer.status_code != 200:
                    text = (await answer.aread()).decode(errors="replace")
                    raise RemoteError(f"{self._name} refused a request: {_message(text) or answer.status_code}")
                async for line in answer.aiter_lines():
                    if line.startswith("data: [DONE]"):
                        return
                    if not line.startswith("data: {"):
                        continue
                    chunk = json.loads(line[6:])
                    if "error" in chunk:
                        raise RemoteError(f"{self._name} refused a request: {_message(line[6:])}")
                    yield chunk
        except httpx.TransportError as error:
            raise ActorLost(f"{self._name} was lost while it sampled: {type(error).__name__} {error}") from error
        raise ActorLost(f"{self._name} ended an answer before its end")


def _message(text: str) -> str:
    try:
        found = json.loads(text)
    except ValueError:
        return text[:300]
    found = found.get("error") or found.get("message") or found if isinstance(found, dict) else found
    return str(found.get("message", found) if isinstance(found, dict) else found)[:300]
