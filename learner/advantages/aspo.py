"""ASPO: the advantage itself is shaped, so that correct answers that use a tool early are favoured
(arXiv:2508.19201, section 3.3, equation 2).

For successful trajectories that call a tool: A + clip(δ·(p − mean p)/mean L, −k|A|, k|A|), A as in GRPO, p the tokens said
until the first calling turn is over, L all tokens said, means over such trajectories of the group; δ = `aspo_delta` < 0
and k = `aspo_cap` < 1, so that being right always weighs more. (Another method of this name, arXiv:2510.06062, is not this.)
"""

from __future__ import annotations

import numpy as np

from troupe.learner.advantages import Array, Group, advantage, compare
from troupe.learner.success import succeeded


@advantage("aspo")
def aspo(group: Group) -> Array:
    """Advantages [n]."""
    config = group.config
    advantages = compare(group.returns, config.sigma)
    said, until = {}, {}
    for i, trajectory in enumerate(group.trajectories):
        calling = next((turn for turn, step in enumerate(trajectory.steps) if step.calls), None)
        if calling is not None and succeeded(trajectory) and trajectory.policy_tokens:
            said[i] = trajectory.policy_tokens
            until[i] = int((group.turns(i) <= calling).sum())
    for i, position in until.items():
        bias = config.aspo_delta * (position - np.mean(list(until.values()))) / np.mean(list(said.values()))
        bound = config.aspo_cap * abs(advantages[i])
        advantages[i] += min(max(bias, -bound), bound)
    return advantages
