"""What is said to the evaluator (`actors/evaluator.py`)."""

from __future__ import annotations

from dataclasses import dataclass

from troupe.protocol.messages.common import CONFIG, Sampling


@dataclass(slots=True)
class EvaluateVersion:
    """Ask the evaluator for the held-out score of `version`."""

    __pydantic_config__ = CONFIG
    version: int


@dataclass(slots=True)
class Evaluation:
    """Held-out score. `low`, `high`: 95 % Wilson interval of the success rate. None where no episode could be scored."""

    __pydantic_config__ = CONFIG
    version: int
    success: float | None
    low: float | None
    high: float | None
    reward: float | None
    turns: float
    trials: int
    failed: int
    sampling: Sampling
    seconds: float = 0.0
