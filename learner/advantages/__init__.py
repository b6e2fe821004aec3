"""Advantage estimators: functions of a group, one small file each. Registered with `@advantage("name")`.

An estimator gets a `Group` and returns one entry per trajectory, in order: a number (for all of its policy tokens) or
an array of one number per policy token, in the order of the trajectory's nodes. Arithmetic is float64. What it can be
set to is in `group.config`. What it needs beside rewards it says when it is registered.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, TypeAlias

import numpy as np

from troupe.learner.config import LearnerConfig
from troupe.learner.plugins import Registry
from troupe.learner.rewards import Array as Array  # estimators find it here
from troupe.learner.rewards import Indices, at_tokens, scales_of, turn_rewards, turns_of
from troupe.protocol.trajectory import Step, Trajectory

EPSILON = 1e-6
"""Added to the standard deviation that a group is divided by."""

Need = Literal["values", "old", "teacher"]
"""values: of a critic, before each token. old: the learner's own logprobs. teacher: those of a teacher."""


@dataclass(slots=True)
class Group:
    """Trajectories of one task and seed. returns: what each earned, shape [n].

    Lists of one array [policy tokens, in node order] per trajectory, empty unless the estimator needs them: values, old,
    teacher. penalties: rewards of single tokens (a divergence in the reward); they are part of the returns already.
    """

    trajectories: list[Trajectory]
    returns: Array
    config: LearnerConfig = field(default_factory=LearnerConfig)
    values: list[Array] = field(default_factory=list)
    old: list[Array] = field(default_factory=list)
    teacher: list[Array] = field(default_factory=list)
    penalties: list[Array] = field(default_factory=list)
    _scales: list[float] = field(init=False)

    def __post_init__(self) -> None:
        self._scales = scales_of(self.trajectories, self.config)

    @property
    def steps(self) -> list[list[Step]]:
        """The steps of each trajectory."""
        return [trajectory.steps for trajectory in self.trajectories]

    @property
    def informative(self) -> bool:
        """Whether there is anything to compare: at least two trajectories, and not all returns exactly equal."""
        return len(self.returns) > 1 and bool((self.returns != self.returns[0]).any())

    def turns(self, i: int) -> Indices:
        """Turn of each policy token of trajectory `i`."""
        return turns_of(self.trajectories[i])

    def paid_turns(self, i: int) -> Array:
        """Rewards [turns] of trajectory `i`, without its tokens' penalties."""
        return turn_rewards(self.trajectories[i], self.config, self._scales[i])

    def turn_rewards(self, i: int) -> Array:
        """Rewards [turns] of trajectory `i`, with its tokens' penalties added to their turns."""
        rewards = self.paid_turns(i)
        if self.penalties:
            np.add.at(rewards, self.turns(i), self.penalties[i])
        return rewards

    def token_rewards(self, i: int) -> Array:
        """Rewards [policy tokens] of trajectory `i`: each turn's at its last token."""
        paid = at_tokens(self.paid_turns(i), self.turns(i))
        return paid + self.penalties[i] if self.penalties else paid


Estimator: TypeAlias = Callable[[Group], Sequence[Any] | Array]


@dataclass(frozen=True, slots=True)
class Traits:
    """What was said of an estimator. whiten: over the batch, unless the configuration says otherwise. compares: with the
    others of the group, so that a group of one teaches nothing."""

    whiten: bool = False
    needs: frozenset[Need] = frozenset()
    compares: bool = False


_registry: Registry[Estimator] = Registry("advantage")
_traits: dict[Estimator, Traits] = {}


def advantage(
    name: str, *, whiten: bool = False, needs: Iterable[Need] = (), compares: bool = True
) -> Callable[[Estimator], Estimator]:
    """Registers an estimator under `name`; see `Traits`."""

    def register(function: Estimator) -> Estimator:
        _traits[function] = Traits(whiten, frozenset(needs), compares)
        return _registry.add(name, function)

    return register


def find(name: str) -> Estimator:
    """The estimator called `name` (or `module:function`, `file.py:function`). Raises ConfigError."""
    return _registry.find(name)


def traits(estimator: Estimator) -> Traits:
    """What was said of `estimator` when it was registered."""
    return _traits.get(estimator, Traits())


def compare(values: Array, sigma: Literal["none", "unbiased", "population"]) -> Array:
    """`values` [n] against their mean, divided by their deviation + 1e-6 unless `sigma` is none.

    Exactly 0 where there is nothing to compare: one value, or all equal. The float residue of x − μ must not be blown up.
    """
    if len(values) < 2 or not (values != values[0]).any():
        return np.zeros(len(values))
    centred: Array = values - values.mean()
    if sigma == "none":
        return centred
    scaled: Array = centred / (values.std(ddof=int(sigma == "unbiased")) + EPSILON)
    return scaled


from troupe.learner.advantages import (  # noqa: E402, F401  (registers them)
    aspo,
    bi_level_gae,
    distill,
    dr_grpo,
    gae,
    gigpo,
    grpo,
    grpo_loo,
    pass_at_k,
    reinforce,
    reinforce_pp,
    rloo,
    starpo,
    treepo,
    turn_level,
)
