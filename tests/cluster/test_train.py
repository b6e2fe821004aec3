"""One real run, from the recipe to the summary: real Ray, a real policy, real kills."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import troupe
from tests.actors.test_timeline import check
from troupe.learner.train import app as alone
from troupe.protocol.trajectory import POLICY

pytestmark = pytest.mark.xdist_group("ray")

ROOT = Path(__file__).resolve().parents[2]
# As a person's shell has it: without what this test process's own Ray sessions have set.
ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "TMPDIR"))}
SMALL = {
    "cold_start.steps": 6,
    "cold_start.demonstrations": 64,
    "cold_start.batch": 8,
    "rollout.groups_per_step": 2,
    "rollout.group_size": 4,
    "eval.tasks": 8,
    "checkpoint_every": 2,
    "env.slots": 8,
}


def start(*arguments: str, **changes: Any) -> subprocess.Popen[str]:
    settings = [f"--set={key}={json.dumps(value)}" for key, value in {**SMALL, **changes}.items()]
    command = [sys.executable, "-m", "troupe", "train", *arguments, *settings]
    return subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def finish(process: subprocess.Popen[str]) -> str:
    try:
        output, _ = process.communicate(timeout=240)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)
    assert process.returncode == 0, output
    return output


def journal(run: Path) -> list[dict[str, Any]]:
    file = run / "journal.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [json.loads(line) for line in lines if line.endswith("}")]


def await_event(run: Path, process: subprocess.Popen[str], *, limit_s: float = 240, **wanted: Any) -> dict[str, Any]:
    deadline = time.monotonic() + limit_s
    while time.monotonic() < deadline and process.poll() is None:
        for row in journal(run):
            if all(row.get(key) == value for key, value in wanted.items()):
                return row
        time.sleep(0.1)
    raise AssertionError(f"{wanted} did not happen: {process.communicate()[0] if process.poll() is not None else ''}")


def temporary_folders(launcher: int) -> list[str]:
    return [name for name in os.listdir("/tmp") if name.startswith(f"troupe-ray-{launcher}-")]


def living(pids: list[int]) -> list[int]:
    return [pid for pid in pids if os.path.exists(f"/proc/{pid}") and "Z" not in Path(f"/proc/{pid}/status").read_text()[:60]]


def test_a_run_survives_kills_and_its_folder_keeps_the_contract(tmp_path: Path) -> None:
    run = tmp_path / "run"
    # On-policy, so that the engine's logprobs must be those of the learner.
    process = start("recipes/frozen_lake.toml", "--run-dir", str(run), "--steps", "6", **{"rollout.max_staleness": 0})
    pids = {name: await_event(run, process, event="started", actor=name)["pid"] for name in ("env-0", "generator-0")}
    await_event(run, process, event="announced", version=1)
    os.kill(pids["env-0"], signal.SIGKILL)
    await_event(run, process, event="announced", version=3)
    os.kill(pids["generator-0"], signal.SIGKILL)
    output = finish(process)

    assert "env-0 died" in output and "generator-0 died" in output and "Held-out success" in output
    summary = json.loads((run / "summary.json").read_text())
    assert summary["finished"] and summary["steps"] == 6
    assert summary["restarts"] == {"env-0": 1, "generator-0": 1}
    assert summary["tokens_generated"] >= summary["tokens_trained"] > 0
    assert summary["episodes"] >= 6 * 8 + 16 and summary["episodes_failed"] == 0
    assert {"first", "last"} <= summary["eval"].keys() and summary["eval"]["last"]["trials"] == 8
    assert {"first", "last"} <= summary["reward"].keys()
    assert summary["weights"]["version"] == 6 and len(summary["weights"]["checksum"]) == 16
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in metrics] == [1, 2, 3, 4, 5, 6]
    assert all({"reward_mean", "reward_std", "entropy", "tokens_per_s", "actors_alive", "kl"} <= row.keys() for row in metrics)
    assert sorted(p.name for p in (run / "checkpoints").iterdir()) == ["step-0", "step-2", "step-4", "step-6"]
    assert list((run / "tensorboard").iterdir())

    events = json.loads((run / "timeline.json").read_text())
    check(events)
    seen = {event["name"] for event in events}
    assert {"sampling", "load weights", "episode", "commit", "train", "forward-backward", "optimiser", "sync weights"} <= seen
    assert sum(summary["time"]["shares"].values()) == pytest.approx(1.0)
    assert 0 < summary["time"]["generator_busy"] <= 1 and 0 < summary["time"]["learner_busy"] <= 1
    assert all({"waited_s", "training_s", "sync_s"} <= row.keys() for row in metrics)
    shares = {"generator_busy", "learner_busy", "overlap"}  # those of a dead actor are left out
    assert shares <= {name for row in metrics for name in row}
    assert "the run waited" in output and "An episode took" in output

    opened = troupe.open(str(run))
    rows = opened.query("SELECT kind, count(*) AS n, count(DISTINCT id) AS d FROM trajectories GROUP BY kind ORDER BY kind")
    assert rows.to_pylist() == [{"kind": "eval", "n": 16, "d": 16}, {"kind": "train", "n": 48, "d": 48}]
    gaps = [row["lp_gap_max"] for row in metrics]
    assert max(gaps) < 1e-3, "the engine's logprobs are not those of the weights it names"
    spoken = opened.query("SELECT provenance, logprobs FROM nodes WHERE role = 'assistant'").to_pylist()
    assert spoken and all(list(n["provenance"]).count(POLICY) == len(n["logprobs"]) for n in spoken)
    assert not temporary_folders(process.pid)
    assert not living([row["pid"] for row in journal(run) if row["event"] == "started"])


def test_ctrl_c_leaves_nothing_but_a_folder_that_resumes(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start("recipes/frozen_lake.toml", "--run-dir", str(run), "--steps", "5")
    await_event(run, process, event="announced", version=3)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=90)
    assert process.returncode == 130 and f"--resume {run}" in output and "Traceback" not in output
    assert not temporary_folders(process.pid)
    assert not living([row["pid"] for row in journal(run) if row["event"] == "started"])

    resumed = start("--resume", str(run))
    finish(resumed)
    again = start("--resume", str(run))
    output, _ = again.communicate(timeout=60)
    assert again.returncode == 2 and "is finished, at step 5" in output
    summary = json.loads((run / "summary.json").read_text())
    assert summary["finished"] and summary["weights"]["version"] == 5
    metrics = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert metrics == [1, 2, 3, 4, 5]
    assert troupe.open(str(run)).query("SELECT count(*) c FROM trajectories WHERE trains").to_pylist() == [{"c": 40}]

    replayed = CliRunner().invoke(alone, ["--run", str(run), "--from", str(run / "checkpoints" / "step-0")])
    assert replayed.exit_code == 0, replayed.output
    assert replayed.stdout.count("weights equal to the run's, to the byte") == 5


def test_pools_and_generators_are_scaled_while_the_run_goes_on(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start("recipes/frozen_lake.toml", "--run-dir", str(run), "--steps", "500")
    try:
        await_event(run, process, event="announced", version=1)

        def scale(*flags: str) -> str:
            command = [sys.executable, "-m", "troupe", "scale", str(run), *flags]
            done = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=120)
            assert done.returncode == 0, done.stderr
            return done.stdout

        three = scale("--pools", "3")
        assert three.startswith("pools 2 → 3\n") and "env-2" in three and "generator-1" in scale("--generators", "2")
        assert {"env-2", "generator-1"} <= {row["actor"] for row in journal(run) if row["event"] == "started"}
        assert "env-1" not in scale("--pools", "1")
        scaled = [(row["pools"], row["why"]) for row in journal(run) if row["event"] == "scale" and "pools" in row]
        assert scaled == [([2, 3], "asked for by hand"), ([3, 1], "asked for by hand")]
        gone = {row["actor"]: row["finished"] for row in journal(run) if row["event"] == "retired"}
        assert gone == {"env-1": True, "env-2": True}
    finally:
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=90)
    assert process.returncode == 130, output
    command = [sys.executable, "-m", "troupe", "scale", str(run), "--pools", "2"]
    refused = subprocess.run(command, env=ENVIRONMENT, capture_output=True, text=True, timeout=60)
    assert refused.returncode == 2 and "is not running" in refused.stderr


def test_a_gpu_that_is_not_there_is_one_line_and_leaves_no_folder(tmp_path: Path) -> None:
    run = tmp_path / "run"
    process = start("recipes/frozen_lake.toml", "--run-dir", str(run), "--set", "learner.device=cuda")
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 2 and "this Ray cluster has 0" in output and "Traceback" not in output
    assert not run.exists()
