"""Supervises the replicas of a policy that is served but not trained, as the director does during training.

Owns the generators, the current weight version and the checkpoint it came from. Promises:
- a version is current only after every replica proved it by checksum (law 4); a checkpoint that is damaged or of another
  model is refused before any replica hears of it, and the old version goes on answering;
- versions only rise: a replica never answers with weights older than those that it has answered with;
- a replica that dies is started again with back-off and proves the current version before it takes work.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from typing import Any

from troupe.actors.context import Context, within
from troupe.actors.engines.base import Engine
from troupe.actors.generator import Generator
from troupe.protocol.errors import ActorLost, CheckpointError, NotReady, TroupeError
from troupe.protocol.messages import Ack, GetStatus, RunStatus, Saved, Weights

RESTARTS = 8
"""Deaths of one replica within `RESTART_WINDOW_S` seconds that are answered with a restart."""
RESTART_WINDOW_S = 300.0

_LOAD_S = 300.0
_EVENTS_KEPT = 1000

ReadWeights = Callable[[str], tuple[str, Mapping[str, Any]]]
"""Checkpoint folder → (checksum, tensors), proved against what the checkpoint says. Raises CheckpointError."""


class Keeper:
    """Keeps `replicas` generators; `load` gives them their first weights."""

    def __init__(
        self,
        context: Context,
        make_engine: Callable[[str], Engine],
        read_weights: ReadWeights,
        replicas: int,
        resources: dict[str, float] | None = None,
    ) -> None:
        self._context = context
        self._make_engine, self._read_weights = make_engine, read_weights
        self._names = [f"generator-{i}" for i in range(replicas)]
        self._resources = resources
        self._proved: set[str] = set()
        self._weights: Weights | None = None
        self._checkpoint = ""
        self._loading = asyncio.Lock()
        self._watchers: list[asyncio.Task[None]] = []
        self._deaths: dict[str, deque[float]] = {name: deque(maxlen=RESTARTS + 1) for name in self._names}
        self._events: deque[str] = deque(maxlen=_EVENTS_KEPT)
        self._events_total = 0
        self._error = ""

    async def start(self) -> None:
        """Starts the replicas; those of an earlier keeper are replaced, because nobody knows what they hold."""
        await asyncio.gather(*(self._context.kill(name) for name in self._names))
        await asyncio.gather(*(self._spawn(name) for name in self._names))
        self._watchers = [asyncio.ensure_future(self._supervise(name)) for name in self._names]

    async def load(self, message: Saved) -> Ack:
        """Makes the checkpoint at `path`, which holds version `step`, the current one. Loading it again does nothing.

        Raises CheckpointError if it is damaged, of another model, or older than what is served.
        """
        async with self._loading:
            current = self._weights
            if current is not None and message.step < current.version:
                raise CheckpointError(
                    f"version {current.version} is served and version {message.step} is older: versions only rise; "
                    f"serve it alone with --checkpoint step-{message.step}"
                )
            checksum, tensors = await asyncio.to_thread(self._read_weights, message.path)
            if current is not None and message.step == current.version:
                if checksum != current.checksum:
                    raise CheckpointError(
                        f"'{message.path}' calls itself version {message.step}, but its weights ({checksum}) are not "
                        f"those that are served as version {current.version} ({current.checksum})"
                    )
                return Ack()
            weights = Weights(message.step, checksum, self._context.blobs.put(dict(tensors)))
            await asyncio.gather(*(self._prove(name, weights) for name in self._names))
            self._weights, self._checkpoint = weights, message.path
            self._say(f"version {weights.version} is served (checksum {checksum}, {message.path})")
        if not self._proved:
            raise NotReady(f"no replica could take version {message.step}: they are being replaced")
        return Ack()

    async def status(self, message: GetStatus) -> RunStatus:
        """What is served and by whom, in the director's words. metrics: `checksum` and `checkpoint`."""
        weights = self._weights
        version = weights.version if weights else -1
        first = self._events_total - len(self._events)
        return RunStatus(
            phase="serving" if weights else "loading",
            step=max(0, version),
            steps=max(0, version),
            version=version,
            progress=1.0,
            metrics={"checksum": weights.checksum if weights else "", "checkpoint": self._checkpoint},
            history=[],
            actors={name: "proved" if name in self._proved else "waiting for weights" for name in self._names},
            events=list(self._events)[max(0, message.since - first) :],
            events_total=self._events_total,
            error=self._error,
        )

    async def _spawn(self, name: str) -> None:
        await self._context.spawn(name, Generator, self._resources, make_engine=self._make_engine)

    async def _prove(self, name: str, weights: Weights) -> None:
        """Loads the weights into one replica. One that cannot prove them is ended; its watcher replaces it."""
        try:
            replica = self._context.ref(name, Generator)
            await within(_LOAD_S, f"{name}.load_weights", replica.load_weights(weights))
        except TroupeError as error:
            self._proved.discard(name)
            if not isinstance(error, ActorLost):
                self._say(f"{name}: {error}")
                await self._context.kill(name)
            return
        self._proved.add(name)

    async def _supervise(self, name: str) -> None:
        """Restarts `name` when it dies. Too many deaths are the keeper's end: `status` then says why."""
        deaths = self._deaths[name]
        while True:
            reason = await self._context.watch(name)
            self._proved.discard(name)
            deaths.append(self._context.clock.now())
            if len(deaths) > RESTARTS and deaths[-1] - deaths[0] < RESTART_WINDOW_S:
                self._error = f"{name} died {len(deaths)} times within {RESTART_WINDOW_S:g} s; last: {reason}"
                return
            self._say(f"{name} died ({reason}); starting a new one (death {len(deaths)} of at most {RESTARTS})")
            await asyncio.sleep(min(10.0, 0.1 * 2 ** (len(deaths) - 1)))
            try:
                await self._spawn(name)
                async with self._loading:
                    if self._weights is not None:
                        await self._prove(name, self._weights)
            except TroupeError as error:  # it died while starting: the next watch sees that and counts it
                self._say(f"{name}: {error}")
                continue
            if name in self._proved:
                self._say(f"{name} is back")

    def _say(self, text: str) -> None:
        self._events.append(text)
        self._events_total += 1
