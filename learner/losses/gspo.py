"""GSPO: the clipped surrogate with one ratio a sequence (arXiv:2507.18071, sections 4.1 and 4.3).

s = exp(mean over the sequence's trained tokens of lp − old); its token form is ρ = sg(s)·exp(lp − sg(lp)), which has the
value s and lets advantages differ by token. ℓ = max(−ρA, −clip(ρ, 1 − ε_low, 1 + ε_high)·A), mean over a sequence, then
over sequences. The ratio is a geometric mean, so its clip range is small: the paper's is 3e-4 below and 4e-4 above.
A sequence is a branch of a trajectory, as the model saw it.
"""

from __future__ import annotations

import torch

from troupe.learner.config import LearnerConfig
from troupe.learner.losses import Tokens, loss


@loss("gspo", idle_without_advantage=True, aggregate="sequence-mean-token-mean")
def gspo(tokens: Tokens, config: LearnerConfig) -> tuple[torch.Tensor, dict[str, torch.Tensor]]:
    """Loss [k]; figure `clip_fraction`: 1 where the clip decides."""
    lp = tokens.lp.detach()
    sums = torch.zeros(int(tokens.sequence.max()) + 1 if len(lp) else 0, device=lp.device)
    counts = sums.index_add(0, tokens.sequence, torch.ones_like(lp))
    means = sums.index_add(0, tokens.sequence, lp - tokens.old) / counts.clamp(min=1)
    ratio = means.clamp(-20.0, 20.0).exp()[tokens.sequence] * (tokens.lp - lp).exp()
    plain = -ratio * tokens.advantage
    clipped = -ratio.clamp(1 - config.clip_low, 1 + config.clip_high) * tokens.advantage
    value = torch.maximum(plain, clipped)
    return value, {"clip_fraction": (value != plain).detach().float()}
