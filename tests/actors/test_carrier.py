"""What becomes of an episode that breaks, is refused, lost or not needed any more: one end, by the run's policy."""

from __future__ import annotations

import asyncio
from collections import Counter
from typing import Any

import pytest

from tests.actors.dispatching import Act, Company, check_emitted, ordinal, train
from troupe.actors.dispatcher import BIAS
from troupe.actors.groups import EVAL_GROUP
from troupe.protocol.errors import TroupeError
from troupe.protocol.messages import Evaluated, Limits, RunEpisode
from troupe.protocol.trajectory import Task

HELDOUT = Task("heldout/0", "echo", "heldout", 0)


def test_what_fails_by_chance_runs_again_elsewhere_with_the_same_task_and_seed(company):
    def plan(message: RunEpisode, pool: str) -> Act:
        return Act("fail") if ordinal(message) == 0 and message.attempt == 0 else Act()

    run = company(plan=plan, slots=20)
    run.play()
    tries: dict[str, list[tuple[str, RunEpisode]]] = {}
    for pool, message in run.started:
        tries.setdefault(message.episode, []).append((pool, message))
    retried = [both for both in tries.values() if len(both) > 1]
    assert len(retried) == 2 * 3
    for (first_pool, first), (second_pool, second) in retried:
        assert first_pool != second_pool and (first.task, first.seed) == (second.task, second.seed)
    assert run.status is not None and (run.status.retried, run.status.failed, run.status.dropped_groups) == (6, 0, 0)
    check_emitted(run)


def test_a_data_failure_is_never_retried_and_its_group_is_replaced(company):
    def plan(message: RunEpisode, pool: str) -> Act:
        return Act("data", why="no such file") if message.group == 10_000 and message.member == 1 else Act()

    run = company(plan=plan)
    run.play()
    assert Counter(m.episode for _, m in run.started)["t000010000-01"] == 1
    assert {t.group for t in run.batches[1]} == {10_001, 10_002}
    assert any("no such file" in event and "not retried" in event for event in run.status.events)
    check_emitted(run)


@pytest.mark.parametrize("policy", ["retry", "drop-episode", "drop-group"])
def test_each_policy_does_with_a_broken_episode_what_it_says(company, policy):
    def plan(message: RunEpisode, pool: str) -> Act:
        broken = message.group == 10_000 and message.member == 1
        return Act("fail", seconds=6.0) if broken else Act(seconds=30.0 if message.member == 2 else 0.1)

    run = company(plan=plan, settings={"on_failure": policy, "attempts": 2}, steps=1, slots=20)
    run.play()
    check_emitted(run)
    attempts = Counter(m.episode for _, m in run.started)["t000010000-01"]
    assert attempts == (2 if policy == "retry" else 1)
    statuses = [row["status"] for row in sorted(run.groups()[10_000], key=lambda row: row["id"])]
    if policy == "drop-episode":
        assert statuses == ["completed", "failed", "completed"]
        assert sorted(t.id for t in run.batches[1] if t.group == 10_000) == ["t000010000-00", "t000010000-02"]
    else:
        assert statuses == ["completed", "failed", "cancelled"]  # at once, not after 30 s
        assert min(moment for moment, episode in run.ended if episode == "t000010000-02") < 25
        assert {t.group for t in run.batches[1]} == {10_001, 10_002}
    assert BIAS[policy]


def test_a_dropped_group_does_not_wait_for_permits_that_it_no_longer_needs(company):
    def plan(message: RunEpisode, pool: str) -> Act:
        if message.kind == "eval":
            return Act(seconds=200.0)
        return Act("fail", seconds=5.0) if message.group == 10_000 and message.member == 0 else Act()

    async def work(run: Company, context: Any) -> None:
        training = asyncio.ensure_future(train(run, context))
        while not run.started:
            await asyncio.sleep(0.1)
        score = asyncio.ensure_future(run.evaluate([HELDOUT]))
        await asyncio.sleep(60.0)  # the evaluation has the only slot
        assert sorted(row["status"] for row in run.groups()[10_000]) == ["cancelled", "cancelled", "failed"]
        await asyncio.gather(score, training)

    run = company(plan=plan, settings={"on_failure": "drop-group"}, pools=1, slots=1, limits=Limits(episode_s=1000.0))
    run.play(work)
    check_emitted(run)


def test_drop_episode_needs_two_members(company):
    def plan(message: RunEpisode, pool: str) -> Act:
        return Act("fail") if message.group == 10_000 and message.member else Act()

    run = company(plan=plan, settings={"on_failure": "drop-episode"}, steps=1)
    run.play()
    assert {t.group for t in run.batches[1]} == {10_001, 10_002}


def test_an_evaluation_is_retried_whatever_the_policy_and_a_broken_trial_is_no_trial(company):
    def plan(message: RunEpisode, pool: str) -> Act:
        if message.task.seed == 0:
            return Act("fail", why=f"broken in {pool}, try {message.attempt}")
        return Act("fail") if message.task.seed == 1 and message.attempt == 0 else Act(reward=float(message.task.seed))

    async def work(run: Company, context: Any) -> Evaluated:
        return await run.evaluate([Task(f"heldout/{n}", "echo", "heldout", n) for n in range(3)], trials=2)

    run = company(plan=plan, settings={"on_failure": "drop-group", "attempts": 3}, steps=0)
    score = run.play(work)
    assert (score.failed, score.rewards, score.successes) == (2, [1.0, 1.0, 2.0, 2.0], [True] * 4)
    tries = Counter(m.task.seed for _, m in run.started)
    assert tries == {0: 6, 1: 4, 2: 2}
    assert all(row["group"] >= EVAL_GROUP and not row["trains"] for row in run.rows())
    check_emitted(run)


def test_a_refusal_is_not_an_attempt(company):
    refusals = Counter[str]()

    def plan(message: RunEpisode, pool: str) -> Act:
        if pool == "env-0" and refusals.total() < 40:
            refusals[message.episode] += 1
            return Act("refuse" if refusals.total() % 2 else "starting")
        return Act()

    run = company(plan=plan, settings={"attempts": 1}, steps=8, slots=2)
    run.play()
    assert refusals.total() > 5 and (run.status.failed, run.status.retried) == (0, 0)
    assert all(message.attempt == 0 for _, message in run.started)


def test_pools_that_refuse_for_ever_count_as_failed_and_the_run_says_so(company):
    run = company(plan=lambda message, pool: Act("refuse"))
    with pytest.raises(TroupeError, match=r"too few survived.*no pool took it for 60 s: env-\d is full"):
        run.play()


def test_a_pool_that_dies_or_does_not_answer_costs_an_attempt_only(company):
    def plan(message: RunEpisode, pool: str) -> Act:
        if message.group == 10_000 and message.attempt == 0:
            return Act(("die", "drop", "hang")[message.member])
        return Act()

    run = company(plan=plan)
    run.play()
    assert {t.group for t in run.batches[1]} == {10_000, 10_001} and run.status.failed == 0
    check_emitted(run)


def test_what_the_dispatcher_believes_of_an_episode_is_what_is_stored(company):
    """The pool stored it as completed and its answer was lost: the record that says failed replaces it."""
    run = company(
        plan=lambda message, pool: Act(lost=message.group == 10_000 and message.member == 0),
        settings={"on_failure": "drop-episode"},
        steps=1,
    )
    run.play()
    assert [row["status"] for row in run.rows() if row["id"] == "t000010000-00"] == ["failed"]
    assert "t000010000-00" not in {t.id for t in run.batches[1]}
    assert run.status.failed == 1


def test_a_pool_that_ignores_cancel_is_not_waited_for(company):
    def plan(message: RunEpisode, pool: str) -> Act:
        return Act("hang") if ordinal(message) == 0 else Act()

    run = company(plan=plan, settings={"oversample": 0.5}, slots=50, steps=1, heeds_cancel=False)
    run.limits = Limits(episode_s=10_000.0)
    run.play()
    assert [row["status"] for row in run.groups()[10_000]] == ["cancelled"] * 3
    assert run.status.cancelled == 3 and run.took < 1_000
    check_emitted(run)


def test_what_waits_for_a_permit_is_cancelled_too(company):
    def plan(message: RunEpisode, pool: str) -> Act:
        return Act()

    run = company(plan=plan, settings={"oversample": 1.0}, pools=1, slots=3, steps=1)
    run.play()
    never = {row["id"] for row in run.rows()} - {m.episode for _, m in run.started}
    assert never and all(row["status"] == "cancelled" for row in run.rows() if row["id"] in never)
    check_emitted(run)
