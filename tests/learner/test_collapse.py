"""A real run that collapsed, replayed: recipes/bandit_collapse.toml, seed 0, as bench/collapse.py recorded it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from troupe.learner.health import fresh

ROWS = [json.loads(line) for line in (Path(__file__).parent / "data" / "bandit_collapse-0.jsonl").read_text().splitlines()]
WINDOW = 5


def lost() -> int:
    """The step from which on the mean success of five steps stays below half of its best."""
    means = np.convolve([row["success"] for row in ROWS], np.ones(WINDOW) / WINDOW, "valid")
    return int(ROWS[int(np.flatnonzero(means >= means.max() / 2)[-1]) + WINDOW]["step"])


def test_the_run_was_good_and_lost_it_for_good() -> None:
    success = np.array([row["success"] for row in ROWS])
    assert np.convolve(success, np.ones(WINDOW) / WINDOW, "valid").max() > 0.7
    assert success[-30:].max() < 0.1


def test_the_variance_cliff_is_told_ten_steps_before_success_is_lost_and_only_once() -> None:
    told = [(row["step"], alarm) for n, row in enumerate(ROWS, 1) for alarm in fresh(ROWS[:n])]
    ((step, alarm),) = told
    assert alarm.kind == "reward_variance_cliff"
    assert step <= lost() - 10
    assert "while success is" in alarm.seen
