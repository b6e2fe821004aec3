"""PPO's clipped surrogate (arXiv:1707.06347, equation 7), its range asymmetric (DAPO, arXiv:2503.14476, section 3.1),
with the dual clip that bounds it for negative advantages (arXiv:1912.09729, equation 5).

ℓ = max(−ρA, −clip(ρ, 1 − ε_low, 1 + ε_high)·A), for A < 0 at most −cA; ρ = exp(lp − old), its exponent within ±20.
With correct = "decoupled" this is decoupled PPO (arXiv:2110.00641; for LLMs AReaL, arXiv:2505.24298).
"""

from __future__ import annotations

import torch

from troupe.learner.config import LearnerConfig
from troupe.learner.losses import Tokens, loss


@loss("ppo_clip", idle_without_advantage=True)
def ppo_clip(tokens: Tokens, config: LearnerConfig) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss [k]; figure `clip_fraction`: 1 where the clip decides."""
    ratio = tokens.ratio
    plain = -ratio * tokens.advantage
    clipped = -ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * tokens.advantage
    bounded = torch.maximum(plain, clipped)
    ceiling = -config.dual_clip * tokens.advantage
    value = torch.where(tokens.advantage < 0, torch.minimum(bounded, ceiling), bounded)
    return value, {"clip_fraction": (value != plain).detach().float()}
