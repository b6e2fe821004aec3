"""Do engine and learner agree? The gap |learner's logprob − engine's| of every sampled token, before the training step.

On the current weights it is the engines' rounding; on older ones it is also how far the policy has moved since. So it is
told for all tokens, and for those of each weight version by its age.
"""

from __future__ import annotations

import numpy as np
import torch


def agreement(old: torch.Tensor, rollout: torch.Tensor, age: np.ndarray) -> dict[str, float]:
    """Metrics of logprobs `old` and `rollout` [k] of tokens sampled `age` [k] weight versions ago: lp_gap_mean, lp_gap_p99,
    lp_gap_max and, for each age n that occurs, lp_gap_mean_age_n and lp_gap_max_age_n."""
    gap = (old - rollout).abs()
    told = {"lp_gap_mean": gap.mean().item(), "lp_gap_max": gap.max().item()}
    gaps = gap.cpu().numpy()
    told["lp_gap_p99"] = float(np.quantile(gaps, 0.99))
    for n in np.unique(age).tolist():
        told[f"lp_gap_mean_age_{n}"] = float(gaps[age == n].mean())
        told[f"lp_gap_max_age_{n}"] = float(gaps[age == n].max())
    return told
