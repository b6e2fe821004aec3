"""StarPO (RAGEN, arXiv:2504.20073, section 2): the whole trajectory, thoughts and actions of all turns, is the unit.

A = (R − μ) / (σ + 1e-6) of the trajectory's return, for all of its sampled tokens. StarPO-S adds: filter = "top_std" (the
quarter of the groups with the highest reward deviation), a critic (advantage = "gae", γ = λ = 1), clip .2/.28, no kl.
"""

from __future__ import annotations

from troupe.learner.advantages import Array, Group, advantage, compare


@advantage("starpo")
def starpo(group: Group) -> Array:
    """Advantages [n]."""
    return compare(group.returns, group.config.sigma)
