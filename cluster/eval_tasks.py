"""Which tasks an evaluation takes, and which of them the policy has seen in training.

Promises:
- the same wish gives the same tasks in the same order: of a split by index, of a run as it trained on them, of a file by line;
- a task counts as trained on if a run that the weights come from dispatched it for training up to their version, whatever
  became of it, or had it shown in the cold start. Tasks are the same if their world and id are, or their world, split,
  seed and data; the world's options, and the name under which it was found, make no difference.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from troupe.actors.director import shown_tasks
from troupe.cluster import config as recipes
from troupe.envs.base import SPLITS, TextWorld
from troupe.protocol import stored
from troupe.protocol.errors import ConfigError, nearest
from troupe.protocol.trajectory import Task

HELD_OUT, TRAIN = "held-out", "train"
_FIELDS = {"id": str, "split": str, "seed": int, "data": dict}
_SEEDS = 2**63
_NAMED = 3
"""Tasks that a refusal names."""


@dataclass(slots=True)
class History:
    """What a policy was trained on. tasks: in order, as far as they are stored; demonstrations are in `seen` only.

    seen: key of a task → the run that trained on it.
    """

    tasks: list[Task] = field(default_factory=list)
    seen: dict[str, str] = field(default_factory=dict)

    def run_of(self, task: Task) -> str | None:
        """The run that trained on `task`, or None."""
        return next((self.seen[key] for key in _keys(task) if key in self.seen), None)


def choose(wanted: str, count: int, world: type[TextWorld], history: History) -> list[Task]:
    """The first `count` tasks: of the held-out split, of those trained on ("train"; of the train split if none was), or of
    the file `wanted` (all of it if count is 0). Raises ConfigError."""
    name = world.name or world.__name__
    if wanted in (HELD_OUT, "heldout"):
        return [world.task("heldout", index) for index in range(count)]
    if wanted == TRAIN:
        known = [task for task in history.tasks if task.env == name]
        return known[:count] or [world.task("train", index) for index in range(count)]
    path = Path(wanted)
    if not path.is_file():
        beside = [str(p) for p in path.parent.glob("*.jsonl")] if path.parent.is_dir() else []
        hint = nearest(wanted, [HELD_OUT, TRAIN, *beside])
        raise ConfigError(f"--tasks '{wanted}' is neither held-out nor train nor a file of tasks.{hint}")
    found = list(_read(path, name))
    if not found:
        raise ConfigError(f"'{wanted}' holds no tasks: write one JSON object a line")
    return found[: count or None]


def guard(tasks: Sequence[Task], history: History, force: bool) -> dict[str, str]:
    """Task id → the run that trained on it. Raises ConfigError if there are any, unless forced."""
    found = {task.id: run for task in tasks if (run := history.run_of(task)) is not None}
    if found and not force:
        named = ", ".join([*list(found)[:_NAMED], *["…"] * (len(found) > _NAMED)])
        runs = ", ".join(f"'{run}'" for run in dict.fromkeys(found.values()))
        raise ConfigError(
            f"{len(found)} of {len(tasks)} tasks were trained on, in {runs} ({named}): choose others, or evaluate them all the "
            "same, marked as contaminated, with --force"
        )
    return found


def history_of(weights: Path | None) -> History:
    """What the weights in the folder `weights` (a checkpoint or a model) were trained on: in the run that they are a
    checkpoint of, up to their step, and in the runs that it started from. Raises ConfigError."""
    history = History()
    visited: set[Path] = set()
    while weights is not None and (found := _run_of(weights)) is not None and found[0] not in visited:
        run, step = found
        visited.add(run)
        config = recipes.read(str(run / "config.toml"))
        stored = list(_stored(run, step))
        history.tasks += stored
        for task in (*stored, *shown_tasks(config)):
            history.seen |= dict.fromkeys(_keys(task), str(run))
        weights = Path(config.model.path).expanduser() if config.model.path else None
    return history


def _run_of(weights: Path) -> tuple[Path, int] | None:
    """The run in whose checkpoints `weights` lie, and of which step they are."""
    for folder in (weights.resolve(), weights.resolve().parent):
        run, step = folder.parent.parent, folder.name.removeprefix("step-")
        if folder.parent.name == "checkpoints" and step.isdigit() and (run / "config.toml").is_file():
            return run, int(step)
    return None


def _stored(run: Path, last: int) -> Iterator[Task]:
    """The tasks of the training episodes in the store of `run` up to step `last`, each once, in order."""
    columns = ["task_id", "env", "split", "task_seed", "task_data"]
    table = stored.committed(run / "trajectories").select(["kind", "step", "group", *columns])
    chosen = table.filter(pc.and_(pc.equal(table["kind"], "train"), pc.less_equal(table["step"], last)))
    chosen = chosen.sort_by([("step", "ascending"), ("group", "ascending")])
    rows = zip(*(chosen[name].to_pylist() for name in columns), strict=True)
    for id_, env, split, seed, data in dict.fromkeys(rows):
        yield Task(id_, env, split, seed, json.loads(data))


def _keys(task: Task) -> tuple[str, str]:
    """What makes a task the same: who it is, and what it is."""
    data = json.dumps(task.data, sort_keys=True, separators=(",", ":"))
    return json.dumps([task.env, task.id]), json.dumps([task.env, task.split, task.seed, data])


def _read(path: Path, env: str) -> Iterator[Task]:
    """The tasks in a file: a JSON object a line, with `split` and `seed`, and perhaps `id` and `data`."""
    ids: set[str] = set()
    for number, line in _lines(path):
        where = f"'{path}' line {number}"
        try:
            row: Any = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{where} is not JSON: {error}") from error
        if not isinstance(row, dict):
            raise ConfigError(f'{where} is no object: write a task as {{"split": "heldout", "seed": 7}}')
        for key, value in row.items():
            if key not in _FIELDS:
                raise ConfigError(f"{where}: unknown key '{key}'.{nearest(key, _FIELDS)} Known: {', '.join(_FIELDS)}")
            if not isinstance(value, _FIELDS[key]) or isinstance(value, bool):
                raise ConfigError(f"{where}: '{key}' is {value!r}, not of type {_FIELDS[key].__name__}")
        if not abs(row.get("seed", _SEEDS)) < _SEEDS:
            raise ConfigError(f'{where} has no "seed" of 64 bits: write a task as {{"split": "heldout", "seed": 7}}')
        split = row.get("split", "heldout")
        if split not in SPLITS:
            raise ConfigError(f"{where}: there is no split '{split}'.{nearest(split, SPLITS)} Known: {', '.join(SPLITS)}")
        task = Task(row.get("id", f"{split}/{row['seed']}"), env, split, row["seed"], row.get("data", {}))
        if task.id in ids:
            raise ConfigError(f"{where}: there is a task '{task.id}' already; give each an id of its own")
        ids.add(task.id)
        yield task


def _lines(path: Path) -> Iterable[tuple[int, str]]:
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"'{path}' cannot be read: {error}") from error
    return [(number, line) for number, line in enumerate(text.splitlines(), 1) if line.strip()]
