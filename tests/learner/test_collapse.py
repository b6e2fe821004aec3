"""A real run that collapsed, replayed: recipes/bandit_collapse.toml, seed 0, as bench/collapse.py recorded it. It is the one
of three seeds whose loss was told in time; docs/health.md has the others."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

from troupe.learner.health import fresh

ROWS = [json.loads(line) for line in (Path(__file__).parent / "data" / "bandit_collapse-0.jsonl").read_text().splitlines()]
WINDOW = 5


def lost() -> int:
    """The first step from which on the mean success of five steps stays below half of its best so far for twenty steps."""
    means = np.convolve([row["success"] for row in ROWS], np.ones(WINDOW) / WINDOW, "valid")
    below = means < np.maximum.accumulate(means) / 2
    first = next(n for n in range(len(below)) if below[n : n + 20].all())
    return int(ROWS[first + WINDOW - 1]["step"])


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
