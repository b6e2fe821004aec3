"""The store: each episode once, each group whole or absent, whatever happens in between."""

from __future__ import annotations

import asyncio
import os
import random
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Awaitable, Callable, Iterable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

from troupe.actors import store as module
from troupe.actors.store import Store
from troupe.protocol import arrow
from troupe.protocol.errors import NotReady, Overloaded, StoreError
from troupe.protocol.messages import Blob, CommitGroup, Deposit, Fence, GetBatch, GetCommitted, GetDeposit, Ping
from troupe.protocol.stored import committed, manifest
from troupe.protocol.trajectory import Failure, Fork, Node, Step, Task, Trajectory


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


# -- what comes back -------------------------------------------------------------------------------------------------


def test_a_batch_is_what_was_deposited_ordered_by_id(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        await put(store, 2, "d", "b")
        await put(store, 1, "c", "a")
        batch = await store.batch(GetBatch(1, 2))
        assert batch.trajectories is not None and batch.count == 4
        assert [t.id for t in arrow.from_table(batch.trajectories.ref)] == ["a", "b", "c", "d"]
        expected = arrow.to_table([trajectory(e, group=g) for e, g in [("a", 1), ("b", 2), ("c", 1), ("d", 2)]])
        assert batch.trajectories.ref.equals(expected)

    on_store(tmp_path, work)


def test_only_completed_trajectories_of_training_groups_train_and_all_are_kept(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        await deposit(store, "a")
        await deposit(store, "b", status="failed", reward=float("nan"))
        await deposit(store, "c", status="cancelled")
        await store.commit(group(1, "a", "b", "c"))
        await put(store, 2, "dropped", trains=False)
        await put(store, 3, "eval", kind="eval", trains=False)
        assert await ids(store, 1, 1) == ["a"]
        assert await ids(store, 1, 2) is None
        known = await store.committed(GetCommitted())
        assert (known.groups, known.dropped, known.completed, known.failed) == ({1: [1]}, [2], 3, 1)

    on_store(tmp_path, work)
    table = committed(tmp_path)
    assert table.select(["id", "status", "trains"]).to_pylist() == [
        {"id": "a", "status": "completed", "trains": True},
        {"id": "b", "status": "failed", "trains": True},
        {"id": "c", "status": "cancelled", "trains": True},
        {"id": "dropped", "status": "completed", "trains": False},
        {"id": "eval", "status": "completed", "trains": False},
    ]


def test_what_a_restarted_dispatcher_must_know_is_counted_from_what_is_committed(tmp_path: Path) -> None:
    data, chance = Failure("data", "TaskFailed", "no file " * 100, ""), Failure("infrastructure", "TimedOut", "slow", "")

    async def work(store: Store) -> None:
        await deposit(store, "a")
        await deposit(store, "b", "c", status="failed", failure=data)
        await deposit(store, "d", status="failed", failure=chance)
        await deposit(store, "e", status="cancelled", failure=None)
        await deposit(store, "uncommitted", status="failed", failure=data)
        await store.commit(group(1, "a", "b", "c", "d", "e", trains=False))
        assert (await store.commit(group(2, trains=False))).accepted  # of a task that is never dispatched again
        await look(store)

    async def look(store: Store) -> None:
        known = await store.committed(GetCommitted())
        assert (known.dropped, known.completed, known.failed, known.cancelled, known.tokens) == ([1, 2], 1, 3, 1, 10)
        assert known.data_failures == {"train/1": [("no file " * 100)[:300]] * 2}

    on_store(tmp_path, work)
    on_store(tmp_path, look)
    assert committed(tmp_path).num_rows == 5


def test_a_batch_is_the_same_after_more_groups_and_after_a_restart(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        await put(store, 5, "b")
        await put(store, 4, "c")
        assert await ids(store, 1, 2) == ["b", "c"]
        await put(store, 3, "a")

    async def later(store: Store) -> None:
        assert await ids(store, 1, 2) == ["b", "c"]
        assert await ids(store, 1, 3) == ["a", "b", "c"]

    on_store(tmp_path, work)
    on_store(tmp_path, later)


def test_a_batch_waits_for_its_last_group_and_no_longer(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        waiting = asyncio.create_task(store.batch(GetBatch(7, 2, wait_s=60.0)))
        await put(store, 1, "a", step=7)
        await put(store, 2, "b", step=8)
        await asyncio.sleep(0.01)
        assert not waiting.done()
        await put(store, 3, "c", step=7)
        assert (await waiting).count == 2
        assert (await store.batch(GetBatch(9, 1, wait_s=0.01))).trajectories is None

    on_store(tmp_path, work)


def test_an_evaluation_never_trains(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        await deposit(store, "a", kind="eval")
        assert "never trains" in (await store.commit(group(1, "a", kind="eval"))).reason
        assert "as another kind" in (await store.commit(group(1, "a", kind="train"))).reason
        assert (await store.commit(group(1, "a", kind="eval", trains=False))).accepted
        assert await ids(store, 1, 1) is None

    on_store(tmp_path, work)


# -- exactly once ----------------------------------------------------------------------------------------------------


def test_the_first_deposit_wins_and_the_second_is_told_why(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        await deposit(store, "a", reward=1.0)
        receipt = await store.deposit(Deposit(trajectory("a", attempt=1, reward=2.0)))
        assert not receipt.accepted and "already deposited, by attempt 0" in receipt.reason
        await store.commit(group(1, "a"))
        receipt = await store.deposit(Deposit(trajectory("a", attempt=2)))
        assert not receipt.accepted and "already committed, with train group 1 of step 1" in receipt.reason

    on_store(tmp_path, work)
    on_store(tmp_path, lambda store: _refused(store, "a", "already committed"))
    assert committed(tmp_path)["reward"].to_pylist() == [1.0]


async def _refused(store: Store, episode: str, reason: str, attempt: int = 0) -> None:
    receipt = await store.deposit(Deposit(trajectory(episode, attempt=attempt)))
    assert not receipt.accepted and reason in receipt.reason


def test_a_deposit_can_be_had_again_until_it_is_committed_or_fenced(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        async def asked(episode: str, attempt: int = 0) -> Trajectory | None:
            return (await store.deposited(GetDeposit(episode, attempt))).trajectory

        await deposit(store, "a", "b")
        found = await asked("a")
        assert found is not None and found.nodes[0].text == "a" and found.nodes[0].logprobs.tolist() == [-0.5, -0.25]
        assert await asked("a", 1) is None and await asked("c") is None
        await store.fence(Fence("b", 1))
        await store.commit(group(1, "a"))
        assert await asked("a") is None and await asked("b") is None

    on_store(tmp_path, work)


def test_tokens_that_were_sampled_for_a_sibling_are_counted_once(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        await deposit(store, "a")
        await deposit(store, "b", fork=Fork("a", 0, 1))
        await store.commit(group(1, "a", "b"))
        assert (await store.committed(GetCommitted())).tokens == 3

    on_store(tmp_path, work)


def test_a_fence_refuses_dead_attempts_also_after_a_restart(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        await store.fence(Fence("a", 2))
        await store.fence(Fence("a", 1))  # late: fences only rise
        await _refused(store, "a", "attempt 1 of episode a is dead", attempt=1)
        await _refused(store, "a", "fenced", attempt=0)

    async def later(store: Store) -> None:
        await _refused(store, "a", "fenced", attempt=1)
        assert await deposit(store, "a", attempt=2) == [True]
        assert (await store.commit(group(1, "a"))).accepted

    on_store(tmp_path, work)
    on_store(tmp_path, later)
    assert committed(tmp_path)["attempt"].to_pylist() == [2]


def test_a_fence_forgets_what_the_dead_attempt_had_deposited(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        await deposit(store, "a", "b", "c", status="failed")
        await store.fence(Fence("a", 1))
        assert await deposit(store, "a", attempt=1) == [True]
        await store.commit(group(1, "a", "b"))
        await store.fence(Fence("b", 9))  # committed: too late to matter
        assert (await store.commit(group(2, "c"))).accepted

    on_store(tmp_path, work)
    assert committed(tmp_path).select(["id", "attempt"]).to_pylist() == [
        {"id": "a", "attempt": 1},
        {"id": "b", "attempt": 0},
        {"id": "c", "attempt": 0},
    ]


def test_a_fence_around_everything_shuts_out_a_former_dispatcher(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        await deposit(store, "old")
        await store.fence(Fence("b", 1001))
        await store.fence(Fence("", 1000))
        await _refused(store, "other", "fenced", attempt=999)
        assert not (await store.commit(group(1, "old"))).accepted

    async def later(store: Store) -> None:
        await _refused(store, "other", "fenced", attempt=999)
        await _refused(store, "b", "fenced", attempt=1000)
        assert await deposit(store, "other", attempt=1000) == [True]

    on_store(tmp_path, work)
    on_store(tmp_path, later)


def test_committing_again_is_accepted_and_changes_nothing(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        await deposit(store, "a", "b")
        receipts = await asyncio.gather(*(store.commit(group(1, "a", "b")) for _ in range(5)))
        assert all(receipt.accepted for receipt in receipts)

    async def later(store: Store) -> None:
        assert (await store.commit(group(1, "b", "a"))).accepted
        assert "other episodes" in (await store.commit(group(1, "a"))).reason
        assert "already committed with train group 1" in (await store.commit(group(2, "a"))).reason

    on_store(tmp_path, work)
    on_store(tmp_path, later)
    assert committed(tmp_path)["id"].to_pylist() == ["a", "b"]


def test_a_commit_that_names_lost_deposits_is_refused_and_says_which(tmp_path: Path) -> None:
    on_store(tmp_path, lambda store: deposit(store, "a", "b"))

    async def work(store: Store) -> None:
        await deposit(store, "a")
        receipt = await store.commit(group(1, "a", "b"))
        assert not receipt.accepted and "episodes b not deposited" in receipt.reason
        await deposit(store, "b")
        assert (await store.commit(group(1, "a", "b"))).accepted

    on_store(tmp_path, work)


def test_a_commit_whose_caller_is_gone_is_still_whole(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        await deposit(store, "a", "b")
        call = asyncio.create_task(store.commit(group(1, "a", "b")))
        await asyncio.sleep(0)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        assert (await store.commit(group(1, "a", "b"))).accepted

    on_store(tmp_path, work)
    assert committed(tmp_path).num_rows == 2


# -- what is refused -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"reward": float("nan")}, "a reward is not a number"),
        ({"steps": [Step(reward=float("inf"))]}, "a reward is not a number"),
        ({"steps": []}, "node 0 is of step 0 of 0"),
        ({"seed": 2**63}, "does not fit"),
        ({"fork": Fork("b", 0, 3)}, "3 of its 2 tokens are said to be a sibling's"),
    ],
)
def test_a_trajectory_that_contradicts_itself_is_an_error(tmp_path: Path, changes: dict[str, Any], reason: str) -> None:
    async def work(store: Store) -> None:
        with pytest.raises(StoreError, match=reason):
            await deposit(store, "a", **changes)
        broken = trajectory("a")
        broken.nodes[0].parent = 0
        with pytest.raises(StoreError, match="does not come before it"):
            await store.deposit(Deposit(broken))
        broken = trajectory("a")
        broken.nodes[0].logprobs = np.empty(0, np.float32)
        with pytest.raises(StoreError, match="2 policy tokens, 0 logprobs"):
            await store.deposit(Deposit(broken))

    on_store(tmp_path, work)


def test_uncommitted_deposits_are_bounded_and_commits_make_room(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        await deposit(store, "a", "b")
        with pytest.raises(Overloaded, match="holds 2 trajectories"):
            await deposit(store, "c")
        assert (await store.health(Ping())).load == 2
        await store.commit(group(1, "a"))
        assert await deposit(store, "c") == [True]

    on_store(tmp_path, work, max_deposits=2)


def test_a_disk_that_fails_stops_the_store_and_loses_no_committed_group(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def work(store: Store) -> None:
        await put(store, 1, "a")

        def full(descriptor: int) -> None:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(module.os, "fsync", full)
            waiting = asyncio.create_task(store.batch(GetBatch(1, 2)))
            await deposit(store, "b")
            with pytest.raises(StoreError, match=r"cannot write to .*No space left"):
                await store.commit(group(2, "b"))
            with pytest.raises(StoreError, match="No space left"):
                await waiting
        for call in (store.health(Ping()), store.committed(GetCommitted()), deposit(store, "c")):
            with pytest.raises(StoreError, match="No space left"):
                await call

    on_store(tmp_path, work)

    async def later(store: Store) -> None:
        assert await ids(store, 1, 1) == ["a"]
        await put(store, 2, "b")

    on_store(tmp_path, later)
    assert committed(tmp_path)["id"].to_pylist() == ["a", "b"]


def test_messages_before_start_and_after_close_are_told_to_wait(tmp_path: Path) -> None:
    async def work() -> None:
        store = Store(Host(), str(tmp_path))  # type: ignore[arg-type]
        with pytest.raises(NotReady):
            await deposit(store, "a")
        await store.start()
        await store.close()
        with pytest.raises(NotReady):
            await store.committed(GetCommitted())

    asyncio.run(work())


# -- crashes ---------------------------------------------------------------------------------------------------------

GROUPS = {number: [f"{number}-{member}" for member in range(3)] for number in range(4)}


def _sizes(folder: Path) -> dict[str, int]:
    return {path.name: path.stat().st_size for path in folder.iterdir() if path.name != "lock"}


def _cuts(first: int, last: int) -> Iterable[int]:
    """Lengths that a crash may leave: both ends, just beside them, and some in between."""
    inside = random.Random(first).sample(range(first, last + 1), min(3, last - first + 1))
    return sorted({first, min(first + 1, last), max(last - 1, first), last, *inside})


def _check_recovery(folder: Path, durable: int) -> None:
    """The first `durable` groups are there and whole, the others absent; and the run can go on."""
    expected = [episode for number in range(durable) for episode in GROUPS[number]]
    assert committed(folder)["id"].to_pylist() == expected  # a reader that does not wait for recovery

    async def work(store: Store) -> None:
        known = await store.committed(GetCommitted())
        assert known.groups == ({1: list(range(durable))} if durable else {})
        await asyncio.gather(*(put(store, number, *GROUPS[number]) for number in range(durable, len(GROUPS))))
        assert await ids(store, 1, len(GROUPS)) == sorted(e for episodes in GROUPS.values() for e in episodes)

    on_store(folder, work)
    assert committed(folder)["id"].to_pylist() == [e for episodes in GROUPS.values() for e in episodes]
    for segment in sorted(folder.glob("*.arrow")):  # readable without Troupe, too
        assert pa.ipc.open_stream(segment).read_all().num_rows % 3 == 0


@pytest.mark.parametrize("segment_bytes", [1, 2**20], ids=["a segment a write", "one segment"])
def test_a_crash_at_any_byte_of_a_commit_leaves_whole_groups_only(
    tmp_path: Path, segment_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module.os, "fsync", lambda descriptor: None)  # the crash is played by cutting files
    stages: list[dict[str, int]] = []
    live = tmp_path / "live"

    async def work(store: Store) -> None:
        stages.append(_sizes(live))
        for number, episodes in GROUPS.items():
            await put(store, number, *episodes)
            stages.append(_sizes(live))

    on_store(live, work, segment_bytes=segment_bytes)

    crashes = []
    for durable, (before, after) in enumerate(pairwise(stages)):
        segment = next(name for name in sorted(after, reverse=True) if name.endswith(".arrow"))
        for length in _cuts(before.get(segment, 0), after[segment]):
            crashes.append((durable, before | {segment: length}))
        for length in _cuts(before["manifest.jsonl"], after["manifest.jsonl"]):
            whole = length == after["manifest.jsonl"]
            crashes.append((durable + whole, after | {"manifest.jsonl": length}))

    for index, (durable, lengths) in enumerate(crashes):
        crashed = tmp_path / str(index)
        crashed.mkdir()
        for name, length in lengths.items():
            (crashed / name).write_bytes((live / name).read_bytes()[:length])
        _check_recovery(crashed, durable)
        shutil.rmtree(crashed)


def test_data_is_on_disk_before_the_manifest_names_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: dict[int, int] = {}  # inode → bytes
    named: set[str] = set()
    checked = []

    def fsync(descriptor: int) -> None:
        stat = os.fstat(descriptor)
        synced[stat.st_ino] = stat.st_size
        if stat.st_ino == tmp_path.stat().st_ino:
            named.update(path.name for path in tmp_path.iterdir())
        for entry in manifest(tmp_path).groups:
            assert synced[(tmp_path / entry.segment).stat().st_ino] >= entry.end
            assert {entry.segment, "manifest.jsonl"} <= named
            checked.append(entry.group)

    async def work(store: Store) -> None:
        for number, episodes in GROUPS.items():
            await put(store, number, *episodes)
            assert synced[(tmp_path / "manifest.jsonl").stat().st_ino] == (tmp_path / "manifest.jsonl").stat().st_size

    monkeypatch.setattr(module.os, "fsync", fsync)
    on_store(tmp_path, work, segment_bytes=12_000)
    assert set(checked) == set(GROUPS) and len(list(tmp_path.glob("*.arrow"))) > 1


def test_a_torn_last_line_is_discarded_and_a_damaged_earlier_one_is_an_error(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        for number, episodes in GROUPS.items():
            await put(store, number, *episodes)

    live = tmp_path / "live"
    on_store(live, work)
    torn = tmp_path / "torn"
    shutil.copytree(live, torn)
    path = torn / "manifest.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join(lines[:3]) + b"\0" * 40 + b"\n")  # a file system may extend a file before it fills it
    _check_recovery(torn, 3)

    (live / "manifest.jsonl").write_bytes(lines[0] + b"{}\n" + b"".join(lines[2:]))
    with pytest.raises(StoreError, match="line 2 is damaged"):
        on_store(live, work)


def test_a_lost_segment_is_an_error_and_a_foreign_file_is_left_alone(tmp_path: Path) -> None:
    on_store(tmp_path, lambda store: put(store, 1, "a"))
    foreign = tmp_path / "export.arrow"
    foreign.write_bytes(b"mine")
    on_store(tmp_path, lambda store: put(store, 2, "b"))
    assert foreign.read_bytes() == b"mine"

    os.truncate(tmp_path / "000000.arrow", 100)
    with pytest.raises(StoreError, match=r"000000.arrow' has 100 bytes, the manifest names \d+"):
        on_store(tmp_path, lambda store: put(store, 3, "c"))
    with pytest.raises(StoreError, match=r"000000.arrow' has 100 bytes"):
        committed(tmp_path)


PROCESS = textwrap.dedent(
    """
    import asyncio, importlib.util, sys
    spec = importlib.util.spec_from_file_location("shared", sys.argv[1])
    shared = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(shared)

    async def main():
        store = shared.Store(shared.Host(), sys.argv[2], segment_bytes=20_000)
        await store.start()
        for number in range(100_000):
            await shared.put(store, number, *(f"{number}-{member}" for member in range(3)))
            print(number, flush=True)

    asyncio.run(main())
    """
)


def test_kill_9_loses_no_acknowledged_group_and_readers_see_whole_groups_meanwhile(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", PROCESS, __file__, str(tmp_path)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        seen = 0
        for line in process.stdout:
            table = committed(tmp_path)  # while it writes
            assert table.num_rows % 3 == 0 and table.num_rows >= 3 * (int(line) + 1) and table.num_rows >= seen
            seen = table.num_rows
            if int(line) >= 30:
                break
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "_LOCK_TRIES", 1)
            with pytest.raises(StoreError, match="another process writes"):
                on_store(tmp_path, lambda store: deposit(store, "a"))
        process.send_signal(signal.SIGKILL)
        acknowledged = [int(line), *map(int, process.stdout.read().split())]
    finally:
        process.kill()
        process.wait()
        process.stdout.close()

    async def work(store: Store) -> None:
        known = (await store.committed(GetCommitted())).groups[1]
        assert known == list(range(len(known))) and len(known) in (acknowledged[-1] + 1, acknowledged[-1] + 2)
        await put(store, len(known), *(f"{len(known)}-{member}" for member in range(3)))

    on_store(tmp_path, work)
    assert committed(tmp_path).num_rows == 3 * len(manifest(tmp_path).groups)


def test_commits_that_arrive_together_share_a_write_and_segments_stay_few(tmp_path: Path) -> None:
    async def work(store: Store) -> None:
        episodes = {number: [f"{number}-{member}" for member in range(2)] for number in range(50)}
        for number, names in episodes.items():
            await deposit(store, *names, group=number)
        await asyncio.gather(*(store.commit(group(number, *names)) for number, names in episodes.items()))

    on_store(tmp_path, work)
    assert committed(tmp_path).num_rows == 100
    assert len((tmp_path / "manifest.jsonl").read_bytes().splitlines()) <= 2
    assert [path.name for path in sorted(tmp_path.glob("*.arrow"))] == ["000000.arrow"]
