"""Health of a training run: what each batch shows (`signals`), what the history warns of (`alarms`, `fresh`), and which
settings that suggests (`REMEDIES`). Pure functions of plain data, without torch; see docs/health.md.
"""

from __future__ import annotations

from troupe.learner.health.detectors import DETECTORS, Alarm, alarms, fresh
from troupe.learner.health.remedies import REMEDIES, Kind, Remedy, choose, in_force
from troupe.learner.health.settings import Action, HealthConfig
from troupe.learner.health.signals import signals

__all__ = [
    "DETECTORS",
    "REMEDIES",
    "Action",
    "Alarm",
    "HealthConfig",
    "Kind",
    "Remedy",
    "alarms",
    "choose",
    "fresh",
    "in_force",
    "signals",
]
