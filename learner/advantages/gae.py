"""Generalised advantage estimation (arXiv:1506.02438, equation 16) over the sampled tokens, for PPO with a critic.

δ = r + γV′ − V and A = δ + γλA′, where ′ is the next *sampled* token: observations between two turns are skipped, and
nothing is worth anything after the end. With γ = λ = 1 (StarPO's setting) A is the reward to go minus V.
"""

from __future__ import annotations

import numpy as np

from troupe.learner.advantages import Array, Group, advantage


@advantage("gae", needs=["values"], compares=False)
def gae(group: Group) -> list[Array]:
    """Advantages, one per policy token."""
    config = group.config
    return [
        trace(group.token_rewards(i), group.values[i], config.gamma, config.gae_lambda) for i in range(len(group.trajectories))
    ]


def trace(rewards: Array, values: Array, gamma: float, decay: float) -> Array:
    """GAE of one sequence: rewards and values [n] to advantages [n]."""
    advantages = np.zeros(len(rewards))
    advantage_after = value_after = 0.0
    for i in range(len(rewards) - 1, -1, -1):
        delta = rewards[i] + gamma * value_after - values[i]
        advantages[i] = advantage_after = delta + gamma * decay * advantage_after
        value_after = values[i]
    return advantages
