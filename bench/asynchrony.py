"""What asynchrony gains where the world is slow now and then, and what it costs: `mode = "async"` beside `mode = "sync"`.

    python bench/asynchrony.py [--quick] [--seeds 0,1,2] [--steps N] [--max-staleness N] [--folder FOLDER]

One JSON line a case: {"name", "value", "unit", "compared_with", "context"}. Both sides are `troupe train` on real Ray with the
same recipe but for `rollout.mode` and `rollout.max_staleness`: the same model, cold start, tasks, seconds that the world
sleeps, number of steps, and groups and episodes in each step, which is checked in what they stored. sync is
`max_staleness = 0`: nothing of a step starts before the weights of the step before are in use.

async_speedup_longtail: seconds of sync / seconds of async, from the announcement of version 0 to the figures of the last step;
the mean over the seeds. The world is a two-armed bandit whose steps sleep: lognormal, so that most are short and a few are
long, and the same for all members of a group. Sync waits for the slowest group of every step. Held-out episodes and
demonstrations do not sleep.
async_success_gap: success of the last weights on held-out tasks, async − sync, the mean over the seeds; `noise` in its context
is twice the standard error of that difference.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from pathlib import Path
from typing import Any, ClassVar

import typer

from troupe.actors import journal
from troupe.envs.bandit import BOLD, CALM, Bandit
from troupe.envs.base import Task, Turn
from troupe.protocol import stored

TURNS = 3
SLOW = {"median": 0.4, "sigma": 1.2, "longest": 8.0}
"""Seconds of a step of the world."""

RECIPE = """
seed = {seed}
steps = {steps}
checkpoint_every = 1000

[env]
name = "{file}:LongTail"
actors = 1
slots = 128                      # room for all that async may have under way; sync uses what it can
max_turns = {turns}
options = {{ chance = 1.0, turns = {turns}, muse = 0.0, median = {median}, sigma = {sigma}, longest = {longest} }}

[model.tiny]
hidden = 64
layers = 2

[cold_start]
steps = 60
batch = 32
demonstrations = 512
noise = 1.0                      # the player shows how to speak, and pulls either arm

[rollout]
groups_per_step = 8
group_size = 4
mode = "{mode}"
max_staleness = {max_staleness}
max_tokens = 8

[learner]
lr = 1e-3
cold_start_lr = 3e-3

[eval]
tasks = 100
"""


class LongTail(Bandit):
    """Its arms always have the same two names: which of them pays more is all that can be learnt.

    Options beside the bandit's: median, sigma, longest: of the seconds that a step sleeps, which are lognormal.

    They belong to the task, so that both sides and all members of a group wait for the same."""

    name: ClassVar[str] = "long_tail"
    inline: ClassVar[bool] = False

    def __init__(self, median: float = 0.4, sigma: float = 1.2, longest: float = 8.0, **bandit: Any) -> None:
        super().__init__(**bandit)
        self.median, self.sigma, self.longest = median, sigma, longest

    def reset(self, task: Task) -> str:
        super().reset(task)
        self.calm, self.bold = CALM[0], BOLD[0]
        self.arms = self.rng.sample([self.calm, self.bold], 2)
        drawn = [self.median * self.rng.lognormvariate(0.0, self.sigma) for _ in range(self.turns)]
        self.sleeps = [min(self.longest, seconds) if task.split == "train" else 0.0 for seconds in drawn]
        return self._offer

    def play(self, rng: random.Random, noise: float) -> str:
        self.sleeps = [0.0] * self.turns  # a demonstration waits for nobody
        return super().play(rng, noise)

    async def step(self, text: str) -> Turn:  # type: ignore[override]
        await asyncio.sleep(self.sleeps[len(self.pulled)])
        return super().step(text)


def main(
    quick: bool = typer.Option(False, help="small and short: shows that it works, its figures mean nothing"),
    seeds: str = typer.Option("0,1,2", help="seeds, each played by both sides"),
    max_staleness: int = typer.Option(3, min=1, help="of async"),
    steps: int = typer.Option(30, min=1, help="training steps; with few of them the policy is still rising when it is scored"),
    folder: str = typer.Option("", help="where the run folders stay; empty: they are deleted"),
) -> None:
    chosen = [int(seed) for seed in seeds.split(",")][: 1 if quick else None]
    load = round(os.getloadavg()[0], 1)
    with tempfile.TemporaryDirectory(prefix="troupe-bench-") as temporary:
        runs = Path(folder or temporary)
        runs.mkdir(parents=True, exist_ok=True)
        sides: dict[str, list[dict[str, Any]]] = {"sync": [], "async": []}
        for number, seed in enumerate(chosen):
            order = ("sync", "async") if number % 2 == 0 else ("async", "sync")  # what the machine does meanwhile hits both
            for mode in order:
                sides[mode].append(trained(runs, mode, seed, 0 if mode == "sync" else max_staleness, 3 if quick else steps))
    about = {
        "max_staleness": max_staleness,
        "steps": sides["sync"][0]["steps"],
        "episodes_a_step": sides["sync"][0]["episodes_a_step"],
        "turns": TURNS,
        "world_s": SLOW,
        "seeds": chosen,
        "cpus": os.cpu_count(),
        "load_before": load,
        "quick": quick,
    }
    ratios = [one["seconds"] / other["seconds"] for one, other in zip(sides["sync"], sides["async"], strict=True)]
    told = {"ratios": [round(ratio, 2) for ratio in ratios], **sides, **about}
    _print("async_speedup_longtail", round(statistics.mean(ratios), 2), "x", told)
    gaps = [other["success"] - one["success"] for one, other in zip(sides["sync"], sides["async"], strict=True)]
    noise = round(2 * statistics.stdev(gaps) / len(gaps) ** 0.5, 3) if len(gaps) > 1 else None
    scores: dict[str, Any] = {mode: [run["success"] for run in side] for mode, side in sides.items()}
    before = [run["success_before"] for run in sides["sync"]]
    _print(
        "async_success_gap", round(statistics.mean(gaps), 3), "success", {"noise": noise, "before": before, **scores, **about}
    )


def trained(runs: Path, mode: str, seed: int, max_staleness: int, steps: int) -> dict[str, Any]:
    """One side: a run, and what it came to."""
    name = f"{mode}-{seed}"
    recipe, run = runs / f"{name}.toml", runs / name
    about = {
        "mode": mode,
        "seed": seed,
        "max_staleness": max_staleness,
        "file": Path(__file__).resolve(),
        "turns": TURNS,
        "steps": steps,
    }
    recipe.write_text(RECIPE.format(**about, **SLOW))
    began = time.time()
    with open(runs / f"{name}.log", "wb") as log:
        command = [sys.executable, "-m", "troupe", "train", str(recipe), "--run-dir", str(run)]
        code = subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, timeout=1_800).returncode
    if code:
        raise SystemExit(f"troupe train failed:\n{(runs / f'{name}.log').read_text()[-2000:]}")
    told = measured(run)
    print(f"{name}: {told} ({time.time() - began:.0f} s with start and end)", file=sys.stderr)
    return told


def measured(run: Path) -> dict[str, Any]:
    """Seconds from version 0 to the last step's figures, success before and after, and how old the trained tokens were.
    Raises SystemExit if the steps were not all of the same number of episodes."""
    events = journal.read(str(run / "journal.jsonl"))
    rows = journal.read(str(run / "metrics.jsonl"))
    summary = json.loads((run / "summary.json").read_text())
    began = next(row["time"] for row in events if row["event"] == "announced" and row["version"] == 0)
    table = stored.committed(str(run / "trajectories"))
    trained = Counter(row["step"] for row in table.select(["step", "trains", "status"]).to_pylist() if row["trains"])
    if set(trained) != {row["step"] for row in rows} or len(set(trained.values())) != 1:
        raise SystemExit(f"{run}: the steps trained {dict(trained)} episodes: the sides cannot be compared")
    return {
        "seconds": round(rows[-1]["time"] - began, 1),
        "steps": len(rows),
        "episodes_a_step": trained[1],
        "success_before": round(summary["eval"]["first"]["success"], 3),
        "success": round(summary["eval"]["last"]["success"], 3),
        "staleness": summary["staleness"],
        "learn_s": round(statistics.mean(row["learn_s"] for row in rows), 2),
    }


def _print(name: str, value: float, unit: str, context: dict[str, Any]) -> None:
    line = {"name": name, "value": value, "unit": unit, "compared_with": "mode = 'sync', the same recipe", "context": context}
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    typer.run(main)
