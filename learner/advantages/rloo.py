"""RLOO: the return against the mean of the others (arXiv:2402.14740, section 3).

A = R − mean of the other returns = n/(n−1) · (R − μ). A singleton gets 0.
"""

from __future__ import annotations

import numpy as np

from troupe.learner.advantages import Array, Group, advantage


@advantage("rloo")
def rloo(group: Group) -> Array:
    """Advantages [n]."""
    if not group.informative:
        return np.zeros(len(group.returns))
    n = len(group.returns)
    against: Array = n / (n - 1) * (group.returns - group.returns.mean())
    return against
