"""Leave-one-out GRPO: RLOO's baseline (the mean of the others, arXiv:2402.14740, section 3) under GRPO's division by σ.

A = (R − mean of the other returns) / (σ + 1e-6) = n/(n−1) · GRPO's A. A singleton gets 0.
"""

from __future__ import annotations

from troupe.learner.advantages import Array, Group, advantage, compare


@advantage("grpo_loo")
def grpo_loo(group: Group) -> Array:
    """Advantages [n]."""
    n = len(group.returns)
    return n / max(1, n - 1) * compare(group.returns, group.config.sigma)
