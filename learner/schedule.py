"""The learning rate over training steps: a linear rise, then a fall to a floor or none."""

from __future__ import annotations

import math

from troupe.learner.config import LearnerConfig

FLOOR = 0.05
"""Share of the peak rate at which a fall ends."""


def learning_rate(config: LearnerConfig, step: int) -> float:
    """Of the step after `step`: rises to lr over `warmup_steps`, then falls over `decay_steps`: a line or half a cosine."""
    rise = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    gone = min(1.0, max(0, step - config.warmup_steps) / config.decay_steps) if config.decay_steps else 0.0
    left = 1.0 - gone if config.schedule == "linear" else (1.0 + math.cos(math.pi * gone)) / 2
    return config.lr * rise * (FLOOR + (1 - FLOOR) * left)


def cold_start_rate(config: LearnerConfig, step: int, steps: int) -> float:
    """Of the cold start's step after `step` of `steps`: rises over `cold_start_warmup`, then falls to a tenth as a cosine."""
    warmup = config.cold_start_warmup
    rise = min(1.0, (step + 1) / warmup) if warmup else 1.0
    gone = max(0, step - warmup) / max(1, steps - warmup)
    return config.cold_start_lr * rise * (0.1 + 0.45 * (1 + math.cos(math.pi * gone)))
