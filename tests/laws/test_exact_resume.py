"""Law 7, exact resume; law 3, exactly once: whatever dies, the same tokens are trained in the same order."""

from __future__ import annotations

from collections import Counter

import pytest

from troupe.actors.simulated import Chaos
from troupe.cluster.run import Run


@pytest.mark.parametrize("seed", range(30))
def test_a_run_whose_actors_are_killed_trains_exactly_what_an_undisturbed_one_trains(simulated_run, seed):
    calm = simulated_run()
    calm.play(0)
    stormy = simulated_run()
    stormy.play(seed, crashes=6, until_s=25.0)
    assert stormy.weights() == calm.weights(), stormy.crashes


@pytest.mark.parametrize("seed", range(16))
def test_each_episode_is_stored_exactly_once_whatever_is_lost_on_the_way(simulated_run, seed):
    run = simulated_run()
    run.play(seed, crashes=4, until_s=20.0, chaos=Chaos(lose_request=0.01, lose_reply=0.01))
    rows = Run(str(run.folder)).trajectories().select(["id", "kind", "step", "status"]).to_pylist()
    counts = Counter(row["id"] for row in rows)
    assert set(counts.values()) == {1}
    trained = [r for r in rows if r["kind"] == "train" and r["status"] == "completed" and r["step"] <= run.config.steps]
    assert len(trained) == run.config.steps * 2 * 3


def test_the_same_seed_gives_the_same_run_event_by_event(simulated_run):
    first, second = simulated_run(), simulated_run()
    first.play(5, crashes=3, until_s=15.0)
    second.play(5, crashes=3, until_s=15.0)
    assert first.crashes == second.crashes
    assert first.loads == second.loads
    assert first.sampled == second.sampled
