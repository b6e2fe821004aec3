"""Estimators of the divergence KL(π ‖ ref) from one sampled token (Schulman, "Approximating KL divergence", 2020).

With d = lp − ref: k1 = d (unbiased, may be negative), k2 = d²/2 (low variance, biased), k3 = exp(−d) + d − 1 (unbiased,
never negative). Where it is put matters: in the loss it is differentiated, and the gradient of k1 is zero on average, that
of k2 is the divergence's, that of k3 only near the reference; in the reward it is a number, and k1 is the right one.
"""

from __future__ import annotations

from typing import Literal

import torch


def divergence(lp: torch.Tensor, ref: torch.Tensor, estimator: Literal["k1", "k2", "k3"]) -> torch.Tensor:
    """Estimates [k] from logprobs `lp` and `ref` [k]; the difference is kept within ±20."""
    d = (lp - ref).clamp(-20.0, 20.0)
    if estimator == "k1":
        return d
    return d.square() / 2 if estimator == "k2" else (-d).exp() + d - 1
