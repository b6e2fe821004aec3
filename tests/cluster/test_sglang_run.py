"""A run whose generator samples with SGLang: its logprobs are the learner's, and a server that is killed is replaced."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path

import pytest

from tests.actors.engines.servers import SGLANG, below
from tests.cluster.test_train import await_event, journal, living, start

pytestmark = [pytest.mark.timeout(1800), pytest.mark.xdist_group("ray"), *SGLANG.marks]  # the first limit counts


@pytest.mark.parametrize("adapter", [False, True], ids=["whole", "adapter"])
def test_a_run_samples_with_sglang_and_survives_the_death_of_its_server(tmp_path: Path, adapter: bool) -> None:
    output = play(tmp_path / "run", "sglang", SGLANG.python, "sglang::scheduler", adapter)
    assert "generator-0 died" in output and "SGLang of generator-0" in output


def play(run: Path, engine: str, python: str, victim: str, adapter: bool = False) -> str:
    """Trains three steps; the server's process called `victim` is killed after the first. Returns what was said."""
    changes = {
        "generator.engine": engine,
        f"generator.{engine}_python": python,
        f"generator.{engine}_start_s": 580.0,
        "rollout.max_staleness": 0,  # so that the engine's logprobs must be those of the learner
        "eval.tasks": 2,
        **({"model.lora.rank": 4} if adapter else {}),
    }
    process = start("recipes/frozen_lake.toml", "--run-dir", str(run), "--steps", "3", **changes)
    try:
        generator = await_event(run, process, limit_s=700, event="started", actor="generator-0")["pid"]
        await_event(run, process, event="announced", version=1)
        family = below(generator)
        os.kill(next(pid for pid, command in family.items() if victim in command), signal.SIGKILL)
        output, _ = process.communicate(timeout=900)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 0, output
    summary = json.loads((run / "summary.json").read_text())
    assert summary["finished"] and summary["steps"] == 3 and summary["restarts"] == {"generator-0": 1}
    metrics = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert max(row["lp_gap_max"] for row in metrics) < 1e-3
    assert all((row["sync_mb"] < 0.5) == adapter for row in metrics)  # what came from the learner
    assert not living([*family, *(row["pid"] for row in journal(run) if row["event"] == "started")])
    return output
