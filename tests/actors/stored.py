"""Lives of a store over a folder, and what is put into it: what the tests of the store share."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np

from troupe.actors.store import Store
from troupe.protocol import arrow
from troupe.protocol.messages import Blob, CommitGroup, Deposit, GetBatch
from troupe.protocol.trajectory import Node, Step, Task, Trajectory


class Host:
    """The least that an actor runs on: bulk stays where it is."""

    name = "store"
    rng = random.Random(0)

    @property
    def clock(self) -> Any:
        return self

    @property
    def blobs(self) -> Any:
        return self

    def now(self) -> float:
        return asyncio.get_event_loop().time()

    def put(self, value: Any) -> Blob:
        return Blob(value)

    async def get(self, blob: Blob) -> Any:
        return blob.ref


def trajectory(episode: str, **changes: Any) -> Trajectory:
    node = Node(
        parent=-1,
        role="assistant",
        step=0,
        tokens=np.arange(5, dtype=np.int32),
        provenance=np.array([0, 1, 1, 2, 2], np.uint8),
        logprobs=np.array([-0.5, -0.25], np.float32),
        versions=np.array([3, 4], np.int32),
        text=episode,
    )
    fields: dict[str, Any] = {
        "attempt": 0,
        "group": 1,
        "member": 0,
        "kind": "train",
        "step": 1,
        "task": Task("train/1", "guess", "train", 1),
        "status": "completed",
        "stop": "terminated",
        "nodes": [node],
        "steps": [Step(reward=1.0)],
        "reward": 1.0,
    }
    return Trajectory(id=episode, **fields | changes)


def on_store(folder: Path, work: Callable[[Store], Awaitable[Any]], **options: Any) -> Any:
    """Runs `work` on a store over `folder`, as one life of its process."""

    async def life() -> Any:
        store = Store(Host(), str(folder), **options)  # type: ignore[arg-type]
        await store.start()
        try:
            return await work(store)
        finally:
            await store.close()

    return asyncio.run(life())


async def deposit(store: Store, *episodes: str, **changes: Any) -> list[bool]:
    return [(await store.deposit(Deposit(trajectory(episode, **changes)))).accepted for episode in episodes]


def group(number: int, *episodes: str, step: int = 1, trains: bool = True, kind: Any = "train") -> CommitGroup:
    return CommitGroup(number, kind, step, list(episodes), trains)


async def put(store: Store, number: int, *episodes: str, step: int = 1, trains: bool = True, kind: Any = "train") -> None:
    """Deposits and commits a group."""
    assert all(await deposit(store, *episodes, step=step, group=number, kind=kind))
    receipt = await store.commit(group(number, *episodes, step=step, trains=trains, kind=kind))
    assert receipt.accepted, receipt.reason


async def ids(store: Store, step: int, groups: int) -> list[str] | None:
    batch = await store.batch(GetBatch(step, groups, wait_s=0.0))
    return None if batch.trajectories is None else [t.id for t in arrow.from_table(batch.trajectories.ref)]
