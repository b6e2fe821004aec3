"""Runs as the health monitor sees them, row by row: healthy, sick and noisy ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np

from troupe.learner.health import HealthConfig, Kind, alarms

Row = dict[str, Any]


def history(seed: int, n: int = 120, *, groups: int = 8, size: int = 8, top: float = 0.8) -> list[Row]:
    """A healthy run: tasks of different difficulty, success that rises from .15 to `top`, entropy that falls as it does."""
    rng = np.random.default_rng(seed)
    rows = []
    for k in range(n):
        p = 0.15 + (top - 0.15) * min(1.0, k / 60)
        chance = rng.beta(2 * p, 2 * (1 - p), (groups, 1))
        won = (rng.random((groups, size)) < chance).astype(float)
        rows.append(
            {
                "step": k + 1,
                "reward_mean": won.mean(),
                "success": won.mean(),
                "reward_min": won.min(),
                "reward_max": won.max(),
                "group_reward_std": won.std(1, ddof=1).mean(),
                "entropy": math.exp(-k / 100 + rng.normal(0, 0.1)),
                "grad_norm": math.exp(rng.normal(-1, 0.4)),
                "self_similarity": 0.3 + 0.2 * k / n + rng.normal(0, 0.05),
                "reward_part_format": min(1.0, 0.3 + k / 100) + rng.normal(0, 0.05),
            }
        )
    return rows


def flat(n: int = 60, **more: Any) -> list[Row]:
    """A run on which nothing happens: success .55, σ .42, with a little noise from the row number."""
    wave = [0.01 * math.sin(k) for k in range(n)]
    quiet = {"reward_mean": 0.55, "success": 0.55, "group_reward_std": 0.42, "entropy": 1.0, "grad_norm": 0.4, **more}
    return [{"step": k + 1, **{name: value * (1 + wave[k]) for name, value in quiet.items()}} for k in range(n)]


def change(rows: list[Row], name: str, values: Sequence[float]) -> list[Row]:
    """The last rows with other values of `name`."""
    tail = [{**row, name: value} for row, value in zip(rows[-len(values) :], values, strict=True)]
    return [*rows[: -len(values)], *tail]


def ramp(low: float, high: float, n: int, hold: int = 0) -> list[float]:
    return [*np.linspace(low, high, n).tolist(), *[high] * hold]


def first(rows: list[Row], kind: Kind, config: HealthConfig | None = None) -> int | None:
    """Number of rows at which an alarm of `kind` is first raised."""
    seen = (n for n in range(1, len(rows) + 1) if any(a.kind == kind for a in alarms(rows[:n], config)))
    return next(seen, None)


CLIFF = change(change(flat(), "group_reward_std", ramp(0.42, 0.03, 10, hold=10)), "success", [0.55] * 20)
COLLAPSE = change(flat(), "entropy", ramp(1.0, 0.05, 10, hold=10))
SPIKE = change(flat(), "grad_norm", [8.0, 0.4, 0.4])
HACKED = change(change(flat(reward_part_polite=0.2), "reward_part_polite", ramp(0.2, 0.9, 30)), "success", ramp(0.55, 0.2, 30))
ECHOING = change(flat(self_similarity=0.3), "self_similarity", ramp(0.3, 0.9, 10, hold=10))
OVERLONG = change(flat(cut_turns=0.05), "cut_turns", ramp(0.05, 0.6, 10, hold=10))
SICK: list[tuple[Kind, list[Row]]] = [
    ("reward_variance_cliff", CLIFF),
    ("entropy_collapse", COLLAPSE),
    ("gradient_spike", SPIKE),
    ("reward_hacking", HACKED),
    ("echo", ECHOING),
    ("overlong_turns", OVERLONG),
]
