"""Direct preference optimisation over trajectories: a successful one of a task is preferred to a failed one (ETO,
arXiv:2403.02502, section 3.3; DPO, arXiv:2305.18290, equation 7).

ℓ = −log σ(m), m = β[(lp_w − ref_w) − (lp_l − ref_l)], each lp the sum over all policy tokens of the trajectory; what the
environment said never counts. Its gradient is −σ(−m)·β·(∇lp_w − ∇lp_l): a weight for each trajectory's tokens. So
a pair need not share a row, and gradients do not depend on layout (law 5).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from troupe.learner.success import succeeded
from troupe.protocol.trajectory import Trajectory

Pair = tuple[int, int]
"""Indices of the preferred trajectory and of the other."""


def pairs_of(trajectories: Sequence[Trajectory]) -> list[Pair]:
    """(successful, failed) trajectories of the same task, seed included; each at most once.

    They are matched in order of id.
    """
    sides: dict[tuple[str, str, str, int], tuple[list[int], list[int]]] = {}
    for i in sorted(range(len(trajectories)), key=lambda i: trajectories[i].id):
        t = trajectories[i]
        sides.setdefault((t.task.env, t.task.split, t.task.id, t.task.seed), ([], []))[0 if succeeded(t) else 1].append(i)
    return [pair for won, lost in sides.values() for pair in zip(won, lost, strict=False)]


def dpo(lp: torch.Tensor, ref: torch.Tensor, pairs: Sequence[Pair], beta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(margin m of each pair, weight [n] of each trajectory), from summed logprobs `lp` and `ref` [n].

    Σ weight·lp over the trajectories of the pairs has the gradient of the pairs' mean loss.
    """
    won, lost = (torch.tensor(side, device=lp.device) for side in zip(*pairs, strict=True))
    margin = beta * ((lp - ref)[won] - (lp - ref)[lost])
    slope = beta * torch.sigmoid(-margin) / len(pairs)
    weight = torch.zeros_like(lp).index_add(0, won, -slope).index_add(0, lost, slope)
    return margin, weight
