"""Pass@k training (arXiv:2508.10751, analytical derivation): reward the group of k that solves the task at least once.

With N responses, N⁻ of them failures: R̄ = 1 − C(N⁻, k)/C(N, k), σ = √(R̄(1 − R̄)); a success gets (1 − R̄)/σ, a failure
(1 − R̄ − C(N⁻−1, k−1)/C(N−1, k−1))/σ. They sum to 0, and a task that any k responses solve (or none) teaches nothing.
A success is what the world called one, or a reward above 0, whatever shapes the return (`learner/success.py`).
k = `pass_k`; with k = 1 it is GRPO with population σ.
"""

from __future__ import annotations

import math

import numpy as np

from troupe.learner.advantages import Array, Group, advantage
from troupe.learner.success import succeeded


@advantage("pass_at_k")
def pass_at_k(group: Group) -> Array:
    """Advantages [n]; 0 for a group smaller than k (some of it broke), which has no k to look at."""
    n, k = len(group.returns), group.config.pass_k
    if n < max(2, k):
        return np.zeros(n)
    solved = np.array([succeeded(trajectory) for trajectory in group.trajectories])
    failed = int(n - solved.sum())
    missed = math.comb(failed, k) / math.comb(n, k)  # 1 − R̄
    if missed in (0.0, 1.0):
        return np.zeros(n)
    blame = math.comb(failed - 1, k - 1) / math.comb(n - 1, k - 1)
    advantages: Array = np.where(solved, missed, missed - blame) / math.sqrt(missed * (1 - missed))
    return advantages
