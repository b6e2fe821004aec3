"""Law 3 and law 9 on real Ray: a hundred `kill -9` of dispatcher, pools and generators, at random moments of real runs.

Whatever is killed, each run ends by itself, and its journal, metrics, summary and store tell the same story: every episode
once, every step its groups, nothing lost, nothing left behind. The slowest test of the project.
"""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

import troupe
from tests.cluster.test_train import ENVIRONMENT, ROOT, journal, living, temporary_folders

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.slow, pytest.mark.timeout(1500)]

KILLS, KILLS_A_RUN = 100, 50
STEPS, GROUPS, SIZE = 30, 2, 3
VICTIMS = ("dispatcher", "env-0", "env-1", "env-2", "generator-0", "generator-1")
WORLD = """
from troupe.envs.echo import Echo


class Sleepy(Echo):
    @classmethod
    def corpus(cls):
        yield "echo train heldout 0 1 2 3 4 5 6 7 8 9"
"""
RECIPE = f"""
name = "kills"
steps = {STEPS}
checkpoint_every = 10
max_restarts = 1000
[env]
name = "sleepy.py:Sleepy"
actors = 3
slots = 4
options = {{ turns = 3, sleep = 0.2 }}
[model.tiny]
hidden = 16
layers = 1
heads = 2
[rollout]
groups_per_step = {GROUPS}
group_size = {SIZE}
max_tokens = 6
max_staleness = 2
attempts = 50
oversample = 0.5
[generator]
replicas = 2
[cold_start]
steps = 0
[eval]
tasks = 4
every = 10
"""


def test_a_hundred_kills_lose_nothing_and_duplicate_nothing(tmp_path: Path) -> None:
    dice = random.Random(2026)
    recipe, world = tmp_path / "kills.toml", tmp_path / "sleepy.py"
    recipe.write_text(RECIPE.replace("sleepy.py", str(world)))
    world.write_text(WORLD)
    made = 0
    while made < KILLS:
        run = tmp_path / f"run-{made}"
        with open(tmp_path / "output", "w+") as output:
            command = [sys.executable, "-m", "troupe", "train", str(recipe), "--run-dir", str(run)]
            process = subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=output, stderr=subprocess.STDOUT)
            try:
                kills = storm(run, process, dice, min(KILLS_A_RUN, KILLS - made))
                code = process.wait(timeout=600)
            finally:
                if process.poll() is None:
                    process.send_signal(signal.SIGINT)
                    process.wait(timeout=90)
            output.seek(0)
            assert code == 0, output.read()
        made += kills.total()
        check(run, kills)
        assert not temporary_folders(process.pid)


def storm(run: Path, process: subprocess.Popen[Any], dice: random.Random, most: int) -> Counter[str]:
    """Kills random victims at random moments until the run is near its end. Returns how often it killed whom."""
    kills: Counter[str] = Counter()
    killed: set[int] = set()
    while process.poll() is None and kills.total() < most:
        time.sleep(dice.uniform(0.2, 3.2))
        rows = journal(run)
        if sum(row["event"] == "announced" for row in rows) > STEPS - 2:
            break  # what is killed now might not be missed any more
        # Only who has started has a known process: who is killed while it starts is another story (tests/laws).
        pids = {row["actor"]: row["pid"] for row in rows if row["event"] == "started"}
        alive = [name for name in VICTIMS if name in pids and pids[name] not in killed and is_of(process.pid, pids[name])]
        if alive:
            victim = dice.choice(alive)
            os.kill(pids[victim], signal.SIGKILL)
            killed.add(pids[victim])
            kills[victim] += 1
    return kills


def is_of(launcher: int, pid: int) -> bool:
    """Whether a process that lives descends from the launcher; its number may long be another's."""
    while pid > 1 and pid != launcher:
        try:
            pid = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
        except OSError:
            return False
    return pid == launcher


def await_gone(pids: list[int]) -> None:
    """On a busy machine the last ones may still be dying."""
    deadline = time.monotonic() + 30
    while left := [pid for pid in living(pids) if is_ray(pid)]:
        assert time.monotonic() < deadline, f"left behind: {left}"
        time.sleep(0.2)


def is_ray(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().startswith(b"ray::")
    except OSError:
        return False


def check(run: Path, kills: Counter[str]) -> None:
    """Journal, metrics, summary and store agree."""
    events = journal(run)
    assert Counter(row["actor"] for row in events if row["event"] == "died") == kills
    await_gone([row["pid"] for row in events if row["event"] == "started"])
    announced: dict[int, set[str]] = {}
    for row in events:
        if row["event"] == "announced":
            announced.setdefault(row["version"], set()).add(row["checksum"])
    assert sorted(announced) == list(range(STEPS + 1)) and all(len(checksums) == 1 for checksums in announced.values())

    summary = json.loads((run / "summary.json").read_text())
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert summary["finished"] and summary["steps"] == STEPS and summary["weights"]["version"] == STEPS
    assert {summary["weights"]["checksum"]} == announced[STEPS] and summary["restarts"] == dict(kills)
    assert [row["step"] for row in metrics] == list(range(1, STEPS + 1))
    assert all(row["trajectories"] == GROUPS * SIZE for row in metrics)

    columns = [
        "id",
        "attempt",
        "kind",
        "group",
        "step",
        "status",
        "reward",
        "success",
        "trains",
        "version_min",
        "policy_tokens",
    ]
    rows = troupe.open(str(run)).trajectories().select(columns).to_pylist()
    assert set(Counter(row["id"] for row in rows).values()) == {1}, "an episode is stored twice"
    ends = Counter(row["status"] for row in rows)
    counted = (summary["episodes"], summary["episodes_failed"], summary["episodes_cancelled"])
    assert counted == (len(rows), ends["failed"], ends["cancelled"])
    assert all(row["reward"] == 0.0 and row["success"] is None for row in rows if row["status"] != "completed")
    trained = [row for row in rows if row["trains"]]
    assert {row["kind"] for row in trained} == {"train"} and {row["status"] for row in trained} == {"completed"}
    groups = {(row["step"], row["group"]) for row in trained}
    assert Counter(step for step, _ in groups) == dict.fromkeys(range(1, STEPS + 1), GROUPS)
    assert set(Counter(row["group"] for row in trained).values()) == {SIZE}
    assert sum(row["policy_tokens"] for row in trained) == summary["tokens_trained"]
    assert all(0 <= row["step"] - 1 - row["version_min"] <= 2 for row in trained), "a trained token is too old"
