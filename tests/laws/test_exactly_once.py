"""Law 3, exactly once: each dispatched episode reaches the store once, whatever dies and whatever is lost on the way."""

from __future__ import annotations

from collections import Counter

import pytest

from troupe.actors.simulated import Chaos
from troupe.cluster.run import Run


@pytest.mark.parametrize("seed", range(16))
def test_each_episode_is_stored_exactly_once_whatever_is_lost_on_the_way(simulated_run, seed):
    run = simulated_run()
    run.play(seed, crashes=4, until_s=20.0, chaos=Chaos(lose_request=0.01, lose_reply=0.01))
    rows = Run(str(run.folder)).trajectories().select(["id", "kind", "step", "status"]).to_pylist()
    counts = Counter(row["id"] for row in rows)
    assert set(counts.values()) == {1}
    trained = [r for r in rows if r["kind"] == "train" and r["status"] == "completed" and r["step"] <= run.config.steps]
    assert len(trained) == run.config.steps * 2 * 3
