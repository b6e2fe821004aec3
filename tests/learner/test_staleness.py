"""The ages of what is trained are told as they are."""

from __future__ import annotations

import numpy as np
import pytest

from troupe.learner.staleness import staleness


def test_shares_are_of_tokens_and_sum_to_one() -> None:
    told = staleness(np.array([0, 2, 2, 1, 2, 0, 5, 2]))
    shares = {name: told.pop(name) for name in [*told] if name[-1].isdigit()}
    assert shares == {"staleness_0": 0.25, "staleness_1": 0.125, "staleness_2": 0.5, "staleness_5": 0.125}
    assert told == {"staleness_mean": pytest.approx(14 / 8), "staleness_max": 5.0}
