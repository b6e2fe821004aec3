"""From per-token losses to the one number of an optimiser step: loss = Σ weight·ℓ / divisor, over all of its tokens.

With n_i trained tokens in trajectory i and N trajectories that have any, counted over the whole optimiser step and not
over a micro-batch (law 5), and before any token is rejected:
- token-mean: Σ ℓ / Σ n_i. Every token weighs the same (DAPO, arXiv:2503.14476, section 3.3);
- sequence-mean-token-mean: Σ_i (Σ ℓ / n_i) / N. Every trajectory weighs the same (GRPO, arXiv:2402.03300, equation 3);
- sequence-mean-token-sum: Σ ℓ / N;
- constant: Σ ℓ / (N·L), L = `aggregate_length` (Dr.GRPO, arXiv:2503.20783, section 3.2; the width of a padded batch in the
  place of L would depend on the layout).
"""

from __future__ import annotations

from typing import Any, Literal, TypeAlias

import numpy as np

Aggregate: TypeAlias = Literal["token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum", "constant"]


def aggregate(
    kind: Aggregate, owner: np.ndarray[Any, np.dtype[np.int64]], length: int | None = None
) -> tuple[np.ndarray[Any, np.dtype[np.float32]], float]:
    """(weights [k], divisor) for tokens that belong to the trajectories `owner` [k]. length: L of constant."""
    weights = np.ones(len(owner), np.float32)
    if kind == "token-mean":
        return weights, float(len(owner))
    _, mine, counts = np.unique(owner, return_inverse=True, return_counts=True)
    n = float(len(counts))
    if kind == "sequence-mean-token-mean":
        return (1 / counts[mine]).astype(np.float32), n
    return weights, n * (length or 1) if kind == "constant" else n
