"""PPO's clipped surrogate against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

from troupe.learner.config import LearnerConfig
from troupe.learner.losses import Tokens, find

CONFIG = LearnerConfig(clip_low=0.2, clip_high=0.28, dual_clip=3.0)


def loss_and_slope(ratio: float, advantage: float) -> tuple[float, float]:
    lp = torch.tensor([math.log(ratio)], requires_grad=True)
    zero = torch.zeros(1)
    value, _ = find("ppo_clip")(Tokens(lp, zero, torch.tensor([advantage]), zero.long()), CONFIG)
    value.sum().backward()
    assert lp.grad is not None
    return value.item(), lp.grad.item()


@pytest.mark.parametrize(
    ("ratio", "advantage", "expected", "learns"),
    [
        (1.0, 2.0, -2.0, True),
        (1.2, 1.0, -1.2, True),  # inside the higher clip
        (1.5, 1.0, -1.28, False),  # clipped above
        (0.5, 1.0, -0.5, True),  # a good token that became rarer is still pulled back
        (0.5, -1.0, 0.8, False),  # clipped below
        (2.0, -1.0, 2.0, True),
        (5.0, -1.0, 3.0, False),  # dual clip
        (0.9, 0.0, 0.0, False),
    ],
)
def test_clipped_surrogate(ratio: float, advantage: float, expected: float, learns: bool) -> None:
    value, slope = loss_and_slope(ratio, advantage)
    assert value == pytest.approx(expected, rel=1e-5)
    assert (abs(slope) > 1e-8) == learns
    if learns:
        assert slope == pytest.approx(-ratio * advantage, rel=1e-5)


def test_an_absurd_ratio_stays_finite() -> None:
    lp, old, zero = torch.tensor([0.0], requires_grad=True), torch.tensor([-1e4]), torch.zeros(1)
    value, _ = find("ppo_clip")(Tokens(lp, old, torch.tensor([-1.0]), zero.long()), CONFIG)
    assert torch.isfinite(value).all()
