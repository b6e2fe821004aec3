"""A run whose learner has two ranks: it trains, survives the death of one of them, and leaves no process."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.cluster.test_train import await_event, finish, journal, living, start

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.slow]


def ranks_of(learner: int) -> list[int]:
    found = []
    for pid in filter(str.isdigit, os.listdir("/proc")):
        try:
            parent = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
            ranked = b"troupe.learner.ranked" in Path(f"/proc/{pid}/cmdline").read_bytes()
        except OSError:
            continue
        if parent == learner and ranked:
            found.append(int(pid))
    return found


def test_a_run_survives_the_death_of_a_rank(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start("recipes/frozen_lake.toml", "--run-dir", str(run), "--steps", "5", **{"learner.ranks": 2})
    learner = await_event(run, process, event="started", actor="learner")["pid"]
    await_event(run, process, event="announced", version=3)
    ranks = ranks_of(learner)
    assert len(ranks) == 2
    os.kill(ranks[0], signal.SIGKILL)
    output = finish(process)
    assert "learner died" in output and "of the learner" in output and "SIGKILL" in output
    summary = json.loads((run / "summary.json").read_text())
    assert summary["finished"] and summary["restarts"] == {"learner": 1}
    assert [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()] == [1, 2, 3, 4, 5]
    started = [row["pid"] for row in journal(run) if row["event"] == "started"]
    assert not living([*started, *ranks])
