"""REINFORCE (Williams 1992) with reward to go (Sutton et al. 2000): no baseline, each turn is credited with what follows.

A of a token in turn j = Σ_{i ≥ j} γ^(i−j) r_i, γ = `turn_gamma`; with γ = 1 and one reward at the end, the return.
"""

from __future__ import annotations

from troupe.learner.advantages import Array, Group, advantage
from troupe.learner.rewards import to_go


@advantage("reinforce", compares=False)
def reinforce(group: Group) -> list[Array]:
    """Advantages, one per policy token. Turn rewards 0, 1, 1 give 2, 2, 1."""
    gamma = group.config.turn_gamma
    return [to_go(group.turn_rewards(i), gamma)[group.turns(i)] for i in range(len(group.trajectories))]
