"""The store: each episode once, each group whole, and what comes back is what went in."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.actors.stored import Host, deposit, group, ids, on_store, put, trajectory
from troupe.actors import store as module
from troupe.actors.store import Store
from troupe.protocol import arrow
from troupe.protocol.errors import NotReady, Overloaded, StoreError
from troupe.protocol.messages import Deposit, Fence, GetBatch, GetCommitted, GetDeposit, Ping
from troupe.protocol.stored import committed
from troupe.protocol.trajectory import Failure, Fork, Step, Trajectory


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
