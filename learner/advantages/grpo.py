"""GRPO: the return, normalised over its group (arXiv:2402.03300, section 4.1.2).

A = (R − μ) / (σ + 1e-6) with unbiased σ. A singleton and an all-equal group get exactly 0: there is nothing to compare,
and the float residue of R − μ must not be blown up by 1/σ.
"""

from __future__ import annotations

import numpy as np

from troupe.learner.advantages import Array, Group, advantage


@advantage("grpo")
def grpo(group: Group) -> Array:
    """Advantages [n]. R = [1, 0, 0, 0] gives 1.5, −.5, −.5, −.5."""
    if not group.informative:
        return np.zeros(len(group.returns))
    normalised: Array = (group.returns - group.returns.mean()) / (group.returns.std(ddof=1) + 1e-6)
    return normalised
