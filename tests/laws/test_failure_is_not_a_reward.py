"""Law 6: a broken episode is retried or excluded, visibly and by a stated policy; it is never scored."""

from __future__ import annotations

import asyncio
import random
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.laws.conftest import SeededEngine
from tests.laws.plots import A_TURN, Plot
from tests.laws.rollouts import Run, Stage, every_seed
from tests.laws.watched import return_of
from troupe.actors.director import Director
from troupe.actors.settings import RolloutSettings
from troupe.cluster.run import Run as RunFolder
from troupe.protocol.errors import TroupeError


@every_seed
def test_what_broke_or_was_cancelled_has_no_reward_and_is_in_no_batch(run: Run) -> None:
    broken = {t.id for t in run.rows if t.status != "completed"}
    for t in run.rows:
        if t.status != "completed":
            assert t.reward == 0.0 and t.success is None, f"{t.id} is {t.status} and has a reward"
        assert (t.failure is not None) == (t.status == "failed"), f"{t.id} is {t.status}"
        assert t.failure is None or (t.failure.message and t.failure.type), f"{t.id} failed and nobody says why"
    for step, batches in run.batches.items():
        for batch in batches:
            assert batch and broken.isdisjoint(id for id, _ in batch), f"step {step} trains what broke"


def test_waiting_for_a_generator_costs_no_group_however_long_it_starts(simulated_run, monkeypatch):
    measure = Director._measure

    async def start(self: SeededEngine) -> None:
        await asyncio.sleep(400.0 if run.simulation.crashes else 0.1)

    async def strike(self: Director, *figures: Any) -> None:
        await measure(self, *figures)
        if self._step == 2 and not run.simulation.crashes:
            asyncio.get_running_loop().call_later(1.0, run.simulation.crash, "generator-0")

    monkeypatch.setattr(SeededEngine, "start", start)
    monkeypatch.setattr(Director, "_measure", strike)
    run = simulated_run(
        generator__replicas=1,
        rollout={"mode": "sync", "episode_s": 150.0, "on_failure": "drop-group"},
        env__options={"turns": 2, "sleep": 2.0},
        eval__tasks=0,
    )
    run.play(0)
    told = run.summary()
    assert run.simulation.loop.time() > 400.0 and told["finished"] and told["episodes_moved"] > 0
    assert told["groups_dropped"] == told["episodes_failed"] == told["episodes_retried"] == 0


@every_seed
def test_what_was_completed_has_the_reward_that_its_world_gave(run: Run) -> None:
    for t in run.rows:
        if t.status == "completed":
            assert len(t.steps) == run.plot.turns and t.steps[-1].terminated and t.stop == "terminated"
            last = return_of(t.steps[-1].action)
            assert t.reward == last + A_TURN * (len(t.steps) - 1) and t.success == (last > 0)


@every_seed
def test_a_group_trains_short_of_a_member_only_if_the_run_s_policy_says_so(run: Run) -> None:
    for group in run.groups:
        if group.trains and run.plot.settings.on_failure != "drop-episode":
            assert group.failed == group.cancelled == 0
        if group.trains and run.plot.settings.filter == "informative":
            rewards = {t.reward for t in run.rows if t.group == group.group and t.status == "completed"}
            filtered = sum(g.step == group.step and not g.trains and not g.failed for g in run.groups)
            assert len(rewards) > 1 or filtered >= 14, "a group without a difference trains"


def test_one_of_eight_that_fails_at_its_reset_is_run_again_and_the_group_trains_whole(model_folder: Path) -> None:
    run = play(model_folder, "retry", {1: ("reset", 0)})
    (again,) = (message for message in run.dispatched if message.attempt)
    assert Counter(t.status for t in run.rows) == {"completed": 8}
    assert len(run.batches[1][0]) == 8 and run.status is not None and run.status.retried == 1
    first = next(message for message in run.dispatched if message.member == again.member)
    assert (first.task, first.seed) == (again.task, again.seed)
    assert any("no space left to reset" in event for event in run.status.events)


@pytest.mark.parametrize("policy", ["drop-episode", "drop-group"])
def test_one_of_eight_that_fails_at_turn_3_is_dropped_by_the_policy_and_not_scored(model_folder: Path, policy: Any) -> None:
    run = play(model_folder, policy, {6: ("step", 3)})
    (failed,) = (t for t in run.rows if t.status == "failed")
    assert len(failed.steps) == 3 and failed.reward == 0.0 and "step 3 fails" in failed.failure.message  # type: ignore[union-attr]
    assert failed.failure.where.startswith("env-") and failed.failure.kind == "infrastructure"  # type: ignore[union-attr]
    batch = {episode for episode, _ in run.batches[1][0]}
    if policy == "drop-episode":
        assert batch == {t.id for t in run.rows if t.status == "completed"} and len(batch) == 7
    else:
        assert {t.group for t in run.rows if t.id in batch} == {10_001} and len(batch) == 8


def play(model_folder: Path, policy: Any, script: dict[int, tuple[Any, int]]) -> Run:
    """One group of eight episodes of three turns."""
    settings = RolloutSettings(groups_per_step=1, group_size=8, max_tokens=4, on_failure=policy)
    return Stage(Plot(settings=settings, steps=1, turns=3, slots=4, script=script), model_folder).play()


@pytest.mark.parametrize("policy", ["drop-episode", "drop-group"])
def test_broken_episodes_are_stored_as_failed_and_never_trained(simulated_run: Any, policy: str, monkeypatch: Any) -> None:
    chance = random.Random(1)  # the world's real chance, made repeatable
    monkeypatch.setattr(random, "SystemRandom", lambda: chance)
    run = simulated_run(
        env__options={"turns": 2, "flaky": 0.1}, rollout__attempts=2, rollout__on_failure=policy, cold_start__steps=0
    )
    run.play(2)
    rows = RunFolder(str(run.folder)).trajectories().to_pylist()
    broken = [row for row in rows if row["status"] == "failed"]
    assert broken
    assert all(row["success"] is None and row["reward"] == 0.0 and row["failure_message"] for row in broken)
    trained = {episode for _, episodes in run.trained for episode in episodes}
    assert trained.isdisjoint(row["id"] for row in broken)
    summary = run.summary()
    assert summary["episodes_failed"] == len(broken) and summary["on_failure"] == policy


def test_a_world_that_always_fails_stops_the_run_and_says_why(simulated_run: Any) -> None:
    run = simulated_run(env__options={"turns": 2, "fail": 1.0}, rollout__attempts=2, eval__tasks=0, cold_start__steps=0)
    with pytest.raises(TroupeError, match=r"too few survived.*fails by the task's seed"):
        run.play(1)
    assert not run.trained
