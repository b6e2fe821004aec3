"""RLOO: the return against the mean of the others (arXiv:2402.14740, section 3).

A = R − mean of the other returns = n/(n−1) · (R − μ). A singleton gets 0.
"""

from __future__ import annotations

from troupe.learner.advantages import Array, Group, advantage, compare


@advantage("rloo")
def rloo(group: Group) -> Array:
    """Advantages [n]."""
    n = len(group.returns)
    return n / max(1, n - 1) * compare(group.returns, "none")
