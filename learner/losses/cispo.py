"""CISPO: clip the importance weight, never the token's gradient (MiniMax-M1, arXiv:2506.13585, section 3.1).

ℓ = −sg(clip(ρ, 1 − ε_low, 1 + ε_high))·A·lp: every token keeps teaching, also those that a PPO clip would silence. Some
implementations cap the weight at ε_high itself and not below (cispo_cap = "clip_high").
"""

from __future__ import annotations

import torch

from troupe.learner.config import LearnerConfig
from troupe.learner.losses import Tokens, loss


@loss("cispo", idle_without_advantage=True)
def cispo(tokens: Tokens, config: LearnerConfig) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss [k]; figure `clip_fraction`: 1 where the weight is clipped."""
    ratio = tokens.ratio.detach()
    if config.cispo_cap == "clip_high":
        weight = ratio.clamp(max=config.clip_high)
    else:
        weight = ratio.clamp(1 - config.clip_low, 1 + config.clip_high)
    return -weight * tokens.advantage * tokens.lp, {"clip_fraction": (weight != ratio).float()}
