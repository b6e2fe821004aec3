"""The held-out score and its interval."""

import pytest

from troupe.actors.evaluator import wilson


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"), [(0, 8, 0.0, 0.3244), (8, 8, 0.6756, 1.0), (59, 200, 0.2362, 0.3615)]
)
def test_the_interval_is_wilsons_and_never_claims_certainty(successes, trials, low, high):
    assert wilson(successes, trials) == pytest.approx((low, high), abs=1e-3)
