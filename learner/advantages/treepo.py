"""TreePO-style branching advantages (arXiv:2508.17445, section 3.3) for trajectories that share a prefix.

A turn is compared in every subgroup that it descends from: the whole group, and for each of its turn's predecessors the
trajectories that went through exactly the same tokens, those that ended there included. Where a trajectory forked within a
turn (`Trajectory.fork`), what comes before and after the fork are turns of their own, in all that went through it.
A = mean over those subgroups of (R − their mean), divided by the group's σ + 1e-6. A subgroup of one compares nothing and is
left out, so without shared prefixes this is GRPO.
"""

from __future__ import annotations

from collections import defaultdict

import numpy as np

from troupe.learner.advantages import EPSILON, Array, Group, advantage
from troupe.protocol.trajectory import POLICY, Trajectory

Prefix = int
"""Names a sequence of tokens from a root, the same in all trajectories of the group."""
Names = dict[tuple[Prefix, bytes], Prefix]
"""By the prefix before a node, and the node's first tokens."""
Forks = defaultdict[Prefix, set[bytes]]
"""The first tokens of nodes within which somebody forked, until there, by the prefix before the node."""


@advantage("treepo")
def treepo(group: Group) -> list[Array]:
    """Advantages, one per policy token."""
    if not group.informative:
        return [np.zeros(t.policy_tokens) for t in group.trajectories]
    names, forks = Names(), Forks(set)
    before = [_before(trajectory, names, forks) for trajectory in group.trajectories]
    said = [_pieces(t, starts, names, forks) for t, starts in zip(group.trajectories, before, strict=True)]
    returns: defaultdict[Prefix, list[float]] = defaultdict(list)
    for i, pieces in enumerate(said):
        for prefix in {prefix for _, past, name in pieces for prefix in (*past, name)}:
            returns[prefix].append(float(group.returns[i]))
    sigma = float(group.returns.std(ddof=int(group.config.sigma == "unbiased"))) + EPSILON
    mean = float(group.returns.mean())
    advantages = []
    for i, pieces in enumerate(said):
        tokens = [np.zeros(0)]
        for count, past, _ in pieces:
            means = [mean, *(float(np.mean(returns[p])) for p in past if len(returns[p]) > 1)]
            tokens.append(np.full(count, np.mean([group.returns[i] - m for m in means]) / sigma))
        advantages.append(np.concatenate(tokens))
    return advantages


def _before(trajectory: Trajectory, names: Names, forks: Forks) -> list[Prefix]:
    """What comes before each node. Adds to `forks` where the trajectory forked."""
    starts: list[Prefix] = []
    ends: list[Prefix] = []
    left = trajectory.fork.tokens if trajectory.fork else 0
    for node in trajectory.nodes:
        starts.append(ends[node.parent] if node.parent >= 0 else -1)
        ends.append(names.setdefault((starts[-1], node.tokens.tobytes()), len(names)))
        if 0 < left < len(node.logprobs):
            at = int(np.flatnonzero(node.provenance == POLICY)[left - 1]) + 1
            forks[starts[-1]].add(node.tokens[:at].tobytes())
        left -= len(node.logprobs)
    return starts


def _pieces(t: Trajectory, starts: list[Prefix], names: Names, forks: Forks) -> list[tuple[int, list[Prefix], Prefix]]:
    """Turns, parted at forks: policy tokens, the prefixes that earlier ones of its branch end, and the one that it ends."""
    pieces: list[tuple[int, list[Prefix], Prefix]] = []
    spoken: list[list[Prefix]] = []  # up to and including each node
    for node, start in zip(t.nodes, starts, strict=True):
        past, counted = spoken[node.parent] if node.parent >= 0 else [], 0
        whole = node.tokens.tobytes()
        for part in sorted({part for part in forks[start] if whole.startswith(part)} | {whole}, key=len):
            count = int((node.provenance[: len(part) // node.tokens.itemsize] == POLICY).sum())
            if count > counted:
                name = names.setdefault((start, part), len(names))
                pieces.append((count - counted, past, name))
                past, counted = [*past, name], count
        spoken.append(past)
    return pieces
