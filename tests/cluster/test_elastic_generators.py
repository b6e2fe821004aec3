"""Generators come, go and are killed while a real run trains, and no request is lost.

A request that was lost would break its episode, so: every episode is completed at its first attempt, every step trains all
of its groups, and journal, metrics, summary and store agree (`test_kills.check`).
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from tests.cluster import test_kills as kills
from tests.cluster.test_train import ENVIRONMENT, ROOT, await_event, journal, temporary_folders

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.slow, pytest.mark.timeout(900)]


@pytest.mark.parametrize("way", ["disk", "gloo"])
def test_no_request_is_lost_when_generators_are_added_taken_away_and_killed(tmp_path: Path, way: str) -> None:
    recipe, world, run = tmp_path / "elastic.toml", tmp_path / "sleepy.py", tmp_path / "run"
    text = kills.RECIPE.replace("sleepy.py", str(world)).replace("oversample = 0.5\n", "")
    text = text.replace("replicas = 2", f'replicas = 2\ntransfer = "{way}"')
    recipe.write_text(text.replace("sleep = 0.2", "sleep = 2.0"))  # long enough for all that is done to it
    world.write_text(kills.WORLD)
    with open(tmp_path / "output", "w+") as output:
        command = [sys.executable, "-m", "troupe", "train", str(recipe), "--run-dir", str(run), "--set", "rollout.attempts=1"]
        process: Any = subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=output, stderr=subprocess.STDOUT, text=True)
        try:
            await_event(run, process, event="announced", version=1)
            assert "generators 2 → 3\n" in scale(run, 3)
            await_work(run, process, "generator-2")
            os.kill(await_event(run, process, event="started", actor="generator-2")["pid"], signal.SIGKILL)
            await_event(run, process, event="said", text="generator-2 is back")
            await_work(run, process, "generator-2")
            assert "generators 3 → 1\n" in scale(run, 1)
            assert "generators 1 → 2\n" in scale(run, 2)
            assert process.wait(timeout=400) == 0
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                process.wait(timeout=90)
        output.seek(0)
        said = output.read()
    assert process.returncode == 0, said
    kills.check(run, Counter({"generator-2": 1}))
    assert not temporary_folders(process.pid) and not (run / "weights").exists()
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["episodes_failed"], summary["episodes_retried"], summary["groups_dropped"]) == (0, 0, 0)

    rows = journal(run)
    starts = Counter(row["actor"] for row in rows if row["event"] == "started" and row["actor"].startswith("generator"))
    assert starts["generator-2"] == 2 and starts["generator-1"] == 2
    assert {row["actor"] for row in rows if row["event"] == "retired"} == {"generator-1", "generator-2"}
    workers = {name for row in rows if row["event"] == "announced" for name in row["generators"]}
    assert workers == {"generator-0", "generator-1", "generator-2"}
    assert all(row["sync_s"] > 0 and row["sync_mb"] > 0 for row in metrics(run))


def await_work(run: Path, process: Any, name: str) -> None:
    """Until a version is announced, from now on, that `name` has proved."""
    known, deadline = len(journal(run)), time.monotonic() + 240
    while not any(row["event"] == "announced" and name in row["generators"] for row in journal(run)[known:]):
        assert time.monotonic() < deadline and process.poll() is None, f"{name} takes no work"
        time.sleep(0.1)


def scale(run: Path, generators: int) -> str:
    command = [sys.executable, "-m", "troupe", "scale", str(run), "--generators", str(generators)]
    done = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def metrics(run: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
