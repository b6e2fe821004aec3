"""Policy losses: functions of per-token tensors, one small file each. Registered with `@loss("name")`.

A loss returns one value per trained token, and named per-token figures for the metrics. The trainer divides the sum by
the number of trained tokens of the whole optimiser step, whatever the layout, and applies the importance weight itself.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeAlias

import torch

from troupe.learner.config import LearnerConfig
from troupe.learner.plugins import Registry


@dataclass(slots=True)
class Tokens:
    """Trained tokens of one row, all of shape [k] and float32.

    lp: logprobs now, with gradient. old: logprobs under the weights before the training step. advantage: of each token.
    sequence: which sequence of the row each token belongs to (int64); a sequence is never split over rows.
    """

    lp: torch.Tensor
    old: torch.Tensor
    advantage: torch.Tensor
    sequence: torch.Tensor


Loss: TypeAlias = Callable[[Tokens, LearnerConfig], tuple[torch.Tensor, dict[str, torch.Tensor]]]

_registry: Registry[Loss] = Registry("loss")
_idle: set[Loss] = set()


def loss(name: str, *, idle_without_advantage: bool = False) -> Callable[[Loss], Loss]:
    """Registers a loss under `name`.

    idle_without_advantage: its gradient is zero wherever the advantage is zero. Sequences without any advantage then
    need no backward pass, which changes nothing but the time.
    """

    def register(function: Loss) -> Loss:
        if idle_without_advantage:
            _idle.add(function)
        return _registry.add(name, function)

    return register


def idle_without_advantage(function: Loss) -> bool:
    """What was promised for `function` when it was registered."""
    return function in _idle


def find(name: str) -> Loss:
    """The loss called `name` (or `module:function`, `file.py:function`). Raises ConfigError."""
    return _registry.find(name)


from troupe.learner.losses import ppo_clip  # noqa: E402, F401  (registers it)
