"""Law 6: a broken episode is retried or excluded, visibly; it is never scored."""

from __future__ import annotations

import random

import pytest

from troupe.cluster.run import Run
from troupe.protocol.errors import TroupeError


@pytest.mark.parametrize("policy", ["drop-episode", "drop-group"])
def test_broken_episodes_are_stored_as_failed_and_never_trained(simulated_run, policy, monkeypatch):
    chance = random.Random(1)  # the world's real chance, made repeatable
    monkeypatch.setattr(random, "SystemRandom", lambda: chance)
    run = simulated_run(
        env__options={"turns": 2, "flaky": 0.25}, rollout__attempts=2, rollout__on_failure=policy, cold_start__steps=0
    )
    run.play(2)
    rows = Run(str(run.folder)).trajectories().to_pylist()
    broken = [row for row in rows if row["status"] == "failed"]
    assert broken
    assert all(row["success"] is None and row["reward"] == 0.0 and row["failure_message"] for row in broken)
    trained = {episode for _, episodes in run.trained for episode in episodes}
    assert trained.isdisjoint(row["id"] for row in broken)
    summary = run.summary()
    assert summary["episodes_failed"] == len(broken) and summary["on_failure"] == policy


def test_a_world_that_always_fails_stops_the_run_and_says_why(simulated_run):
    run = simulated_run(env__options={"turns": 2, "fail": 1.0}, rollout__attempts=2, eval__tasks=0, cold_start__steps=0)
    with pytest.raises(TroupeError, match=r"too few survived.*fails by the task's seed"):
        run.play(1)
    assert not run.trained
