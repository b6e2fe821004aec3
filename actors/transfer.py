"""How weights get from the learner to the generators.

Owns the ways, and `RUN/weights/` for one of them, which the launcher removes in the end. Promises:
- what arrives are the learner's arrays to the byte (bfloat16 as int16 of the same bits), and only what it publishes: with LoRA
  the adapter alone;
- copying, writing and summing go on beside other work, on threads;
- a message carries a handle, never the weights; who receives them need not know which way they came.

A way of one's own is a class with `send` and a line in `WAYS`; what `send` returns must open in `fetch`. Those that go
straight from process to process are in `collective.py`.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from troupe.actors.collective import Collective, Receiver
from troupe.actors.context import Blobs
from troupe.actors.line import Offer
from troupe.protocol.checksum import checksum_of
from troupe.protocol.errors import ActorLost, CheckpointError
from troupe.protocol.messages import Blob, Weights

if TYPE_CHECKING:
    import torch

Arrays = Mapping[str, np.ndarray[Any, Any]]
Fetched = Mapping[str, "np.ndarray[Any, Any] | torch.Tensor"]
"""Arrays, perhaps in shared memory: do not write to them. Or torch tensors, which belong to whoever fetched them."""


class Way(Protocol):
    """The learner's end of a way."""

    def send(self, version: int, tensors: Arrays) -> Blob:
        """Leaves the tensors where generators can fetch them. Runs on a thread; what was sent two versions ago may go."""


class ObjectStore:
    """Through the host's object store: one copy into shared memory, none out of it on the same machine."""

    def __init__(self, blobs: Blobs, folder: str) -> None:
        self._blobs = blobs

    def send(self, version: int, tensors: Arrays) -> Blob:
        return self._blobs.put(dict(tensors))


class Disk:
    """Through safetensors files in `folder`, which every generator must see under the same path."""

    def __init__(self, blobs: Blobs, folder: str) -> None:
        self._blobs, self._folder = blobs, Path(folder)
        self._newest: Path | None = None

    def send(self, version: int, tensors: Arrays) -> Blob:
        from safetensors.numpy import save_file

        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"version-{version}.safetensors"
        partial = path.with_suffix(".partial")
        save_file(dict(tensors), partial)
        partial.rename(path)
        # The one before stays: somebody may be reading it. Of a learner before, the one that is in use is among all of them.
        for old in self._folder.iterdir() if self._newest else ():
            if old not in (path, self._newest):
                old.unlink()
        self._newest = path
        return self._blobs.put(str(path))


WAYS: dict[str, Callable[[Blobs, str], Way]] = {
    "object_store": ObjectStore,
    "disk": Disk,
    "gloo": lambda blobs, folder: Collective("gloo", blobs),
    "nccl": lambda blobs, folder: Collective("nccl", blobs),
}


async def pack(blobs: Blobs, way: Way, version: int, tensors: Arrays, base: str = "") -> Weights:
    """Sends the tensors; returns the message that says so. `tensors` must not change meanwhile. base: see `Weights`."""
    began = time.monotonic()
    checksum, blob = await asyncio.gather(
        asyncio.to_thread(checksum_of, tensors), asyncio.to_thread(way.send, version, tensors)
    )
    size = sum(array.nbytes for array in tensors.values())
    return Weights(version, checksum, blob, size, time.monotonic() - began, base)


async def fetch(blobs: Blobs, weights: Weights) -> Fetched:
    """The tensors. Raises ActorLost if they are gone, as they may be after the learner has died, CheckpointError for a file
    that cannot be read, and TimedOut for a learner that does not send on."""
    receiver = Receiver("somebody")
    try:
        return await opened(await blobs.get(weights.tensors), receiver)
    finally:
        receiver.close()


async def opened(found: Any, receiver: Receiver) -> Fetched:
    """The same, of what a message's blob holds. receiver: of this process, which keeps it for the next time."""
    if isinstance(found, str):
        return await asyncio.to_thread(_read, found)
    if isinstance(found, Offer):
        return await asyncio.to_thread(receiver.receive, found)
    return found  # type: ignore[no-any-return]


def _read(path: str) -> Arrays:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        return load_file(path)
    except FileNotFoundError as error:
        raise ActorLost(f"'{path}' is not there: {os.uname().nodename} does not see the run folder, or it is gone") from error
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"weights on their way in '{path}' cannot be read: {error}") from error
