"""REINFORCE (Williams, 1992): ℓ = −A·lp, for one optimiser step on a batch of the policy's own samples."""

from __future__ import annotations

import torch

from troupe.learner.config import LearnerConfig
from troupe.learner.losses import Tokens, loss


@loss("reinforce", idle_without_advantage=True, ratio=False)
def reinforce(tokens: Tokens, config: LearnerConfig) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss [k]; no figures."""
    return -tokens.advantage * tokens.lp, {}
