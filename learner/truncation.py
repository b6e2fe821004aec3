"""Sampling that was cut by top_k or top_p, on the learner's side: the same rule on its own logits.

As an engine does: temperature first, then the `top_k` likeliest, of these the fewest that reach `top_p`, and the rest is
normalised. The token that was sampled always stays: if rounding, or a step of training, moved it out of the learner's cut,
its logprob is still a number, and the gap to the engine's shows.
"""

from __future__ import annotations

import torch


@torch.no_grad()
def kept(logits: torch.Tensor, targets: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor) -> torch.Tensor:
    """Which tokens [k, vocabulary] stay. logits: tempered [k, vocabulary]; targets, top_k (0: all), top_p (1: all): [k]."""
    ordered, ids = logits.sort(dim=-1, descending=True, stable=True)
    rank = torch.arange(logits.shape[-1], device=logits.device)
    stays = (rank < top_k[:, None]) | (top_k == 0)[:, None]
    p = ordered.masked_fill(~stays, -torch.inf).double().softmax(-1)
    stays &= p.cumsum(-1) - p < top_p[:, None]  # a token stays if those before it do not reach top_p
    stays |= (top_p == 1)[:, None] & (top_k == 0)[:, None]
    return torch.zeros_like(stays).scatter_(-1, ids, stays).scatter_(-1, targets[:, None], True)
