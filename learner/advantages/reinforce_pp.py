"""REINFORCE++ (arXiv:2501.03262): discounted token returns, whitened over the whole batch instead of over a group.

reinforce_pp: G = r + γG′ from sampled token to sampled token (`gamma`), carried unchanged across observations, so that a
turn is also credited with what later turns earn. reinforce_pp_baseline: R − μ of the group, for all tokens. Both are then
whitened over all tokens of the batch (`whiten`).
"""

from __future__ import annotations

from troupe.learner.advantages import Array, Group, advantage, compare
from troupe.learner.rewards import to_go


@advantage("reinforce_pp", whiten=True, compares=False)
def reinforce_pp(group: Group) -> list[Array]:
    """Returns to go, one per policy token, before whitening."""
    return [to_go(group.token_rewards(i), group.config.gamma) for i in range(len(group.trajectories))]


@advantage("reinforce_pp_baseline", whiten=True)
def reinforce_pp_baseline(group: Group) -> Array:
    """Centred returns [n], before whitening; 0 for a singleton and for an all-equal group."""
    return compare(group.returns, "none")
