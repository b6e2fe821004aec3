"""GiGPO: a group within the group (arXiv:2505.10978, section 4). A = A_E + ω·A_S, ω = `gigpo_weight`.

A_E: the return against its group, once a trajectory. A_S: the return to go of a step, Σ γ^(i−j) r_i with γ = `turn_gamma`
(the paper: 0.95), against those of all steps of the same group that acted from the same anchor state (`Step.state_key`).
By default both only subtract the mean (F_norm = 1); gigpo_norm = "mean-std" also divides by the deviation. A step that is
alone with its state, or whose state has no key, has nothing to be compared with: A_S = 0. Tasks are never mixed.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from troupe.learner.advantages import Array, Group, advantage, compare
from troupe.learner.rewards import to_go


@advantage("gigpo")
def gigpo(group: Group) -> list[Array]:
    """Advantages, one per policy token."""
    sigma = "none" if group.config.gigpo_norm == "mean" else group.config.sigma
    episode = compare(group.returns, sigma)
    returns = [to_go(group.turn_rewards(i), group.config.turn_gamma) for i in range(len(group.trajectories))]
    step = [np.zeros(len(values)) for values in returns]

    anchors: defaultdict[tuple[str, str], list[tuple[int, int]]] = defaultdict(list)
    for i, trajectory in enumerate(group.trajectories):
        for turn, taken in enumerate(trajectory.steps):
            if taken.state_key:
                anchors[trajectory.task.id, taken.state_key].append((i, turn))
    for members in anchors.values():
        compared = compare(np.array([returns[i][turn] for i, turn in members]), sigma)
        for (i, turn), value in zip(members, compared, strict=True):
            step[i][turn] = value
    return [episode[i] + group.config.gigpo_weight * step[i][group.turns(i)] for i in range(len(group.trajectories))]
