"""Advantage estimators: functions of a group, one small file each. Registered with `@advantage("name")`.

An estimator gets a `Group` and returns one entry per trajectory, in order: a number (for all of its policy tokens) or
an array of one number per policy token, in the order of the trajectory's nodes. Arithmetic is float64.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from troupe.learner.plugins import Registry
from troupe.protocol.trajectory import Step, Trajectory

Array: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]


@dataclass(slots=True)
class Group:
    """Trajectories of one task and seed. returns: their rewards, shape [n]."""

    trajectories: list[Trajectory]
    returns: Array

    @property
    def steps(self) -> list[list[Step]]:
        """The steps of each trajectory."""
        return [trajectory.steps for trajectory in self.trajectories]

    @property
    def informative(self) -> bool:
        """Whether there is anything to compare: at least two trajectories, and not all returns exactly equal."""
        return len(self.returns) > 1 and bool((self.returns != self.returns[0]).any())


Estimator: TypeAlias = Callable[[Group], Sequence[Any] | Array]

_registry: Registry[Estimator] = Registry("advantage")


def advantage(name: str) -> Callable[[Estimator], Estimator]:
    """Registers an estimator under `name`."""
    return lambda function: _registry.add(name, function)


def find(name: str) -> Estimator:
    """The estimator called `name` (or `module:function`, `file.py:function`). Raises ConfigError."""
    return _registry.find(name)


from troupe.learner.advantages import dr_grpo, grpo, rloo  # noqa: E402, F401  (registers them)
