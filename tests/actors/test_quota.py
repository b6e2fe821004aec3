"""How many groups a step starts, and which of them train: the staleness budget, over-sampling and the filter."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.actors.dispatching import Act, Company, check_emitted, ordinal
from troupe.actors.simulated import Chaos
from troupe.protocol.errors import TroupeError
from troupe.protocol.messages import Limits, RunEpisode


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_a_group_starts_only_within_the_staleness_budget(company, max_staleness):
    seen: list[int] = []

    def plan(message: RunEpisode, pool: str) -> Act:
        seen.append(message.step - run.version)
        return Act()

    run = company(plan=plan, settings={"max_staleness": max_staleness}, steps=6, slots=50)
    run.play()
    assert max(seen) == 1 + max_staleness and min(seen) >= 0


def test_a_learner_that_takes_nothing_stops_the_dispatcher_after_the_budget(company):
    async def idle(run: Company, context: Any) -> None:
        await asyncio.sleep(500)

    run = company(settings={"max_staleness": 1}, steps=50)
    run.play(idle)
    assert len(run.groups()) == 2 * 2


def test_over_sampling_starts_more_groups_and_cancels_the_stragglers(company):
    def plan(message: RunEpisode, pool: str) -> Act:
        return Act(seconds=500.0 if ordinal(message) in (1, 3) else 2.0 + message.member)

    run = company(plan=plan, settings={"oversample": 0.5, "groups_per_step": 4}, slots=50, steps=1)
    run.limits = Limits(episode_s=1000.0)
    run.play()
    assert {ordinal(m) for _, m in run.started} == set(range(6))
    assert {t.group % 10_000 for t in run.batches[1]} == {0, 2, 4, 5}
    groups = run.groups()
    assert {row["status"] for n in (10_001, 10_003) for row in groups[n]} == {"cancelled"}
    assert not any(row["trains"] for n in (10_001, 10_003) for row in groups[n])
    assert {m.episode for m in run.cancelled} == {row["id"] for n in (10_001, 10_003) for row in groups[n]}
    assert max(moment for moment, _ in run.ended) < 100
    assert (run.status.cancelled, run.status.failed, run.status.dropped_groups) == (6, 0, 2)
    check_emitted(run)


def test_a_surplus_group_that_ends_in_the_same_moment_does_not_train(company):
    run = company(plan=lambda message, pool: Act(seconds=5.0), settings={"oversample": 1.0}, slots=50, steps=3)
    run.chaos = Chaos(delay=(0.01, 0.01), slow=0.0)
    run.play()
    assert any(all(row["status"] == "completed" for row in rows) and not rows[0]["trains"] for rows in run.groups().values())
    check_emitted(run)


def test_groups_of_equal_rewards_are_replaced_until_the_step_s_budget_is_used_up(company):
    def plan(message: RunEpisode, pool: str) -> Act:
        uniform = message.step == 2 or ordinal(message) in (0, 2)
        return Act(reward=1.0 if uniform else float(message.member))

    run = company(plan=plan, settings={"filter": "informative"})
    run.play()
    assert {ordinal(t) for t in run.batches[1]} == {1, 3}  # type: ignore[arg-type]
    assert run.status.filtered_groups == run.status.dropped_groups == 2 + 14
    assert len(run.batches[2]) == 6
    assert sum("had equal rewards" in event for event in run.status.events) == 1
    check_emitted(run)


def test_a_world_that_always_breaks_stops_the_run_and_says_why(company):
    run = company(plan=lambda message, pool: Act("data", why="no disk left"))
    with pytest.raises(TroupeError, match=r"step 1: 16 groups were tried and too few survived.*no disk left"):
        run.play()
    assert not run.batches
