"""How good is it? Estimators of success from trials, with how sure they are.

A trial is one finished episode of a held-out task; with n trials of a task, c of them successes:
- success = Σc / Σn: every trial weighs the same;
- avg@n = mean over tasks of c/n: every task weighs the same;
- pass@k = mean of 1 − C(n−c, k)/C(n, k): at least one of k succeeds (Codex, arXiv:2107.03374, equation 1);
- pass^k = mean of C(c, k)/C(n, k): all of k succeed (τ-bench, arXiv:2406.12045, section 3).

Promises:
- an episode that broke is not a trial: it is counted beside the scores and changes none of them (law 6);
- a task with fewer than k trials says nothing about k: it is left out of it, and how many tasks remained is told;
- intervals depend on the seed and the trials alone, not on their order. Those of the bootstrap resample tasks, since
  trials of one task are alike; they are too sure of themselves where every task scores the same, at 0 and 1 above all.
  Wilson's is honest there, and takes all trials for independent.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import sqrt
from statistics import NormalDist
from typing import Any, TypeAlias

import numpy as np

from troupe.protocol.errors import ConfigError

Array: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
Counts: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]

LEVEL = 0.95
"""Confidence of every interval."""

RESAMPLES = 10_000
"""Of a bootstrap."""


@dataclass(frozen=True, slots=True)
class Tally:
    """Trials by task, in order of the tasks' names.

    tasks: names. trials, successes, broken: of each task, [tasks]; a broken episode is in `broken` only.
    """

    tasks: list[str]
    trials: Counts
    successes: Counts
    broken: Counts


@dataclass(frozen=True, slots=True)
class Estimate:
    """A score from 0 to 1 and its 95 % interval, None where there was nothing to estimate it from. tasks: that it rests on."""

    value: float | None
    low: float | None
    high: float | None
    tasks: int


@dataclass(frozen=True, slots=True)
class Scores:
    """What trials say together. success: with a bootstrap interval; wilson: another one of the same rate.

    trials, broken: counts. pass_at, pass_hat: by k.
    """

    success: Estimate
    wilson: tuple[float, float]
    avg: Estimate
    pass_at: dict[int, Estimate]
    pass_hat: dict[int, Estimate]
    trials: int
    broken: int


def tally(outcomes: Iterable[tuple[str, bool | None]]) -> Tally:
    """Groups (task, success) by task. success: None for an episode that broke, which is no trial."""
    seen: dict[str, list[int]] = {}  # of each task: failures, successes, broken
    for task, success in outcomes:
        seen.setdefault(task, [0, 0, 0])[2 if success is None else int(success)] += 1
    tasks = sorted(seen)
    failures, successes, broken = np.array([seen[task] for task in tasks], np.int64).reshape(-1, 3).T
    return Tally(tasks, failures + successes, successes, broken)


def pass_at_k(trials: Counts, successes: Counts, k: int) -> Array:
    """1 − C(n−c, k)/C(n, k) of each task [tasks]; NaN where n < k. n = 8, c = 4, k = 2 gives .7857.

    Raises ConfigError for k < 1.
    """
    return 1.0 - _all_of_k(trials, trials - successes, k)


def pass_hat_k(trials: Counts, successes: Counts, k: int) -> Array:
    """C(c, k)/C(n, k) of each task [tasks]; NaN where n < k. n = 8, c = 4, k = 2 gives .2143.

    Raises ConfigError for k < 1.
    """
    return _all_of_k(trials, successes, k)


def bootstrap(values: Array, weights: Array | None = None, *, seed: int, resamples: int = RESAMPLES) -> tuple[float, float]:
    """95 % percentile interval of Σ w·v / Σ w over tasks drawn with replacement (Efron 1979).

    values [tasks], at least one; weights [tasks], all above 0: equal if not given.
    """
    weights = np.ones(len(values)) if weights is None else weights
    rng = np.random.default_rng([seed, len(values)])
    means = np.empty(resamples)
    for i in range(resamples):  # one at a time: memory does not grow with the tasks
        drawn = rng.integers(len(values), size=len(values))
        means[i] = (values[drawn] * weights[drawn]).sum() / weights[drawn].sum()
    low, high = np.quantile(means, [(1 - LEVEL) / 2, (1 + LEVEL) / 2])
    return float(low), float(high)


def wilson(successes: int, trials: int) -> tuple[float, float]:
    """95 % score interval of a rate (Wilson 1927); without trials all of 0 to 1."""
    z = NormalDist().inv_cdf((1 + LEVEL) / 2)
    centre = (successes + z * z / 2) / (trials + z * z)
    half = z / (trials + z * z) * sqrt(successes * (trials - successes) / max(1, trials) + z * z / 4)
    # exactly 0 and 1 at the ends, where rounding would leave a residue
    return centre - half if successes else 0.0, centre + half if successes < trials else 1.0


def estimate(values: Array, weights: Array | None = None, *, seed: int) -> Estimate:
    """Mean of `values` [tasks], weighted if `weights` [tasks] are given, over those that are not NaN."""
    known = ~np.isnan(values)
    if not known.any():
        return Estimate(None, None, None, 0)
    values = values[known]
    weights = np.ones(len(values)) if weights is None else weights[known]
    low, high = bootstrap(values, weights, seed=seed)
    return Estimate(float((values * weights).sum() / weights.sum()), low, high, len(values))


def evaluate(outcomes: Iterable[tuple[str, bool | None]], ks: Sequence[int] = (), *, seed: int = 0) -> Scores:
    """All scores of (task, success or None if it broke), with pass@k and pass^k for each k. Raises ConfigError for k < 1."""
    by_task = tally(outcomes)
    n, c = by_task.trials, by_task.successes
    rates = pass_hat_k(n, c, 1)  # c/n
    return Scores(
        success=estimate(rates, n.astype(np.float64), seed=seed),
        wilson=wilson(int(c.sum()), int(n.sum())),
        avg=estimate(rates, seed=seed),
        pass_at={k: estimate(pass_at_k(n, c, k), seed=seed) for k in ks},
        pass_hat={k: estimate(pass_hat_k(n, c, k), seed=seed) for k in ks},
        trials=int(n.sum()),
        broken=int(by_task.broken.sum()),
    )


def _all_of_k(trials: Counts, marked: Counts, k: int) -> Array:
    """Chance that k of the trials, drawn without replacement, are all marked: C(m, k)/C(n, k), as a product."""
    if k < 1:
        raise ConfigError(f"pass@k and pass^k with k = {k}: k is the number of tries, 1 or more")
    chance = np.where(trials < k, np.nan, 1.0)
    for i in range(k):
        chance *= np.maximum(marked - i, 0) / np.maximum(trials - i, 1)
    return chance
