"""Whitening: advantages over all trained tokens of the batch get mean 0 and deviation 1."""

from __future__ import annotations

import numpy as np

from troupe.learner.rewards import Array


def whiten(values: Array) -> Array:
    """(x − μ) / √(σ² + 1e-8) with unbiased σ², float64 [k]. Exactly 0 where all values are equal, or there is one."""
    if len(values) < 2 or not (values != values[0]).any():
        return np.zeros(len(values))
    whitened: Array = (values - values.mean()) / np.sqrt(values.var(ddof=1) + 1e-8)
    return whitened
