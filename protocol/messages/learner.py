"""What is said to the learner (`actors/learner.py`): batches in, weights and checkpoints out."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from troupe.protocol.messages.common import CONFIG
from troupe.protocol.messages.env_pool import Demonstrations
from troupe.protocol.messages.generator import Weights
from troupe.protocol.messages.store import Batch


@dataclass(slots=True)
class ColdStart:
    """Supervised steps on demonstrations before reinforcement learning."""

    __pydantic_config__ = CONFIG
    demonstrations: Demonstrations
    steps: int
    batch: int


@dataclass(slots=True)
class Train:
    """One training step on `batch`; produces version `batch.step`.

    settings: keys of [learner] that a remedy has changed, with their values in this step. restart: the step begins with the
    weights and the optimiser of the checkpoint of that step, instead of the learner's own.
    """

    __pydantic_config__ = CONFIG
    batch: Batch
    settings: dict[str, Any] = field(default_factory=dict)
    restart: int | None = None


@dataclass(slots=True)
class Trained:
    """The learner's step is done: the new weights and what was measured on the way (field's usual names)."""

    __pydantic_config__ = CONFIG
    step: int
    weights: Weights
    metrics: dict[str, float]


@dataclass(slots=True)
class GetWeights:
    """The newest weights, for a generator that joins late."""

    __pydantic_config__ = CONFIG


@dataclass(slots=True)
class SaveCheckpoint:
    """Write a complete checkpoint of the current step, or none."""

    __pydantic_config__ = CONFIG


@dataclass(slots=True)
class Saved:
    """Where the checkpoint lies."""

    __pydantic_config__ = CONFIG
    step: int
    path: str


@dataclass(slots=True)
class LearnerStatus:
    """`step` 0 and `started` False: nothing learned yet, not even the cold start."""

    __pydantic_config__ = CONFIG
    step: int
    started: bool
    progress: float = 0.0
    detail: dict[str, float] = field(default_factory=dict)
