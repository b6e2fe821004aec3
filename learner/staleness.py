"""How old is what is trained? A token's age is the weight versions between its sampling and this step."""

from __future__ import annotations

import numpy as np


def staleness(age: np.ndarray) -> dict[str, float]:
    """Metrics of ages [k], k ≥ 1: staleness_mean, staleness_max and, for each age n that occurs, staleness_n, the share of the
    tokens that are n versions behind."""
    ages, counts = np.unique(age, return_counts=True)
    shares = {f"staleness_{n}": count / len(age) for n, count in zip(ages.tolist(), counts.tolist(), strict=True)}
    return {"staleness_mean": float(age.mean()), "staleness_max": float(ages[-1]), **shares}
