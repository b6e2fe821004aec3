"""Turn-level credit: the return to go of a turn against the same turn of the others in its group.

r_j is the turn's reward as `learner/rewards.py` composes it (step rewards and their named parts, the outcome with the last
turn), G_j = Σ_{i ≥ j} γ^(i−j) r_i with γ = `turn_gamma`, and A of a token in turn j is (G_j − μ_j) / (σ_j + 1e-6) over the
trajectories that got as far as turn j. Step-GRPO's step-wise rewards (arXiv:2503.12937) compared at the level of turns, as
in multi-turn GRPO (arXiv:2505.11821). A turn that only one trajectory reached has nothing to be compared with: 0.
"""

from __future__ import annotations

import numpy as np

from troupe.learner.advantages import Array, Group, advantage, compare
from troupe.learner.rewards import to_go


@advantage("turn_level")
def turn_level(group: Group) -> list[Array]:
    """Advantages, one per policy token."""
    returns = [to_go(group.turn_rewards(i), group.config.turn_gamma) for i in range(len(group.trajectories))]
    compared = [np.zeros(len(values)) for values in returns]
    for turn in range(max(map(len, returns), default=0)):
        reached = [i for i, values in enumerate(returns) if len(values) > turn]
        for i, value in zip(reached, compare(np.array([returns[i][turn] for i in reached]), group.config.sigma), strict=True):
            compared[i][turn] = value
    return [compared[i][group.turns(i)] for i in range(len(group.trajectories))]
