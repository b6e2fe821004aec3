"""The actor around the trainer: batches in, weight versions out.

Owns model, optimiser and step. Promises:
- step k's weights are version k; version 0 is the policy after its cold start;
- when it (re)starts it resumes from the newest complete checkpoint; the director then replays later steps from the
  store, which gives the same weights again (law 7);
- work runs on a thread: health answers meanwhile.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import numpy as np

from troupe.actors import transfer
from troupe.actors.context import Context
from troupe.protocol.arrow import from_table
from troupe.protocol.errors import ActorLost, NotReady
from troupe.protocol.messages import (
    ColdStart,
    GetSpans,
    GetWeights,
    Health,
    LearnerStatus,
    Ping,
    SaveCheckpoint,
    Saved,
    Span,
    Spans,
    Train,
    Trained,
    Weights,
)
from troupe.protocol.spans import SpanLog
from troupe.protocol.trajectory import Trajectory


class Trains(Protocol):
    """What the actor needs of a trainer; `learner.trainer.Trainer` is the real one."""

    step: int
    base: str

    def cold_start(
        self,
        tokens: list[np.ndarray],
        supervised: list[np.ndarray],
        *,
        steps: int,
        batch: int,
        progress: Callable[[int, int, float], None] | None = None,
    ) -> dict[str, float]: ...

    def train(self, trajectories: list[Trajectory]) -> dict[str, float]: ...

    def tensors(self) -> Mapping[str, np.ndarray]: ...

    def save(self, folder: str) -> None: ...

    def restore(self, folder: str) -> None: ...

    def adjust(self, changes: Mapping[str, Any]) -> None: ...

    def roll_back(self, folder: str) -> None: ...

    def timings(self) -> list[Span]: ...


class Learner:
    """Wraps the trainer that `make_trainer()` builds; checkpoints lie under `folder`.

    way: how weights travel (`transfer.WAYS`), if they do in files, under `outbox`.
    """

    def __init__(
        self,
        context: Context,
        make_trainer: Callable[[], Trains],
        folder: str,
        keep: int = 3,
        way: str = "object_store",
        outbox: str = "",
    ) -> None:
        self._context = context
        self._make = make_trainer
        self._folder, self._keep = folder, keep
        self._way = transfer.WAYS[way](context.blobs, outbox)
        self._started = False
        self._working = asyncio.Lock()
        self._weights: Weights | None = None
        self._measured: dict[str, float] = {}
        self._log = SpanLog(context.clock.now, busy="train")
        self._progress = 0.0
        self._detail: dict[str, float] = {}

    async def start(self) -> None:
        self._trainer = await asyncio.to_thread(self._make)
        newest = newest_checkpoint(self._folder)
        if newest is not None:
            await asyncio.to_thread(self._trainer.restore, newest)
            self._started = True

    async def cold_start(self, message: ColdStart) -> Trained:
        """Supervised steps; the result is version 0. With `steps` 0 the initial weights are version 0. Done once: who asks
        again (a new director, say) is told what came of it."""
        async with self._working:
            if self._started:
                return Trained(self._trainer.step, await self._current(), self._measured)

            def progress(done: int, steps: int, loss: float) -> None:
                self._progress = done / steps
                self._detail = {"cold_start_loss": loss}

            shown = message.demonstrations
            if message.steps:
                self._measured = await self._work(
                    "cold start",
                    lambda: self._trainer.cold_start(
                        list(shown.tokens),
                        list(shown.supervised),
                        steps=message.steps,
                        batch=message.batch,
                        progress=progress,
                    ),
                )
            self._started = True
            return Trained(0, await self._publish(), self._measured)

    async def train(self, message: Train) -> Trained:
        """One training step; asked again for the step that it has just done, it answers the same. Raises NotReady
        unless the batch is for the step after the learner's, and CheckpointError if it is to restart from one that is gone."""
        async with self._working:
            if message.batch.step == self._trainer.step:
                return Trained(self._trainer.step, await self._current(), self._measured)
            if message.batch.step != self._trainer.step + 1 or message.batch.trajectories is None:
                raise NotReady(
                    f"the learner is at step {self._trainer.step} and was given a batch for step {message.batch.step}"
                )
            table = await self._context.blobs.get(message.batch.trajectories)

            def train() -> dict[str, float]:
                self._trainer.adjust(message.settings)
                if message.restart is not None:
                    self._trainer.roll_back(os.path.join(self._folder, f"step-{message.restart}"))
                return self._trainer.train(from_table(table))

            self._measured = await self._work("train", train, step=message.batch.step)
            return Trained(self._trainer.step, await self._publish(), self._measured)

    async def weights(self, message: GetWeights) -> Weights:
        """The newest weights, without waiting for the step that it may be taking. Raises NotReady before the cold start."""
        if not self._started:
            raise NotReady("the learner has no weights before its cold start")
        if self._weights is not None and self._weights.version == self._trainer.step:
            return self._weights
        async with self._working:
            return await self._current()

    async def save(self, message: SaveCheckpoint) -> Saved:
        """Writes `checkpoints/step-N`, complete or not at all. Of all there are, the first is kept, from which any step can
        be replayed, and the newest `keep`. Raises NotReady before the cold start."""
        if not self._started:
            raise NotReady("the learner has nothing to save before its cold start")
        async with self._working:
            path = os.path.join(self._folder, f"step-{self._trainer.step}")
            if not os.path.isdir(path):
                await self._work("save", lambda: self._trainer.save(path))
            await asyncio.to_thread(_drop_old, self._folder, self._keep)
            return Saved(self._trainer.step, path)

    async def status(self, message: Ping) -> LearnerStatus:
        """Where it is; answers while it works."""
        step = self._trainer.step if hasattr(self, "_trainer") else 0
        return LearnerStatus(step, self._started, self._progress, dict(self._detail))

    async def health(self, message: Ping) -> Health:
        """Load is 1 while it works."""
        return Health(self._context.name, os.getpid(), load=int(self._working.locked()))

    async def spans(self, message: GetSpans) -> Spans:
        """What it worked on, and the parts of that which its trainer knows."""
        return self._log.told(self._context.name, message)

    async def _work(self, name: str, function: Callable[[], Any], **labels: Any) -> Any:
        """Does it in a thread, so that messages are answered meanwhile."""

        def work() -> Any:
            done = function()
            for span in self._trainer.timings():
                self._log.add(span.name, span.begin, span.end, **span.labels)
            return done

        began = self._context.clock.now()
        try:
            return await asyncio.to_thread(work)
        except ActorLost as error:
            self._context.die(f"its trainer is gone: {error}")
            raise
        finally:
            end = max(began, self._context.clock.now())
            self._log.add(name, began, end, **labels)
            self._log.tally("busy", end - began)

    async def _current(self) -> Weights:
        """Of the step that it has done, published now if that has failed before."""
        if self._weights is None or self._weights.version != self._trainer.step:
            return await self._publish()
        return self._weights

    async def _publish(self) -> Weights:
        """The weights as they are: copied, then put on their way. All of it is the learner's work."""
        tensors = await self._work("snapshot", lambda: dict(self._trainer.tensors()))
        with self._log.of("send weights", version=self._trainer.step):
            self._weights = await transfer.pack(self._context.blobs, self._way, self._trainer.step, tensors, self._trainer.base)
        return self._weights


def checkpoints(folder: str) -> list[tuple[int, str]]:
    """Complete checkpoints under `folder`, oldest first: (step, path)."""
    if not os.path.isdir(folder):
        return []
    steps = [n.removeprefix("step-") for n in os.listdir(folder) if n.startswith("step-")]
    return sorted((int(s), os.path.join(folder, f"step-{s}")) for s in steps if s.isdigit())


def newest_checkpoint(folder: str) -> str | None:
    """Path of the newest complete checkpoint, or None."""
    found = checkpoints(folder)
    return found[-1][1] if found else None


def _drop_old(folder: str, keep: int) -> None:
    import shutil

    for _, path in checkpoints(folder)[1:-keep]:
        # Renamed first: a kill in the middle must not leave half a checkpoint under a complete one's name.
        shutil.rmtree(path + ".old", ignore_errors=True)
        os.rename(path, path + ".old")
        shutil.rmtree(path + ".old", ignore_errors=True)
