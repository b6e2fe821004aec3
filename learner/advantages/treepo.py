"""TreePO-style branching advantages (arXiv:2508.17445, section 3.3) for trajectories that share a prefix.

A turn is compared in every subgroup that it descends from: the whole group, and for each of its turn's predecessors the
trajectories that went through exactly the same tokens, those that ended there included. A = mean over those subgroups of
(R − their mean), divided by the group's σ + 1e-6. A subgroup of one compares nothing and is left out, so without shared
prefixes this is GRPO.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from troupe.learner.advantages import EPSILON, Array, Group, advantage
from troupe.protocol.trajectory import Trajectory

Prefix = int
"""Names a sequence of tokens from a root, the same in all trajectories of the group."""


@advantage("treepo")
def treepo(group: Group) -> list[Array]:
    """Advantages, one per policy token."""
    if not group.informative:
        return [np.zeros(t.policy_tokens) for t in group.trajectories]
    names: dict[tuple[Prefix, bytes], Prefix] = {}
    said = [_prefixes(trajectory, names) for trajectory in group.trajectories]
    returns: defaultdict[Prefix, list[float]] = defaultdict(list)
    for i, nodes in enumerate(said):
        for prefix in {prefix for _, _, spoken in nodes for prefix in spoken}:
            returns[prefix].append(float(group.returns[i]))

    sigma = float(group.returns.std(ddof=int(group.config.sigma == "unbiased"))) + EPSILON
    mean = float(group.returns.mean())
    advantages = []
    for i, nodes in enumerate(said):
        tokens = [np.zeros(0)]
        for count, before, _ in nodes:
            means = [mean, *(float(np.mean(returns[p])) for p in before if len(returns[p]) > 1)]
            tokens.append(np.full(count, np.mean([group.returns[i] - m for m in means]) / sigma))
        advantages.append(np.concatenate(tokens))
    return advantages


def _prefixes(
    trajectory: Trajectory, names: dict[tuple[Prefix, bytes], Prefix]
) -> list[tuple[int, list[Prefix], list[Prefix]]]:
    """Of each node: its policy tokens, and the prefixes that nodes with policy tokens end, before it and up to it."""
    ends: list[Prefix] = []
    spoken: list[list[Prefix]] = []  # up to and including each node
    nodes = []
    for node in trajectory.nodes:
        before = spoken[node.parent] if node.parent >= 0 else []
        ends.append(names.setdefault((ends[node.parent] if node.parent >= 0 else -1, node.tokens.tobytes()), len(names)))
        spoken.append([*before, ends[-1]] if len(node.logprobs) else before)
        nodes.append((len(node.logprobs), before, spoken[-1]))
    return nodes
