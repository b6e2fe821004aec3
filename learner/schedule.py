"""The learning rate over training steps: a linear rise, then a fall to a floor or none."""

from __future__ import annotations

import math

from troupe.learner.config import LearnerConfig

FLOOR = 0.05
"""Share of the peak rate at which a fall ends."""


def learning_rate(config: LearnerConfig, step: int) -> float:
    """Of the step after `step`: rises over `warmup_steps`, falls over `decay_steps` in a line or as half a cosine."""
    rise = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
    if not config.decay_steps:
        fall = 1.0
    elif config.schedule == "linear":
        fall = max(FLOOR, 1.0 - step / config.decay_steps)
    else:
        fall = FLOOR + (1 - FLOOR) * (1 + math.cos(math.pi * min(1.0, step / config.decay_steps))) / 2
    return config.lr * rise * fall


def cold_start_rate(config: LearnerConfig, step: int, steps: int) -> float:
    """Of the cold start's step after `step` of `steps`: rises over `cold_start_warmup`, falls to a tenth as a cosine."""
    warmup = config.cold_start_warmup
    rise = min(1.0, (step + 1) / warmup) if warmup else 1.0
    return config.cold_start_lr * rise * (0.1 + 0.45 * (1 + math.cos(math.pi * step / steps)))
