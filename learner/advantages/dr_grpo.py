"""Dr. GRPO's advantage: the centred return, without the division by σ (arXiv:2503.20783, section 3.2). A = R − μ.

Its loss is aggregate = "constant": neither a group's spread nor a response's length weighs.
"""

from __future__ import annotations

from troupe.learner.advantages import Array, Group, advantage, compare


@advantage("dr_grpo")
def dr_grpo(group: Group) -> Array:
    """Advantages [n]; 0 for a singleton and for an all-equal group."""
    return compare(group.returns, "none")
