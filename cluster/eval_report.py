"""What an evaluation came to: one JSON document with everything, and a page for people. docs/evaluation.md explains both.

Promises:
- `scores` and `tasks` are a function of the episodes and the seed; times and places are elsewhere in the document;
- tasks that were trained on are marked, and scored apart from the others too;
- the document is strict JSON: no NaN, and null where there was nothing to estimate a number from.
"""

from __future__ import annotations

import io
import json
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.console import Console
from rich.table import Table

from troupe.actors.director import limits_of
from troupe.cluster.evaluating import Episode, Plan
from troupe.learner import evaluation

FORMAT = 1
_SHOWN = 20
_REASONS = 10


def document(
    plan: Plan,
    episodes: Sequence[Episode],
    ks: Sequence[int],
    *,
    checksum: str,
    contaminated: Mapping[str, str],
    chosen: str,
    at: str,
    seconds: float,
) -> dict[str, Any]:
    """Everything that is known of an evaluation. contaminated: task id → the run that trained on it; chosen: --tasks."""
    config, policy = plan.config, plan.policy
    of_task: dict[str, list[Episode]] = {task.id: [] for task in plan.tasks}
    for episode in episodes:
        of_task[episode.task].append(episode)
    reasons = Counter(episode.failure for episode in episodes if episode.success is None)
    clean = [episode for episode in episodes if episode.task not in contaminated]
    tainted = [episode for episode in episodes if episode.task in contaminated]
    return {
        "format": FORMAT,
        "name": plan.folder.name,
        "policy": {
            "run": str(policy.run) if policy.run else None,
            "checkpoint": str(policy.checkpoint.path) if policy.checkpoint else None,
            "step": policy.version if policy.checkpoint else None,
            "checksum": checksum,
            "model": str(policy.folder),
        },
        "world": {"name": config.env.name, "options": config.env.options},
        "agent": config.agent.model_dump(mode="json"),
        "limits": {**asdict(limits_of(config)), "attempts": config.rollout.attempts},
        "sampling": asdict(plan.sampling),
        "seed": plan.seed,
        "chosen": {"tasks": chosen, "count": len(plan.tasks), "trials": plan.trials, "k": list(ks)},
        "contaminated": dict(contaminated),
        "scores": {
            "all": _scores(episodes, ks, plan.seed),
            "clean": _scores(clean, ks, plan.seed) if tainted else None,
            "contaminated": _scores(tainted, ks, plan.seed) if tainted else None,
        },
        "broken": [{"reason": reason, "episodes": count} for reason, count in reasons.most_common()],
        "tasks": [
            {
                "id": task.id,
                "split": task.split,
                "seed": task.seed,
                "data": task.data,
                "contaminated": task.id in contaminated,
                **_counts(of_task[task.id]),
                "outcomes": [episode.success for episode in of_task[task.id]],
            }
            for task in plan.tasks
        ],
        "trajectories": str(plan.folder),
        "at": at,
        "seconds": round(seconds, 3),
    }


def text_of(found: Mapping[str, Any]) -> str:
    """The document as strict JSON."""
    return json.dumps(found, indent=1, ensure_ascii=False, allow_nan=False) + "\n"


def page(found: Mapping[str, Any], width: int, every_task: bool = False) -> str:
    """The document for people: the scores, then the tasks, those that went worst first (20 unless `every_task`)."""
    file = io.StringIO()
    console = Console(file=file, width=width, markup=False, highlight=False, emoji=False)
    policy, sampling = found["policy"], found["sampling"]
    step = "" if policy["step"] is None else f" step {policy['step']}"
    console.print(
        f"{Path(policy['run'] or policy['model']).name}{step} · checksum {policy['checksum']} · {found['world']['name']} · "
        f"{found['chosen']['count']} tasks ({found['chosen']['tasks']}) × {found['chosen']['trials']} · temperature "
        f"{sampling['temperature']:g} top_p {sampling['top_p']:g} top_k {sampling['top_k']} max_tokens "
        f"{sampling['max_tokens']} · seed {found['seed']}"
    )
    console.print(_score_table(found))
    for row in found["broken"][:_REASONS]:
        console.print(f"broke, and is no trial: {row['episodes']} × {row['reason']}")
    tasks = sorted(found["tasks"], key=lambda task: (task["success"] is None, task["success"] or 0.0))
    shown = tasks if every_task else tasks[:_SHOWN]
    console.print(_task_table(shown))
    if len(shown) < len(tasks):
        console.print(f"… and {len(tasks) - len(shown)} tasks that went no worse; --all shows them, and the JSON has them")
    return "\n".join(line.rstrip() for line in file.getvalue().splitlines()) + "\n"


# -- numbers ---------------------------------------------------------------------------------------------------------


def _scores(episodes: Sequence[Episode], ks: Sequence[int], seed: int) -> dict[str, Any]:
    scores = evaluation.evaluate([(episode.task, episode.success) for episode in episodes], ks, seed=seed)
    by_k = {name: {str(k): asdict(found) for k, found in getattr(scores, name).items()} for name in ("pass_at", "pass_hat")}
    return {**asdict(scores), **by_k, **_means(episodes)}


def _counts(episodes: Sequence[Episode]) -> dict[str, Any]:
    trials = [episode.success for episode in episodes if episode.success is not None]
    return {
        "trials": len(trials),
        "successes": sum(trials),
        "broken": len(episodes) - len(trials),
        "success": fmean(trials) if trials else None,
        **_means(episodes),
    }


def _means(episodes: Sequence[Episode]) -> dict[str, float | None]:
    """Of the trials: what broke has no reward, and its turns and tokens say how far it got."""
    trials = [episode for episode in episodes if episode.success is not None]
    return {
        name: fmean(float(getattr(episode, name)) for episode in trials) if trials else None
        for name in ("reward", "turns", "tokens")
    }


# -- for people ------------------------------------------------------------------------------------------------------


def _score_table(found: Mapping[str, Any]) -> Table:
    parts = {name: scores for name, scores in found["scores"].items() if scores is not None}
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("score")
    for name in parts:
        table.add_column("" if len(parts) == 1 else name)
    rows: list[tuple[str, list[str]]] = [
        ("success", [_interval(scores["success"]) for scores in parts.values()]),
        ("  Wilson's interval", [_range(*scores["wilson"]) if scores["trials"] else "–" for scores in parts.values()]),
        (f"avg@{found['chosen']['trials']}", [_interval(scores["avg"]) for scores in parts.values()]),
    ]
    for key, sign in (("pass_at", "pass@"), ("pass_hat", "pass^")):
        rows += [(f"{sign}{k}", [_interval(scores[key][str(k)]) for scores in parts.values()]) for k in found["chosen"]["k"]]
    rows += [
        (name, [_number(scores[key]) for scores in parts.values()])
        for name, key in (("reward", "reward"), ("turns", "turns"), ("tokens sampled", "tokens"))
    ]
    rows += [(name, [str(scores[name]) for scores in parts.values()]) for name in ("trials", "broken")]
    for name, cells in rows:
        table.add_row(name, *cells)
    return table


def _task_table(tasks: Sequence[Mapping[str, Any]]) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("task", overflow="fold")
    for name in ("success", "trials", "broken", "reward", "turns", "tokens"):
        table.add_column(name, justify="right")
    table.add_column("")
    for task in tasks:
        table.add_row(
            task["id"],
            f"{task['successes']}/{task['trials']}" if task["trials"] else "–",
            str(task["trials"]),
            str(task["broken"]),
            *(_number(task[name]) for name in ("reward", "turns", "tokens")),
            "trained on" if task["contaminated"] else "",
        )
    return table


def _interval(estimate: Mapping[str, Any]) -> str:
    if estimate["value"] is None:
        return "–"
    if estimate["low"] == estimate["high"]:  # resampling what is all alike says nothing of how sure it is
        return f"{estimate['value']:.3f} (all alike) on {estimate['tasks']} tasks"
    return f"{estimate['value']:.3f} {_range(estimate['low'], estimate['high'])} on {estimate['tasks']} tasks"


def _range(low: float, high: float) -> str:
    return f"[{low:.3f}, {high:.3f}]"


def _number(value: float | None) -> str:
    return "–" if value is None else f"{value:.2f}"
