"""Whether a trajectory succeeded: one answer for estimators, rewards, pairs and metrics.

Shaping has no say in it: neither weights of parts nor punishments nor a divergence taken off the reward make a success or a
failure.
"""

from __future__ import annotations

from troupe.protocol.trajectory import Trajectory


def succeeded(trajectory: Trajectory) -> bool:
    """What the world called a success, or a reward above 0 where it called nothing."""
    return bool(trajectory.reward > 0 if trajectory.success is None else trajectory.success)
