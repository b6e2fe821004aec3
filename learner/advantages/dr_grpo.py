"""Dr. GRPO's advantage: the centred return, without the division by σ (arXiv:2503.20783, section 3.2). A = R − μ."""

from __future__ import annotations

import numpy as np

from troupe.learner.advantages import Array, Group, advantage


@advantage("dr_grpo")
def dr_grpo(group: Group) -> Array:
    """Advantages [n]; 0 for a singleton and for an all-equal group."""
    if not group.informative:
        return np.zeros(len(group.returns))
    centred: Array = group.returns - group.returns.mean()
    return centred
