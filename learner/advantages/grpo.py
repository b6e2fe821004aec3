"""GRPO: the return, normalised over its group (arXiv:2402.03300, section 4.1.2).

A = (R − μ) / (σ + 1e-6) with unbiased σ (`sigma = "population"` for the other). A singleton and an all-equal group get
exactly 0: there is nothing to compare.
"""

from __future__ import annotations

from troupe.learner.advantages import Array, Group, advantage, compare


@advantage("grpo")
def grpo(group: Group) -> Array:
    """Advantages [n]. R = [1, 0, 0, 0] gives 1.5, −.5, −.5, −.5; with population σ 1.732, −.577, −.577, −.577."""
    return compare(group.returns, group.config.sigma)
