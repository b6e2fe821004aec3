"""`troupe timeline` and the lines of the terminal: only what was measured is told."""

from __future__ import annotations

import io
import json
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from tests.laws.conftest import model_folder, simulated_run
from troupe.cluster import timeline
from troupe.cluster.progress import Progress, closing
from troupe.protocol.errors import ConfigError
from troupe.protocol.messages import RunStatus

assert simulated_run and model_folder  # fixtures


def shown(folder: Path) -> str:
    console = Console(file=io.StringIO(), width=160)
    timeline.show(str(folder), console)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


def test_a_run_shows_where_its_time_went_live_and_after_its_end(simulated_run: Any) -> None:
    run = simulated_run()
    run.play(0)
    text = shown(run.folder)
    assert [line.split()[0] for line in text.splitlines()[1:5]] == ["1", "2", "3", "4"]
    assert "the run waited" in text and "An episode took" in text and str(run.folder / "timeline.json") in text
    assert "the run waited" in closing(run.summary(), "RUN", "echo") and "troupe timeline RUN" in closing(
        run.summary(), "RUN", "echo"
    )

    (run.folder / "summary.json").unlink()  # as while it runs
    assert shown(run.folder).splitlines()[:5] == text.splitlines()[:5]

    (run.folder / "metrics.jsonl").write_text(json.dumps({"step": 1, "time": 0.0}) + "\n")  # of a time before this was told
    with pytest.raises(ConfigError, match="tells nothing of its time yet"):
        shown(run.folder)


def test_the_live_panel_tells_the_time_since_the_step_before() -> None:
    metrics = {"step": 3, "reward_mean": 0.5, "interval_s": 10.0, "waited_s": 2.0, "training_s": 7.0, "sync_s": 0.5}
    episode = {f"episode_{name}_s": 0.5 for name in ("queueing", "generating", "world", "verifying", "storing")}
    status = RunStatus("training", 3, 9, 3, 0.0, metrics | {"overlap": 0.9, "episode_s": 4.0} | episode, [], {}, [], 0)
    console = Console(file=io.StringIO(), width=160)
    console.print(Progress("echo", "run", "here", console)._panel(status))
    assert isinstance(console.file, io.StringIO)
    text = console.file.getvalue()
    assert "time     batch 20% · train 70% · sync 5% of 10.0 s · learning beside sampling 90%" in text
    assert "episode  4.00 s: slot 12% · model 12% · world 12% · verifier 12% · store 12% · rest 38%" in text
    assert timeline.line({}) == timeline.episode({}) == ""
