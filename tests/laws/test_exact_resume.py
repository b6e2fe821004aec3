"""Law 7, exact resume: whatever dies, the same tokens are trained in the same order."""

from __future__ import annotations

import pytest


@pytest.mark.parametrize("seed", range(30))
def test_a_run_whose_actors_are_killed_trains_exactly_what_an_undisturbed_one_trains(simulated_run, seed):
    calm = simulated_run()
    calm.play(0)
    stormy = simulated_run()
    stormy.play(seed, crashes=6, until_s=25.0)
    assert stormy.weights() == calm.weights(), stormy.crashes


def test_the_same_seed_gives_the_same_run_event_by_event(simulated_run):
    first, second = simulated_run(), simulated_run()
    first.play(5, crashes=3, until_s=15.0)
    second.play(5, crashes=3, until_s=15.0)
    assert first.crashes == second.crashes
    assert first.loads == second.loads
    assert first.sampled == second.sampled
