"""How the embedded engine draws a token: inverse CDF, one uniform number a row.

Promises:
- temperature first, then top_k, then top_p, as in transformers; a token outside of what they leave is never drawn;
- the logprob returned is of the distribution drawn from, so it is normalised over what is left;
- temperature 0 takes the most likely token, with its logprob at temperature 1.
"""

from __future__ import annotations

import math

import numpy as np
import torch

from troupe.protocol.errors import ConfigError
from troupe.protocol.messages import COLDEST, Sampling

_BELOW_ONE = 1 - 2.0**-32
"""A uniform number times the total stays below the total, whatever the rounding."""


def check(sampling: Sampling) -> None:
    """Raises ConfigError if the settings mean nothing."""
    if not (sampling.temperature == 0 or COLDEST <= sampling.temperature < math.inf):
        raise ConfigError(f"sampling.temperature must be 0 (greedy), or {COLDEST} or more, got {sampling.temperature}")
    if not 0 < sampling.top_p <= 1:
        raise ConfigError(f"sampling.top_p must be above 0 and at most 1 (1 is off), got {sampling.top_p}")
    if sampling.top_k < 0:
        raise ConfigError(f"sampling.top_k must be 0 (off) or more, got {sampling.top_k}")
    if sampling.max_tokens < 1:
        raise ConfigError(f"sampling.max_tokens must be at least 1, got {sampling.max_tokens}")


def uniforms(seed: int, prompt: int, n: int) -> np.ndarray:
    """The numbers in [0, 1) that a request draws its `n` tokens with; a prompt of other length draws others."""
    return np.minimum(np.random.default_rng([seed % 2**64, prompt]).random(n), _BELOW_ONE)


def sample(logits: torch.Tensor, settings: list[Sampling], uniform: np.ndarray) -> tuple[list[int], list[float]]:
    """Draws a token a row. logits: [n, vocabulary]; settings and uniform: one a row. Returns ids and logprobs.

    Raises FloatingPointError if the logits are no numbers.
    """
    logprobs = _tempered(logits, settings)
    if bool(logprobs.amax(-1).isnan().any()):
        raise FloatingPointError("the model's logits are not finite numbers: its weights have diverged")
    u = torch.from_numpy(uniform).to(logits.device)[:, None]
    for i in _are_cut(settings):
        logprobs[i] = _cut(logprobs[i], settings[i])
    cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
    ids = torch.searchsorted(cumulative, u * cumulative[:, -1:], right=True)
    greedy = [i for i, s in enumerate(settings) if s.temperature == 0]
    if greedy:
        ids[greedy] = logprobs[greedy].argmax(-1, keepdim=True)
    return ids[:, 0].tolist(), logprobs.gather(-1, ids)[:, 0].tolist()


def logprobs(logits: torch.Tensor, ids: np.ndarray, temperature: float) -> np.ndarray:
    """Of the given `ids` [n], without top_k and top_p. logits: [n, vocabulary]. Returns [n] float32."""
    tempered = logits.float() / temperature
    chosen = tempered.gather(-1, torch.from_numpy(ids.astype(np.int64))[:, None].to(logits.device))[:, 0]
    found: np.ndarray = (chosen - tempered.logsumexp(-1)).cpu().numpy()
    return found


def close(logits: torch.Tensor, settings: list[Sampling], uniform: np.ndarray, noise: float) -> list[int]:
    """The rows in which `sample` might draw another token if each logit were rounded otherwise, by up to `noise`."""
    logprobs = _tempered(logits, settings)
    noises = np.array([noise / min(1.0, s.temperature or 1.0) for s in settings])
    found = {i for i in _are_cut(settings) if _edge(logprobs[i], settings[i]) < noises[i]}
    for i in _are_cut(settings):
        logprobs[i] = _cut(logprobs[i], settings[i])
    cumulative = logprobs.exp().cumsum(-1, dtype=torch.float64)
    around = np.stack([uniform - noises, uniform + noises], 1).clip(0, _BELOW_ONE)
    ids = torch.searchsorted(cumulative, torch.from_numpy(around).to(logits.device) * cumulative[:, -1:], right=True)
    best = logprobs.topk(2, -1).values
    for i, s in enumerate(settings):
        if bool(best[i, 0] - best[i, 1] < 2 * noise) if s.temperature == 0 else bool(ids[i, 0] != ids[i, 1]):
            found.add(i)
    return sorted(found)


def _tempered(logits: torch.Tensor, settings: list[Sampling]) -> torch.Tensor:
    temperatures = torch.tensor([s.temperature or 1.0 for s in settings], device=logits.device)
    return (logits.float() / temperatures[:, None]).log_softmax(-1)


def _are_cut(settings: list[Sampling]) -> list[int]:
    return [i for i, s in enumerate(settings) if s.temperature > 0 and (s.top_k > 0 or s.top_p < 1)]


def _cut(logprobs: torch.Tensor, settings: Sampling) -> torch.Tensor:
    """Leaves the top_k most likely of logprobs [vocabulary], of these the fewest that reach top_p, and normalises."""
    ordered, ids = logprobs.sort(descending=True, stable=True)
    ordered = ordered[: settings.top_k or None]
    kept = int((_before(ordered) < settings.top_p).sum())  # a token stays if those before it do not reach top_p
    return torch.full_like(logprobs, float("-inf")).scatter_(0, ids[:kept], ordered[:kept].log_softmax(-1))


def _before(ordered: torch.Tensor) -> torch.Tensor:
    """What the tokens before each one have together, of those that are given."""
    p = ordered.double().softmax(-1)
    return p.cumsum(-1) - p


def _edge(logprobs: torch.Tensor, settings: Sampling) -> float:
    """By how much logprobs [vocabulary] may change until top_k and top_p might leave other tokens of them."""
    ordered = logprobs.sort(descending=True).values
    before = _before(ordered[: settings.top_k or None])
    kept = int((before < settings.top_p).sum())
    gaps = [float(ordered[kept - 1] - ordered[kept]) / 2] if kept < len(ordered) else []
    if settings.top_p < 1:
        gaps += (before[kept - 1 : kept + 1] - settings.top_p).abs().tolist()
    return min(gaps, default=float("inf"))
