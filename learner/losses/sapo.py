"""SAPO: a soft gate in the place of the clip (Soft Adaptive Policy Optimization, arXiv:2511.20347, section 3).

ℓ = −f(ρ)·A with f(x) = (4/τ)·sigmoid(τ(x − 1)), τ = `sapo_positive` where A > 0, else `sapo_negative`. Its slope is that of
−ρA at ρ = 1 and fades smoothly away from it; a larger τ fades faster. Mean over a sequence, then over sequences.
"""

from __future__ import annotations

import torch

from troupe.learner.config import LearnerConfig
from troupe.learner.losses import Tokens, loss


@loss("sapo", idle_without_advantage=True, aggregate="sequence-mean-token-mean")
def sapo(tokens: Tokens, config: LearnerConfig) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss [k]; no figures: nothing is clipped."""
    positive = torch.full_like(tokens.advantage, config.sapo_positive)
    tau = torch.where(tokens.advantage > 0, positive, config.sapo_negative)
    return -4 / tau * torch.sigmoid(tau * (tokens.ratio - 1)) * tokens.advantage, {}
