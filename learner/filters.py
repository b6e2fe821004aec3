"""Which groups train: functions of all groups' rewards, as the world gave them. Registered with `@group_filter("name")`.

A filter gets the rewards of each group, [n] each, and `filter_value`; it returns one bool per group. Groups are kept or
dropped whole, so who is compared with whom never changes. Equal scores are kept in the order of the groups.

Those by deviation (StarPO-S and RAGEN, arXiv:2504.20073, section 4.1) score a group by the unbiased σ of its rewards.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from troupe.learner.plugins import Registry
from troupe.learner.rewards import Array

Filter: TypeAlias = Callable[[Sequence[Array], float], Sequence[bool]]

_registry: Registry[Filter] = Registry("filter")


def group_filter(name: str) -> Callable[[Filter], Filter]:
    """Registers a filter under `name`."""
    return lambda function: _registry.add(name, function)


def find(name: str) -> Filter:
    """The filter called `name` (or `module:function`, `file.py:function`). Raises ConfigError."""
    return _registry.find(name)


@group_filter("all")
def all_groups(rewards: Sequence[Array], value: float) -> list[bool]:
    """Every group."""
    return [True] * len(rewards)


@group_filter("informative")
def informative(rewards: Sequence[Array], value: float) -> list[bool]:
    """Groups whose rewards are not all equal (DAPO's dynamic sampling, arXiv:2503.14476, section 3.2)."""
    return [bool((group != group[0]).any()) for group in rewards]


@group_filter("top_std")
def top_std(rewards: Sequence[Array], value: float) -> list[bool]:
    """The share `value` of the groups with the highest deviation, at least one (StarPO-S: 0.25)."""
    return _best(_deviations(rewards), math.ceil(round(value * len(rewards), 9)))


@group_filter("top_k")
def top_k(rewards: Sequence[Array], value: float) -> list[bool]:
    """The `value` groups with the highest deviation."""
    return _best(_deviations(rewards), max(1, int(value)))


@group_filter("top_p")
def top_p(rewards: Sequence[Array], value: float) -> list[bool]:
    """The fewest groups whose deviations make up the share `value` of the sum of all."""
    scores = _deviations(rewards)
    total = scores.sum()
    return _nucleus(scores / total, value) if total else [False] * len(scores)


@group_filter("softmax_top_p")
def softmax_top_p(rewards: Sequence[Array], value: float) -> list[bool]:
    """The fewest groups that reach probability `value` under the softmax of the deviations."""
    scores = _deviations(rewards)
    p = np.exp(scores - scores.max())
    return _nucleus(p / p.sum(), value)


@group_filter("min_p")
def min_p(rewards: Sequence[Array], value: float) -> list[bool]:
    """Groups whose deviation is at least `value` times the highest; none if that is 0."""
    scores = _deviations(rewards)
    return [bool(score > 0 and score >= value * scores.max()) for score in scores]


def _deviations(rewards: Sequence[Array]) -> Array:
    # all-equal rewards may have a residue for a deviation, which must not win over another group's
    return np.array([g.std(ddof=1) if len(g) > 1 and (g != g[0]).any() else 0.0 for g in rewards])


def _best(scores: Array, count: int) -> list[bool]:
    chosen = set(np.argsort(-scores, kind="stable")[:count].tolist())
    return [i in chosen for i in range(len(scores))]


def _nucleus(p: Array, mass: float) -> list[bool]:
    """The likeliest until those before reach `mass`."""
    order = np.argsort(-p, kind="stable")
    before = np.cumsum(p[order]) - p[order]
    return _best(p, max(1, int((before < mass - 1e-12).sum())))
