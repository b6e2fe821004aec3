"""Importance weights against what the samples were drawn from: older weights, or an engine that computes a little otherwise.

w = exp(old − rollout), its exponent within ±20: the learner's own logprob before the step over the engine's. The weight of
a token's loss, without gradient:
- none: 1;
- tis: min(w, cap), truncated importance sampling (Yao et al. 2025, "Your efficient RL framework secretly brings
  you off-policy RL training"; cap 2);
- icepop: w where low ≤ w ≤ high, else 0: the token is rejected (Ring-1T, arXiv:2510.18855; bounds 0.5 and 5);
- decoupled: w, or 0 above an optional cap. With ppo_clip that is decoupled PPO's −(π_prox / π_behave)·min(ρA, clip(ρ)A),
  ρ = π / π_prox (arXiv:2110.00641, AReaL arXiv:2505.24298).
On the level of sequences, w is the product over all trained tokens of a trajectory.

Rejected tokens still count in what `aggregate` divides by.
"""

from __future__ import annotations

import torch

from troupe.learner.config import LearnerConfig


def importance(old: torch.Tensor, rollout: torch.Tensor, config: LearnerConfig) -> torch.Tensor:
    """Weights of tokens, float32, from `old` and `rollout` [k]; pass `over_sequences` of both for the level of sequences."""
    if config.correct == "none":
        return torch.ones_like(old, dtype=torch.float32)
    weight = (old - rollout).clamp(-20.0, 20.0).exp().float()
    if config.correct == "tis":
        return weight.clamp(max=config.tis_cap)
    if config.correct == "icepop":
        return weight * ((weight >= config.icepop_low) & (weight <= config.icepop_high))
    return weight if config.decoupled_cap is None else weight * (weight <= config.decoupled_cap)


def over_sequences(values: torch.Tensor, owner: torch.Tensor) -> torch.Tensor:
    """For each token the sum of `values` [k] over its trajectory, which `owner` [k] numbers from 0.

    In float64: of a long trajectory, the difference of two sums is smaller than the float32 rounding of either.
    """
    sums = torch.zeros(int(owner.max()) + 1 if len(owner) else 0, dtype=torch.float64, device=values.device)
    return sums.index_add(0, owner, values.double())[owner]
