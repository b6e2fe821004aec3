"""How weights get from the learner to the generators.

Owns the two ways, and `RUN/weights/` for one of them. Promises:
- what arrives are the learner's arrays to the byte (bfloat16 as int16 of the same bits), and only what it publishes: with LoRA
  the adapter alone;
- copying, writing and summing go on beside other work, on threads;
- a message carries a handle, never the weights; who receives them need not know which way they came.

A way of one's own is a class with `send` and a line in `WAYS`; what `send` returns must open in `fetch`.
"""

from __future__ import annotations

import asyncio
import os
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from troupe.actors.context import Blobs
from troupe.protocol.checksum import checksum_of
from troupe.protocol.errors import CheckpointError
from troupe.protocol.messages import Blob, Weights

Arrays = Mapping[str, np.ndarray[Any, Any]]


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
        clear(folder)  # of a learner before this one

    def send(self, version: int, tensors: Arrays) -> Blob:
        from safetensors.numpy import save_file

        self._folder.mkdir(parents=True, exist_ok=True)
        path = self._folder / f"version-{version}.safetensors"
        partial = path.with_suffix(".partial")
        save_file(dict(tensors), partial)
        partial.rename(path)
        # The one before stays: somebody may be reading it.
        for old in sorted(self._folder.glob("version-*.safetensors"), key=_version)[:-2]:
            old.unlink()
        return self._blobs.put(str(path))


WAYS: dict[str, Callable[[Blobs, str], Way]] = {"object_store": ObjectStore, "disk": Disk}


async def pack(blobs: Blobs, way: Way, version: int, tensors: Arrays) -> Weights:
    """Sends the tensors; returns the message that says so. `tensors` must not change meanwhile."""
    began = time.monotonic()
    checksum, blob = await asyncio.gather(
        asyncio.to_thread(checksum_of, tensors), asyncio.to_thread(way.send, version, tensors)
    )
    size = sum(array.nbytes for array in tensors.values())
    return Weights(version, checksum, blob, size, time.monotonic() - began)


async def fetch(blobs: Blobs, weights: Weights) -> Arrays:
    """The tensors, perhaps in shared memory: do not write to them. Raises ActorLost if they went with the learner, and
    CheckpointError for a file that cannot be read."""
    found = await blobs.get(weights.tensors)
    return await asyncio.to_thread(_read, found) if isinstance(found, str) else found


def clear(folder: str) -> None:
    """Removes what a run has left on its way."""
    shutil.rmtree(folder, ignore_errors=True)


def _read(path: str) -> Arrays:
    from safetensors import SafetensorError
    from safetensors.numpy import load_file

    try:
        return load_file(path)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"weights on their way in '{path}' cannot be read ({error}): does {os.uname().nodename} see the run folder there?"
        ) from error


def _version(path: Path) -> int:
    return int(path.stem.removeprefix("version-"))
