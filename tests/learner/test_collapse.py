"""Two real runs, replayed: recipes/bandit_collapse.toml, seed 0, and bandit_starpo_s.toml, seed 1, as bench/collapse.py
recorded them. docs/health.md has those of the other seeds."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from troupe.learner.health import fresh

WINDOW = 5


def recorded(name: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(__file__).parent / "data" / f"{name}.jsonl").read_text().splitlines()]


def told(rows: list[dict[str, Any]]) -> list[tuple[int, Any]]:
    return [(row["step"], alarm) for n, row in enumerate(rows, 1) for alarm in fresh(rows[:n])]


def lost(rows: list[dict[str, Any]]) -> int:
    """The first step from which on the mean success of five steps stays below half of its best so far for twenty steps."""
    means = np.convolve([row["success"] for row in rows], np.ones(WINDOW) / WINDOW, "valid")
    below = means < np.maximum.accumulate(means) / 2
    first = next(n for n in range(len(below)) if below[n : n + 20].all())
    return int(rows[first + WINDOW - 1]["step"])


def test_the_variance_cliff_is_told_first_and_ten_steps_before_success_is_lost_for_good() -> None:
    rows = recorded("bandit_collapse-0")
    success = np.array([row["success"] for row in rows])
    assert np.convolve(success, np.ones(WINDOW) / WINDOW, "valid").max() > 0.85
    assert success[-10:].max() < 0.05
    step, alarm = told(rows)[0]
    assert alarm.kind == "reward_variance_cliff"
    assert step <= lost(rows) - 10


def test_a_run_that_masters_what_luck_pays_for_raises_no_alarm() -> None:
    rows = recorded("bandit_starpo_s-1")
    assert np.mean([row["success"] for row in rows[-10:]]) > 0.99
    assert rows[-1]["group_reward_std"] < 0.1 * rows[0]["group_reward_std"]  # as in a collapse
    assert told(rows) == []
