"""Per-token losses against numbers worked out by hand."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from troupe.learner.config import LearnerConfig
from troupe.learner.losses import Tokens, find, traits

CLIP = {"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0}
ALL = ("ppo_clip", "gspo", "cispo", "reinforce", "sapo")


def run(
    name: str, lp: list[float], old: list[float], advantage: list[float], sequence: list[int] | None = None, **config: Any
) -> tuple[list[float], list[float]]:
    """Values and slopes of each token."""
    now = torch.tensor(lp, requires_grad=True)
    which = torch.tensor(sequence or [0] * len(lp))
    made = Tokens(now, torch.tensor(old), torch.tensor(advantage), which)
    value, figures = find(name)(made, LearnerConfig(**{**CLIP, **config}))
    assert all(f.shape == now.shape and not f.requires_grad for f in figures.values())
    value.sum().backward()
    assert now.grad is not None
    return value.tolist(), now.grad.tolist()


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
    (value,), (slope,) = run("ppo_clip", [math.log(ratio)], [0.0], [advantage])
    assert value == pytest.approx(expected, rel=1e-5)
    assert (abs(slope) > 1e-8) == learns
    if learns:
        assert slope == pytest.approx(-ratio * advantage, rel=1e-5)


def test_gspo_has_one_ratio_a_sequence_and_advantages_by_token() -> None:
    """Log-ratios .1, .3 | −.4: s = e^.2 for two tokens, e^−.4 for the third."""
    lp, old = [-0.9, -1.7, -2.4], [-1.0, -2.0, -2.0]
    values, slopes = run("gspo", lp, old, [1.0, 0.5, 1.0], [0, 0, 1])
    s = math.exp(0.2)
    assert values == pytest.approx([-s, -0.5 * s, -math.exp(-0.4)], rel=1e-5)
    assert slopes == pytest.approx([-s, -0.5 * s, -math.exp(-0.4)], rel=1e-5)
    values, slopes = run("gspo", lp, old, [1.0, 0.5, -1.0], [0, 0, 1], clip_high=0.1)
    assert values == pytest.approx([-1.1, -0.55, 0.8], rel=1e-5)  # both sequences are out of bounds
    assert slopes == [0, 0, 0]
    assert traits(find("gspo")).aggregate == "sequence-mean-token-mean"


@pytest.mark.parametrize(("cap", "weights"), [("1+clip_high", [1.28, 0.8, 1.0]), ("clip_high", [0.28, 0.28, 0.28])])
def test_cispo_clips_the_weight_and_every_token_learns(cap: str, weights: list[float]) -> None:
    lp, ratios, advantage = [-1.0, -1.0, -1.0], [2.0, 0.5, 1.0], [1.0, 2.0, -1.0]
    values, slopes = run("cispo", lp, [-1 - math.log(r) for r in ratios], advantage, cispo_cap=cap)
    assert slopes == pytest.approx([-w * a for w, a in zip(weights, advantage, strict=True)], rel=1e-5)
    assert values == pytest.approx([w * a for w, a in zip(weights, advantage, strict=True)], rel=1e-5)


def test_reinforce_is_minus_advantage_times_logprob() -> None:
    values, slopes = run("reinforce", [-2.0, -0.5], [0.0, 0.0], [3.0, -1.0])
    assert (values, slopes) == ([6.0, -0.5], [-3.0, 1.0])


@pytest.mark.parametrize(("advantage", "tau"), [(2.0, 1.0), (-2.0, 1.05)])
@pytest.mark.parametrize("ratio", [1.0, 1.5, 0.2])
def test_sapo_gates_softly(advantage: float, tau: float, ratio: float) -> None:
    gate = 1 / (1 + math.exp(-tau * (ratio - 1)))
    (value,), (slope,) = run("sapo", [math.log(ratio)], [0.0], [advantage])
    assert value == pytest.approx(-4 / tau * gate * advantage, rel=1e-5)
    assert slope == pytest.approx(-4 * gate * (1 - gate) * ratio * advantage, rel=1e-5)


@pytest.mark.parametrize("name", ALL)
def test_on_policy_every_loss_has_the_policy_gradient(name: str) -> None:
    advantage = [1.0, -2.0, 0.5, 0.0]
    _, slopes = run(name, [-1.0] * 4, [-1.0] * 4, advantage, [0, 0, 1, 1])
    assert slopes == pytest.approx([-a for a in advantage])


@pytest.mark.parametrize("name", ALL)
def test_a_token_without_advantage_has_no_gradient(name: str) -> None:
    assert traits(find(name)).idle_without_advantage
    _, slopes = run(name, [-1.0, -2.0], [-3.0, 0.0], [0.0, 0.0])
    assert slopes == [0, 0]


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("gap", [-1e4, 1e4])
def test_an_absurd_ratio_stays_finite(name: str, gap: float) -> None:
    values, slopes = run(name, [0.0, 0.0], [gap, gap], [1.0, -1.0])
    assert all(map(math.isfinite, values + slopes))
