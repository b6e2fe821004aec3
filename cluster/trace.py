"""`troupe trace`: one trajectory as a person wants to read it: turns, tool calls, rewards, and which tokens are trained.

Promises:
- reads what is committed, of a live run or a finished one; nothing is written, neither Ray nor torch is imported;
- nothing that a world or a policy said reaches the terminal as a command: control characters are spelled out;
- without colours (a pipe, NO_COLOR) there are no escape codes.

How one looks is `trace_page.py`, how it is told to programs `trace_data.py`, how token ids are spelled `spelling.py`.
"""

from __future__ import annotations

import io
import json
import os
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Console
from rich.table import Table
from rich.text import Text

from troupe.cluster.run import Run
from troupe.cluster.spelling import harmless, speller
from troupe.cluster.trace_data import as_data, finite
from troupe.cluster.trace_page import Page
from troupe.protocol.arrow import from_table
from troupe.protocol.errors import ConfigError, nearest

_LISTED, _CANDIDATES, _GUESSED = 20, 8, 5000
_COLUMNS = ("id", "kind", "step", "status", "stop", "reward", "turns", "tokens", "success")


def show(
    run: str,
    wanted: str | None = None,
    *,
    best: bool = False,
    worst: bool = False,
    failed: bool = False,
    step: int | None = None,
    branch: int | None = None,
    tokens: bool = False,
    as_json: bool = False,
    width: int | None = None,
) -> None:
    """Writes a trajectory of `run` to standard output, or a list of the latest ones if none is chosen.

    wanted: an id or a unique part of one. best, worst: choose by reward. failed, step: only these come into question.
    Raises ConfigError for what cannot be shown.
    """
    chosen = [flag for flag, on in (("an id", wanted), ("--best", best), ("--worst", worst)) if on]
    if len(chosen) > 1:
        raise ConfigError(f"{' and '.join(chosen)} each choose one trajectory: give one of them")
    if failed and (best or worst):
        raise ConfigError("a failed episode has no reward: give --failed, or --best or --worst")
    if not chosen and (tokens or branch is not None):
        raise ConfigError("--tokens and --branch show one trajectory: name its id, or add --best or --worst")

    opened = Run(run)
    table = opened.trajectories()
    rows = _rows(table, failed, step)
    console = _console(width)
    if not chosen:
        if as_json:
            _write(json.dumps({"run": run, "trajectories": finite(_listed(table, rows))}, allow_nan=False) + "\n")
            return
        _list(console, table, rows, run)
    else:
        if not len(rows):
            raise ConfigError(f"'{run}' has {_nothing(table)}")
        place = find(table["id"].take(pa.array(rows)).to_pylist(), wanted) if wanted else _extreme(table, rows, best)
        row = table.slice(int(rows[place]), 1)
        trajectory, trains = from_table(row)[0], bool(row["trains"][0].as_py())
        count = sum(1 for _ in trajectory.branches())
        if branch is not None and not 1 <= branch <= count:
            raise ConfigError(f"{harmless(trajectory.id, keep='')} has no branch {branch}: it has {count}")
        spell, note = speller(opened)
        if as_json:
            _write(json.dumps(as_data(trajectory, trains, spell, note, branch), allow_nan=False) + "\n")
            return
        Page(console, trajectory, trains, spell, note).show(branch, tokens)
    assert isinstance(console.file, io.StringIO)
    _write("\n".join(line.rstrip() for line in console.file.getvalue().rstrip().split("\n")) + "\n")


# -- choosing --------------------------------------------------------------------------------------------------------


def find(ids: Sequence[str], wanted: str) -> int:
    """The place in `ids` of the one that `wanted` means: the id itself, else its beginning, end, or any part of it.

    Raises ConfigError if that is none, or several.
    """
    tests: tuple[Callable[[str], bool], ...] = (
        lambda id_: id_ == wanted,
        lambda id_: id_.startswith(wanted),
        lambda id_: id_.endswith(wanted),
        lambda id_: wanted in id_,
    )
    for test in tests:
        found = [place for place, id_ in enumerate(ids) if test(id_)]
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(harmless(ids[place], keep="") for place in found[:_CANDIDATES])
            more = f" and {len(found) - _CANDIDATES} more" if len(found) > _CANDIDATES else ""
            raise ConfigError(f"'{harmless(wanted, keep='')}' is several trajectories: {names}{more}")
    raise ConfigError(
        f"no trajectory '{harmless(wanted, keep='')}'.{harmless(nearest(wanted, ids[-_GUESSED:]), keep='')} "
        "`troupe trace RUN` lists the latest"
    )


def _rows(table: pa.Table, failed: bool, step: int | None) -> np.ndarray:
    """Numbers of the rows that come into question, oldest first."""
    keep = np.ones(table.num_rows, np.bool_)
    if failed:
        keep &= pc.equal(table["status"], "failed").to_numpy(zero_copy_only=False).astype(np.bool_)
    if step is not None:
        keep &= table["step"].to_numpy() == step
    return np.flatnonzero(keep)


def _extreme(table: pa.Table, rows: np.ndarray, best: bool) -> int:
    """The place in `rows` of the highest or lowest reward; of equal ones, the latest."""
    status = table["status"].take(rows).to_pylist()
    rewards = table["reward"].take(rows).to_pylist()
    places = [place for place in range(len(rows)) if status[place] == "completed"]
    if not places:
        raise ConfigError("none of these trajectories is completed, so none has a reward: see --failed")
    return max(places, key=lambda place: (rewards[place] if best else -rewards[place], place))


def _nothing(table: pa.Table) -> str:
    if not table.num_rows:
        return "no trajectories yet: the first are there when their group is complete"
    low, high = pc.min_max(table["step"]).as_py().values()
    return f"no such trajectory among its {table.num_rows} (steps {low} to {high})"


# -- the list, and the way out ----------------------------------------------------------------------------------------


def _listed(table: pa.Table, rows: np.ndarray) -> list[dict[str, Any]]:
    """The rows of the list, newest first."""
    found: list[dict[str, Any]] = table.select([*_COLUMNS, "trains"]).take(pa.array(rows[::-1])).to_pylist()
    return found


def _list(console: Console, table: pa.Table, rows: np.ndarray, run: str) -> None:
    if not len(rows):
        console.print(Text(f"{harmless(run)}: {_nothing(table)}"), soft_wrap=True)
        return
    shown = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for name in _COLUMNS:
        number = pa.types.is_integer(table.schema.field(name).type) or name == "reward"
        shown.add_column(name, justify="right" if number else "left", overflow="fold")
    for row in _listed(table, rows[-_LISTED:]):
        if row["status"] != "completed":
            row["reward"] = None
        style = {"completed": "", "failed": "red", "cancelled": "dim"}[row["status"]]
        shown.add_row(*(Text(_cell(row[name]), style) for name in _COLUMNS))
    console.print(shown)
    more = f"the latest {_LISTED} of {len(rows)} · " if len(rows) > _LISTED else ""
    newest = harmless(table["id"][int(rows[-1])].as_py(), keep="")
    hint = f"{more}one of them: troupe trace {harmless(run)} {newest}, or --best, --worst; the list: --failed, --step K"
    console.print(Text(hint, "dim"), soft_wrap=True)


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else harmless(str(value), keep="")


def _console(width: int | None) -> Console:
    """A page in memory, with the colours that standard output can show."""
    out = Console()
    colours: Any = out.color_system if out.is_terminal and not out.no_color else None
    return Console(
        file=io.StringIO(),
        width=width or shutil.get_terminal_size((100, 50)).columns,
        color_system=colours,
        force_terminal=colours is not None,
        legacy_windows=False,
        markup=False,
        highlight=False,
        emoji=False,
    )


def _write(text: str) -> None:
    try:
        sys.stdout.flush()
        sys.stdout.buffer.write(text.encode())
        sys.stdout.flush()
    except BrokenPipeError:  # `… | head` has seen enough; keep the interpreter from flushing again at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
