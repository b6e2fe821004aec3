"""The requests of one engine on their way: a queue here, some of them at its server, each read as it streams.

Promises:
- first come, first served; at most `max_running` at the server; none is sent while `held_back`;
- each request ends once: with its last piece, with what had come by then (abort), or with a typed error;
- a request shares keys and values with those only that were sent with the same salt;
- `recall` takes all back from the server; each goes on later from what it has said, as a request of its own.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
import uuid
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from troupe.actors.engines.base import Piece
from troupe.actors.engines.wire import ServerWire
from troupe.protocol.errors import RemoteError, TaskFailed, TimedOut, TroupeError
from troupe.protocol.messages import Generate
from troupe.protocol.trajectory import Finish

_UNHEARD_S = 5.0
"""A server may be told to end a request before it knows it, and then forgets that."""
_NOTHING = np.empty(0, np.int32)


@dataclass(slots=True, eq=False)
class Flight:
    """One request. rid: its name at the server, which may abort by prefix: all are of one length. said: what it has sampled."""

    request: Generate
    body: dict[str, Any]
    rid: str = field(default_factory=lambda: uuid.uuid4().hex)
    pieces: asyncio.Queue[Piece | TroupeError] = field(default_factory=asyncio.Queue)
    said: list[int] = field(default_factory=list)
    task: asyncio.Task[None] | None = None
    aborted: bool = False
    over: bool = False


class Flights:
    """name: of the server, in errors. decode: ids to text, for stop strings. lost: called with what a request died of."""

    def __init__(
        self,
        name: str,
        max_running: int,
        decode: Callable[[list[int]], str] | None,
        lost: Callable[[TroupeError], TroupeError],
    ) -> None:
        self._name, self._max_running, self._decode, self._lost = name, max_running, decode, lost
        self.wire: ServerWire | None = None
        self.salt = ""
        self.held_back = False
        self.tokens = 0
        self._queue: deque[Flight] = deque()
        self._running: set[Flight] = set()
        self._recalling = False
        self._tellings: set[asyncio.Task[Any]] = set()
        self._busy, self._busy_since, self._asked_at = 0.0, 0.0, time.monotonic()
        self._silent, self._silent_since = 0.0, 0.0

    def __len__(self) -> int:
        return len(self._queue) + len(self._running)

    @property
    def all(self) -> list[Flight]:
        return [*self._queue, *self._running]

    @property
    def running(self) -> bool:
        return bool(self._running)

    @property
    def silent_s(self) -> float:
        """Seconds in which the server had requests, since it last said a token."""
        return self._silent + (time.monotonic() - self._silent_since if self._running else 0.0)

    def heard(self) -> None:
        """The server said something, or was not asked to."""
        self._silent, self._silent_since = 0.0, time.monotonic()

    def add(self, request: Generate, body: dict[str, Any]) -> Flight:
        flight = Flight(request, body)
        self._queue.append(flight)
        self.admit()
        return flight

    def admit(self) -> None:
        """Sends to the server who waits for it, as far as there are places."""
        while self._queue and len(self._running) < self._max_running and not self.held_back:
            flight = self._queue.popleft()
            if not self._running:
                self._busy_since = self._silent_since = time.monotonic()
            self._running.add(flight)
            flight.task = asyncio.create_task(self._fly(flight))

    async def recall(self, limit_s: float) -> None:
        """Waits while the server ends all of them, and tells it again of those that were still on their way to it.

        They wait here, first in the queue, until `held_back` is off and `admit` is called. When it returns, no request is at
        the server: whatever is sampled next belongs to later ones.
        """
        self.held_back = self._recalling = True
        deadline = time.monotonic() + limit_s
        try:
            while self._running:
                if time.monotonic() > deadline:
                    raise TimedOut(f"{self._name} has not ended its requests within {limit_s:g} s")
                until = time.monotonic() + 0.5
                while self._running and time.monotonic() < until:
                    await asyncio.sleep(0.005)
                await asyncio.gather(*(self._tell(flight) for flight in self._running))
        finally:
            self._recalling = False

    async def abort(self, flights: list[Flight], wait: bool) -> None:
        """Ends them with what was sampled. wait: for the server's own last word, which a paused one does not say."""
        for flight in flights:
            flight.aborted = True
            if flight.task is None or not wait:
                self.drop(flight)
        await asyncio.gather(*(self._tell(flight) for flight in flights if not flight.over))
        for flight in flights:
            asyncio.get_running_loop().call_later(_UNHEARD_S, self.drop, flight)

    def drop(self, flight: Flight) -> None:
        """Ends it with what has come so far, whatever the server is about to say."""
        if flight.over:
            return
        if flight.task is not None:
            self._tell(flight)
            flight.task.cancel()
        self._end(flight, Piece(_NOTHING, _NOTHING.astype(np.float32), _NOTHING, "abort"))

    def fail(self, error: TroupeError) -> None:
        """Ends all of them with `error`, each with one of its own: a traceback grows each time that it is raised."""
        self.held_back = True
        for flight in self.all:
            self._end(flight, type(error)(str(error)))

    async def close(self, limit_s: float) -> None:
        """Ends all with "abort"; waits until the server has been told."""
        self.held_back = True
        for flight in self.all:
            self.drop(flight)
        if self._tellings:
            await asyncio.wait(self._tellings, timeout=limit_s)
        for task in self._tellings:
            task.cancel()

    def busy(self) -> float:
        """Share of the time since the last call in which the server had a request."""
        now = time.monotonic()
        if self._running:
            self._busy += now - self._busy_since
            self._busy_since = now
        share = self._busy / max(now - self._asked_at, 1e-9)
        self._busy, self._asked_at = 0.0, now
        return min(1.0, share)

    async def _fly(self, flight: Flight) -> None:
        assert self.wire is not None
        body = self.wire.addressed(flight.body, flight.rid, self.salt, flight.said)
        try:
            async for piece, ended in self.wire.generate(body):
                self.tokens += len(piece.tokens)
                self.heard()
                cut = self._cut(flight, piece)
                flight.said += piece.tokens.tolist()
                if cut is not None:
                    self._end(flight, Piece(piece.tokens[:cut], piece.logprobs[:cut], piece.versions[:cut], "stop"))
                    if ended is None:
                        self._tell(flight)
                elif ended is not None and ended["type"] == "abort" and self._recalling and not flight.aborted:
                    self._keep(flight, piece)
                    return
                elif ended is not None:
                    self._end(flight, Piece(piece.tokens, piece.logprobs, piece.versions, self._finish(flight, ended)))
                elif len(piece.tokens):
                    flight.pieces.put_nowait(piece)
                if flight.over:
                    return
        except TroupeError as error:
            self._end(flight, self._lost(error))
        except Exception as error:  # an answer of another shape: told to who waits, who would wait for ever
            self._end(flight, RemoteError(f"{self._name}: {type(error).__name__}: {error}"))

    def _keep(self, flight: Flight, piece: Piece) -> None:
        """Back into the queue, from where it was sent."""
        if len(piece.tokens):
            flight.pieces.put_nowait(piece)
        flight.rid, flight.task = uuid.uuid4().hex, None
        self._leave(flight)
        self._queue.appendleft(flight)

    def _cut(self, flight: Flight, piece: Piece) -> int | None:
        """How many tokens of the piece are said, if a stop string is complete in it."""
        stops = flight.request.sampling.stop
        if not stops or self._decode is None:
            return None
        said = list(flight.said)
        for i, token in enumerate(piece.tokens.tolist()):
            said.append(token)
            text = self._decode(said)
            if any(stop in text for stop in stops):
                return i + 1
        return None

    def _finish(self, flight: Flight, ended: dict[str, Any]) -> Finish:
        if ended["type"] in ("stop", "length"):
            return "stop" if ended["type"] == "stop" else "length"
        if flight.aborted:
            return "abort"
        said = str(ended.get("message", ended))
        if 400 <= int(ended.get("status_code") or 0) < 500:
            raise TaskFailed(f"request '{flight.request.request}': {self._name} refused it: {said}")
        raise RemoteError(f"{self._name} gave up request '{flight.request.request}': {said}")

    def _end(self, flight: Flight, last: Piece | TroupeError) -> None:
        """The last word on a request; whoever waits for its place comes next."""
        if flight.over:
            return
        flight.over = True
        flight.pieces.put_nowait(last)
        if flight in self._running:
            self._leave(flight)
        else:
            self._queue.remove(flight)
        self.admit()

    def _leave(self, flight: Flight) -> None:
        self._running.discard(flight)
        if not self._running:
            now = time.monotonic()
            self._busy, self._silent = self._busy + now - self._busy_since, self._silent + now - self._silent_since

    def _tell(self, flight: Flight) -> asyncio.Task[Any]:
        """Has the server abort it."""

        rid = flight.rid

        async def tell() -> None:
            assert self.wire is not None
            with contextlib.suppress(TroupeError):  # a server that is gone needs no telling
                await self.wire.abort(rid)

        task = asyncio.create_task(tell())
        self._tellings.add(task)
        task.add_done_callback(self._tellings.discard)
        return task
