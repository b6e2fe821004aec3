"""Policy losses: functions of per-token tensors, one small file each. Registered with `@loss("name")`.

A loss returns one value per trained token, and named per-token figures for the metrics. The trainer makes one number of
them (`aggregate`), whatever the layout, and applies the importance weight (`correct`), divergence and entropy itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch

from troupe.learner.aggregate import Aggregate
from troupe.learner.config import LearnerConfig
from troupe.learner.plugins import Registry


@dataclass(slots=True)
class Tokens:
    """Trained tokens of one row, all of shape [k] and float32.

    lp: logprobs now, with gradient. old: logprobs under the weights before the training step (the engine's with
    ratio = "rollout"). advantage: of each token. sequence: which sequence (branch) of the row each token belongs to
    (int64); a sequence is never split over rows.
    """

    lp: torch.Tensor
    old: torch.Tensor
    advantage: torch.Tensor
    sequence: torch.Tensor

    @property
    def ratio(self) -> torch.Tensor:
        """exp(lp − old) [k], its exponent within ±20."""
        return (self.lp - self.old).clamp(-20.0, 20.0).exp()


Loss: TypeAlias = Callable[[Tokens, LearnerConfig], tuple[torch.Tensor, dict[str, torch.Tensor]]]


@dataclass(frozen=True, slots=True)
class Traits:
    """What was said of a loss.

    idle_without_advantage: its gradient is zero wherever the advantage is zero; sequences without any advantage then need
    no backward pass. aggregate: how its paper makes one number of it. ratio: it weighs by exp(lp − old), and so may be
    used for several optimiser steps on a batch.
    """

    idle_without_advantage: bool = False
    aggregate: Aggregate = "token-mean"
    ratio: bool = True


_registry: Registry[Loss] = Registry("loss")
_traits: dict[Loss, Traits] = {}


def loss(
    name: str, *, idle_without_advantage: bool = False, aggregate: Aggregate = "token-mean", ratio: bool = True
) -> Callable[[Loss], Loss]:
    """Registers a loss under `name`; see `Traits`."""

    def register(function: Loss) -> Loss:
        _traits[function] = Traits(idle_without_advantage, aggregate, ratio)
        return _registry.add(name, function)

    return register


def traits(function: Loss) -> Traits:
    """What was said of `function` when it was registered."""
    return _traits.get(function, Traits())


def find(name: str) -> Loss:
    """The loss called `name` (or `module:function`, `file.py:function`). Raises ConfigError."""
    return _registry.find(name)


from troupe.learner.losses import cispo, gspo, ppo_clip, reinforce, sapo  # noqa: E402, F401  (registers them)
