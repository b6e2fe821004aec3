"""Does the alarm come before the loss? Two runs of a seed on the same bandit: one that collapses, one that does not.

    python bench/collapse.py [--seeds 0 1 2 3 4] [--steps N] [--rows FOLDER] [--plot FILE.svg] [--healthy]

One JSON line a case: {"name", "value", "unit", "compared_with", "context"}.

collapse_alarm_lead_steps, for each seed: steps from the first alarm (`learner.health.fresh`, default thresholds) to the loss
of success; null if no alarm came before it, or nothing was lost. Success is the mean over `WINDOW` steps; it is lost at the
first step from which on it stays below half of its best so far for `LASTING` steps.
starpo_s_success, for each seed: the mean success over the last `LAST` steps of the twin, its loss if any, and its alarms.
misses, false_alarms: over all runs of all seeds; an alarm is a false one in a run that kept success, of either recipe: it was
not lost, and over the last `LAST` steps it is at least `KEPT` of its best. --healthy adds runs of recipes/frozen_lake.toml to
those that are looked at.

What runs is the recipe's model, world, agent loop, recorder, engine, trainer and metrics, in one process and in turn: every
batch is on-policy, as max_staleness = 0 makes it in `troupe train`, and has the same tasks and sampling seeds. There are no
actors, no store and no evaluations. With --rows the metric rows are kept, and runs that are there already are only judged.
"""

from __future__ import annotations

import argparse
import asyncio
import functools
import json
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

RECIPES = Path(__file__).parent.parent / "recipes"
WINDOW = 5
LASTING = 20
LAST = 10
KEPT = 0.75
Row = dict[str, float]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2, 3, 4])
    parser.add_argument("--steps", type=int, default=0, help="instead of the recipe's")
    parser.add_argument("--rows", type=Path, help="folder that keeps the metric rows")
    parser.add_argument("--plot", type=Path, help="an SVG of the first seed's runs")
    parser.add_argument("--healthy", action="store_true", help="count false alarms on frozen_lake.toml too")
    given = parser.parse_args()
    missed = false = healthy = lost = 0
    for seed in given.seeds:
        falls, stands = (rows_of(name, seed, given.steps, given.rows) for name in ("bandit_collapse", "bandit_starpo_s"))
        fallen, kept = judge(falls), judge(stands)
        early = fallen["lost"] is not None and bool(fallen["alarms"]) and fallen["alarms"][0][0] < fallen["lost"]
        lost += fallen["lost"] is not None
        missed += fallen["lost"] is not None and not early
        tell("collapse_alarm_lead_steps", fallen["lost"] - fallen["alarms"][0][0] if early else None, "steps", seed, fallen)
        tell("starpo_s_success", kept["last"], "share", seed, kept)
        for run in filter(healthy_one, (fallen, kept)):
            healthy, false = healthy + 1, false + len(run["alarms"])
        if given.plot and seed == given.seeds[0]:
            given.plot.write_text(plot(falls, stands, fallen), encoding="utf-8")
    if given.healthy:
        for seed in given.seeds[:2]:
            lake = judge(rows_of("frozen_lake", seed, given.steps, given.rows))
            tell("frozen_lake_success", lake["last"], "share", seed, lake)
            if healthy_one(lake):
                healthy, false = healthy + 1, false + len(lake["alarms"])
    tell("misses", missed, "runs", None, {"runs_that_lost_success": lost, "runs": len(given.seeds)})
    tell("false_alarms", false, "alarms", None, {"healthy_runs": healthy})


def tell(name: str, value: Any, unit: str, seed: int | None, about: dict[str, Any]) -> None:
    line = {"name": name, "value": value, "unit": unit, "compared_with": None, "context": {"seed": seed, **about}}
    print(json.dumps(line), flush=True)


# -- judging -----------------------------------------------------------------------------------------------------------


def judge(rows: list[Row]) -> dict[str, Any]:
    """best: the highest success over WINDOW steps. lost: the step at which success is lost, or None. last: success at the
    end. alarms: (step, kind) in order."""
    from troupe.learner.health import fresh

    success = np.array([row["success"] for row in rows])
    means = np.convolve(success, np.ones(WINDOW) / WINDOW, "valid")
    below = means < np.maximum.accumulate(means) / 2
    lost = next((n for n in range(len(below) - LASTING + 1) if below[n : n + LASTING].all()), None)
    return {
        "best": round(float(means.max()), 2),
        "lost": None if lost is None else int(rows[lost + WINDOW - 1]["step"]),
        "last": round(float(success[-LAST:].mean()), 2),
        "alarms": [(int(rows[n - 1]["step"]), a.kind) for n in range(1, len(rows) + 1) for a in fresh(rows[:n])],
    }


def healthy_one(run: dict[str, Any]) -> bool:
    """Whether a judged run kept its success to the end; then each of its alarms was a false one."""
    return run["lost"] is None and run["last"] >= KEPT * run["best"]


def rows_of(recipe: str, seed: int, steps: int, folder: Path | None) -> list[Row]:
    """The metric rows of a run: those in `folder` if they are there."""
    from troupe.cluster import config as recipes

    file = folder / f"{recipe}-{seed}.jsonl" if folder else None
    if file and file.exists():
        return [json.loads(line) for line in file.read_text(encoding="utf-8").splitlines()]
    config = recipes.read(str(RECIPES / f"{recipe}.toml"))
    began = time.time()
    with tempfile.TemporaryDirectory(prefix="troupe-bench-") as temporary:
        rows = asyncio.run(train(config, seed, steps or config.steps, temporary))
    print(f"{recipe}, seed {seed}: {len(rows)} steps in {time.time() - began:.0f} s", file=sys.stderr)
    if file:
        file.parent.mkdir(parents=True, exist_ok=True)
        kept = ({name: round(float(value), 5) for name, value in row.items()} for row in rows)
        file.write_text("".join(json.dumps(row) + "\n" for row in kept), encoding="utf-8")
    return rows


# -- a run without actors ----------------------------------------------------------------------------------------------


async def train(config: Any, seed: int, steps: int, folder: str) -> list[Row]:
    """Cold start and `steps` training steps in this process; returns what the detectors are given in a real run."""
    from troupe.actors.engines.local import LocalEngine
    from troupe.learner.health import signals
    from troupe.learner.model import load
    from troupe.learner.tiny import make_tiny
    from troupe.learner.trainer import Trainer

    stage = _Stage(config, seed, folder)
    tiny = config.model.tiny
    make_tiny(folder, stage.world.corpus(), hidden=tiny.hidden, layers=tiny.layers, heads=tiny.heads)
    stage.open()
    model = config.model_settings(folder)
    trainer = Trainer(config.learner, model, seed=seed)
    cold = config.cold_start
    tokens, supervised = await stage.demonstrations()
    trainer.cold_start(tokens, supervised, steps=cold.steps, batch=cold.batch)
    engine = LocalEngine(functools.partial(load, model, seed=seed), max_running=config.generator.max_running)
    await engine.start()
    rows: list[Row] = []
    try:
        for step in range(1, steps + 1):
            await engine.load_weights(step - 1, trainer.tensors())
            batch = await stage.batch(engine, step)
            rows.append({"step": step, **signals(batch), **trainer.train(batch)})
            if step % 25 == 0:
                print(f"  step {step}: success {rows[-1]['success']:.2f}", file=sys.stderr, flush=True)
    finally:
        await engine.close()
    return rows


class _Stage:
    """Plays episodes as an environment pool does, with the dispatcher's tasks, names and seeds."""

    def __init__(self, config: Any, seed: int, folder: str) -> None:
        from troupe.envs import registry
        from troupe.protocol.messages import Limits, Sampling

        rollout = config.rollout
        self.config, self.seed, self.folder = config, seed, folder
        self.world = registry.find(config.env.name)
        turns = config.env.max_turns or self.world.max_turns
        self._limits = Limits(max_turns=turns, max_episode_tokens=rollout.max_episode_tokens)
        self._sampling = Sampling(rollout.temperature, rollout.top_p, rollout.top_k, rollout.max_tokens)

    def open(self) -> None:
        """Loads the tokenizer that was made meanwhile."""
        from troupe.actors import loops, rendering
        from troupe.actors.settings import AgentSettings

        self._rendering = rendering.load(self.folder)
        self._loop = loops.choose(AgentSettings(), self.world)

    async def demonstrations(self) -> tuple[list[Any], list[Any]]:
        """Token ids and masks of what the scripted player shows."""
        from troupe.actors.env_pool import _Teacher
        from troupe.protocol.trajectory import samples_of

        first = self.seed * 10_000_000_000 + 9_000_000_000
        tokens, supervised = [], []
        for i in range(self.config.cold_start.demonstrations):
            if i % 32 == 0:
                rng = random.Random(self.seed * 1_000_000 + i)
            teach = functools.partial(_Teacher, world=self.world, rendering=self._rendering, rng=rng, noise=self._noise)
            recorder, _ = await self._episode(self.world.task("train", first + i), teach, f"d{i}", 0, i, 0, 0)
            for sample in samples_of(recorder.nodes):
                tokens.append(sample.tokens)
                supervised.append(sample.mask.astype(np.int32))
        return tokens, supervised

    @property
    def _noise(self) -> float:
        return float(self.config.cold_start.noise)

    async def batch(self, engine: Any, step: int) -> list[Any]:
        """The completed trajectories of a training step."""
        rollout = self.config.rollout
        groups = range(step * 10_000, step * 10_000 + rollout.groups_per_step)
        return list(await asyncio.gather(*(self._one(engine, step, g, m) for g in groups for m in range(rollout.group_size))))

    async def _one(self, engine: Any, step: int, group: int, member: int) -> Any:
        from troupe.actors.groups import seed_of
        from troupe.protocol.trajectory import Trajectory

        task = self.world.task("train", self.seed * 10_000_000_000 + group)
        name, drawn = f"t{group:09d}-{member:02d}", seed_of(self.seed, group, member)
        recorder, outcome = await self._episode(task, lambda driver: engine, name, group, member, step, drawn)
        await engine.end_session(f"{name}/0")
        sampling = {"temperature": self._sampling.temperature, "top_p": self._sampling.top_p, "top_k": self._sampling.top_k}
        return Trajectory(
            id=name,
            attempt=0,
            group=group,
            member=member,
            kind="train",
            step=step,
            task=task,
            status="completed",
            stop=outcome.stop,
            nodes=recorder.nodes,
            steps=outcome.steps,
            reward=outcome.reward,
            success=outcome.success,
            sampling=sampling,
            seed=drawn,
        )

    async def _episode(self, task: Any, speaks: Any, name: str, group: int, member: int, step: int, seed: int) -> Any:
        from troupe.actors.loops.base import Outcome, Stage
        from troupe.actors.recorder import Recorder
        from troupe.envs import registry
        from troupe.envs.drive import Driver
        from troupe.protocol.messages import RunEpisode

        driver = Driver(registry.make(self.world, self.config.env.options))
        episode = RunEpisode(name, 0, group, member, "train", step, task, self._sampling, self._limits, seed)
        recorder, outcome = Recorder(episode, self._rendering, speaks(driver)), Outcome()
        await self._loop(Stage(driver, self.world.system, task, recorder, self._limits, outcome))
        return recorder, outcome


# -- the picture -------------------------------------------------------------------------------------------------------


def plot(falls: list[Row], stands: list[Row], fallen: dict[str, Any]) -> str:
    """Four curves over steps, each of both runs, with the first alarm and the loss of the one that collapsed."""
    wide, high, left, gap = 640, 110, 120, 22
    last = max(falls[-1]["step"], stands[-1]["step"])
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" width="{left + wide + 20}" height="{4 * (high + gap) + 50}" '
        'font-family="sans-serif" font-size="12"><rect width="100%" height="100%" fill="white"/>'
    ]
    curves = {"success": "success", "group_reward_std": "group reward σ", "entropy": "entropy", "grad_norm": "grad norm"}
    for number, (name, title) in enumerate(curves.items()):
        top = 30 + number * (high + gap)
        most = max(row[name] for row in (*falls, *stands)) or 1.0
        parts.append(
            f'<text x="8" y="{top + 14}">{title}</text><text x="8" y="{top + 30}" fill="gray">0 to {most:.2g}</text>'
            f'<rect x="{left}" y="{top}" width="{wide}" height="{high}" fill="none" stroke="lightgray"/>'
        )
        for rows, colour in ((stands, "steelblue"), (falls, "firebrick")):
            points = " ".join(
                f"{left + wide * row['step'] / last:.1f},{top + high * (1 - row[name] / most):.1f}" for row in rows
            )
            parts.append(f'<polyline points="{points}" fill="none" stroke="{colour}"/>')
    bottom = 30 + 4 * (high + gap) - gap
    marks = [(fallen["alarms"][0][0], f"alarm: {fallen['alarms'][0][1]}", "darkorange")] if fallen["alarms"] else []
    marks += [(fallen["lost"], "success lost", "black")] if fallen["lost"] is not None else []
    for step, text, colour in marks:
        x = left + wide * step / last
        parts.append(
            f'<line x1="{x:.1f}" x2="{x:.1f}" y1="24" y2="{bottom}" stroke="{colour}" stroke-dasharray="4 3"/>'
            f'<text x="{x + 3:.1f}" y="22" fill="{colour}">{text}</text>'
        )
    parts.append(
        f'<text x="{left}" y="{bottom + 18}">steps 1 to {last:.0f}; <tspan fill="firebrick">bandit_collapse</tspan>, '
        '<tspan fill="steelblue">bandit_starpo_s</tspan></text></svg>'
    )
    return "\n".join(parts) + "\n"


if __name__ == "__main__":
    main()
