"""Bi-level GAE (VAGEN, arXiv:2510.16907): first between turns, then between the tokens of each turn.

Turns, with V at a turn's last token: δ_j = r_j + γ_H V_{j+1} − V_j and A_j = δ_j + γ_H λ_H A_{j+1}, γ_H = `turn_gamma` and
λ_H = `turn_lambda`. Then A_j + V_j is what the turn's last token is paid, and GAE with `gamma` and `gae_lambda` runs
inside the turn. A turn that earned nothing is a turn like any other.
"""

from __future__ import annotations

import numpy as np

from troupe.learner.advantages import Array, Group, advantage
from troupe.learner.advantages.gae import trace
from troupe.learner.rewards import at_tokens


@advantage("bi_level_gae", needs=["values"], compares=False)
def bi_level_gae(group: Group) -> list[Array]:
    """Advantages, one per policy token."""
    return [_one(group, i) for i in range(len(group.trajectories))]


def _one(group: Group, i: int) -> Array:
    config, values, turns = group.config, group.values[i], group.turns(i)
    earned = at_tokens(group.paid_turns(i), turns)
    inside = [np.flatnonzero(turns == turn) for turn in np.unique(turns)]
    rewards = np.array([earned[tokens].sum() for tokens in inside])
    ends = np.array([tokens[-1] for tokens in inside], np.int64)
    turn_advantages = trace(rewards, values[ends], config.turn_gamma, config.turn_lambda)

    paid = group.penalties[i].copy() if group.penalties else np.zeros(len(turns))
    paid[ends] += turn_advantages + values[ends]
    advantages = np.zeros(len(turns))
    for tokens in inside:
        advantages[tokens] = trace(paid[tokens], values[tokens], config.gamma, config.gae_lambda)
    return advantages
