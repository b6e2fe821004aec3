"""`troupe bench env`: real pools, figures that add up, and failures that are counted and told."""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from troupe.cluster import bench_env
from troupe.protocol.latency import Histogram


def pool(name: str, steps: list[float]) -> bench_env.Pool:
    histogram = Histogram()
    for seconds in steps:
        histogram.record(seconds)
    return bench_env.Pool(name, 5, 1, len(steps), 0, 2.0, {"shop": {"step": histogram}})


def test_the_tables_and_the_json_hold_each_pool_and_the_whole() -> None:
    reasons = Counter({"Shop.step raised OSError: 1": 2, "b": 1, "c": 1, "d": 1})
    report = bench_env.Report("shop", 8, 12, 2.5, [pool("env-0", [0.001] * 10), pool("env-1", [0.1] * 10)], reasons)
    found = bench_env.plain(report)
    assert [one["steps"] for one in found["pools"]] == [10, 10] and found["total"]["steps_per_s"] == 20 / 2.5
    assert found["total"]["latency"]["step"]["count"] == 20 and found["total"]["latency"]["step"]["max_s"] == 0.1
    assert found["pools"][0]["latency"]["step"]["p99_s"] == pytest.approx(0.001, rel=0.06)
    shown = bench_env.rendered(report)
    assert "shop: 10 episodes in 2.5 s, 2 pools of 8 slots" in shown and "2 episodes were not played" in shown
    assert "2 × Shop.step raised OSError: 1" in shown and "… and 1 other reasons" in shown
    rows = [line.split() for line in shown.splitlines()]
    assert ["env-1", "5", "1", "10", "0", "5.0", "2.5"] in rows and ["total", "10", "2", "20", "0", "8.0", "4.0"] in rows
    assert "100 ms" in shown


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_a_world_with_and_without_a_player_is_measured_in_real_pools(tmp_path: Path) -> None:
    (tmp_path / "dull.py").write_text(
        "from troupe.envs import TextWorld, Turn\n\n\nclass Dull(TextWorld):\n    max_turns = 2\n\n"
        "    def reset(self, task):\n        self.seed = task.seed\n        return 'say something'\n\n"
        "    def step(self, text):\n        if self.seed == 3:\n            raise OSError('no disk')\n"
        "        return Turn('on')\n"
    )

    def bench(*arguments: str) -> dict:  # type: ignore[type-arg]
        command = [sys.executable, "-m", "troupe", "bench", "env", *arguments, "--json"]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=250)
        assert done.returncode == 0, done.stderr
        return dict(json.loads(done.stdout))

    dull = bench("dull.py:Dull", "--actors", "2", "--episodes", "20", "--slots", "2")
    assert (dull["total"]["episodes"], dull["total"]["failed"], dull["total"]["steps"]) == (20, 1, 39)
    assert [len(dull["pools"]), sum(one["episodes"] for one in dull["pools"])] == [2, 20]
    assert list(dull["failures"]) == ["Dull.step (task train/3, seed 3) raised OSError: no disk"]
    assert dull["total"]["latency"]["step"]["count"] == 39 and dull["total"]["steps_per_s"] > 0
    echo = bench("echo", "--actors", "1", "--episodes", "8", "--set", "env.options.turns=3", "--set", "env.options.sleep=0.05")
    assert echo["total"]["steps"] == 24 and echo["total"]["latency"]["step"]["p50_s"] > 0.045
