"""Supervised steps: what is learnt is what a teacher said."""

from __future__ import annotations

import math

import numpy as np
import pytest

from tests.learner.training import demonstrations, trainer
from troupe.learner.errors import BatchError
from troupe.protocol.checksum import checksum_of


def test_cold_start_teaches_the_supervised_tokens(tiny: str) -> None:
    t = trainer(tiny, cold_start_lr=2e-2)
    seen: list[tuple[int, int, float]] = []
    result = t.cold_start(*demonstrations(), steps=30, batch=8, progress=lambda *a: seen.append(a))
    assert [s[:2] for s in seen] == [(i + 1, 30) for i in range(30)]
    assert result["loss_first"] == seen[0][2] == pytest.approx(math.log(270), rel=0.1)
    assert result["loss"] < result["loss_first"] / 4
    assert t.step == 0


def test_cold_start_learns_nothing_from_other_tokens(tiny: str) -> None:
    """The last token is not supervised and predicts nothing: whatever it is, the weights come out the same."""
    sums = []
    for last in (1, 2):
        tokens, supervised = demonstrations()
        tokens = [np.append(x, last).astype(np.int32) for x in tokens]
        t = trainer(tiny)
        t.cold_start(tokens, [np.append(m, 0) for m in supervised], steps=3, batch=4)
        sums.append(checksum_of(t.tensors()))
    assert sums[0] == sums[1]


def test_cold_start_refuses_what_it_cannot_learn_from(tiny: str) -> None:
    tokens, supervised = demonstrations(2)
    for bad, message in (
        ((tokens, supervised[:1]), "2 demonstrations but 1 masks"),
        ((tokens, [m * 0 for m in supervised]), "no demonstration has a supervised token"),
        (([x + 10_000 for x in tokens], supervised), "vocabulary"),
        (([np.zeros(300, np.int32)], [np.ones(300, np.int32) * (np.arange(300) > 0)]), "context of 256"),
    ):
        with pytest.raises(BatchError, match=message):
            trainer(tiny).cold_start(*bad, steps=1, batch=1)
