"""Successes are worth more the fewer tool calls they took: OTC-PO's reward (arXiv:2504.14870).

r = α · r_tool(m, n) · r_correct, with m the calls of a trajectory and n the fewest calls among the successes of its group,
the paper's OTC-GRPO:

    r_tool = 1                        if m = n = 0
             cos(m·π / (2m + c))      if n = 0
             sin(f(m, n)·π / 2n)      else, with f(m, n) = 2nm / (m + n)

so that the fewest calls earn the whole reward and twice as many sin(⅔·π) = .87 of it. Every call that the agent wrote counts,
also one that could not be run. Only successes are scaled, and of them only rewards above 0: a failure is worth 0 in the
paper, and a punishment must not shrink with waste. n is of the group that is trained on; the paper also remembers it from
epoch to epoch.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from troupe.learner.config import ToolCostSettings
from troupe.learner.success import succeeded
from troupe.protocol.trajectory import Trajectory


def scales(group: Sequence[Trajectory], rewards: Sequence[float], settings: ToolCostSettings) -> list[float]:
    """What `rewards` [n], of the trajectories of a group, are multiplied with; 1 for failures and where nothing is above 0."""
    calls = [sum(len(step.calls) for step in trajectory.steps) for trajectory in group]
    solved = [succeeded(t) for t in group]
    fewest = min((m for m, won in zip(calls, solved, strict=True) if won), default=0)
    return [
        settings.scale * efficiency(m, fewest, settings.smooth) if won and reward > 0 else 1.0
        for m, won, reward in zip(calls, solved, rewards, strict=True)
    ]


def efficiency(m: int, n: int, smooth: float) -> float:
    """r_tool(m, n), 0 to 1: m calls where n would do, c = `smooth`."""
    if m == n:
        return 1.0  # exactly, where sin would leave a residue
    if n == 0:
        return math.cos(m * math.pi / (2 * m + smooth))
    return math.sin(m * math.pi / (m + n))
