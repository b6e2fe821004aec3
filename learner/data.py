"""Stored trajectories as training batches: from a store's folder, or from one Arrow or Parquet file.

Promises:
- a batch is what a run's learner is given: the training trajectories of one step that completed, ordered by id;
- whatever is left out is counted under its reason;
- a file that was written by others is taken if the columns are there: derived ones may be missing, text and lists may
  be of another width. What is missing is named.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from troupe.protocol import arrow, stored
from troupe.protocol.errors import ConfigError, StoreError
from troupe.protocol.trajectory import Trajectory

FORK = ("fork_episode", "fork_attempt", "fork_tokens")
"""Columns that may be missing: nothing forked."""
DERIVED = ("turns", "tokens", "policy_tokens", "version_min", "version_max")
"""Columns that training does not read."""
MAY_BE_NULL = ("success", "failure_kind", "failure_type", "failure_message", "failure_where", *FORK)


@dataclass(slots=True)
class Batches:
    """by_step: what trains, in the order of the steps. left_out: number of trajectories by reason."""

    by_step: dict[int, pa.Table]
    left_out: dict[str, int]


def read(path: str | Path) -> Batches:
    """Reads a store's folder or a file. Raises ConfigError or StoreError if nothing in it can be trained on."""
    table = _table(Path(path))
    if not table.num_rows:
        raise ConfigError(f"'{path}' holds no trajectory yet: there is nothing to train on")
    left_out: dict[str, int] = {}
    keep = np.ones(table.num_rows, np.bool_)
    for reason, out in _excluded(table).items():
        if count := int((keep & out).sum()):
            left_out[reason] = count
        keep &= ~out
    table = table.filter(pa.array(keep)).combine_chunks()
    if not table.num_rows:
        reasons = ", ".join(f"{count} {reason}" for reason, count in left_out.items())
        raise ConfigError(f"'{path}' holds no completed training trajectory ({reasons}): there is nothing to train on")
    by_step = {}
    for step in sorted(pc.unique(table["step"]).to_pylist()):
        of_step = table.filter(pc.equal(table["step"], step)).combine_chunks()
        by_step[step] = of_step.take(pc.sort_indices(of_step["id"]))
    return Batches(by_step, left_out)


def _excluded(table: pa.Table) -> dict[str, np.ndarray]:
    """For each reason not to train, which rows it concerns."""
    found = {
        "evaluated": pc.not_equal(table["kind"], "train"),
        "failed or cancelled": pc.not_equal(table["status"], "completed"),
    }
    if "trains" in table.column_names:
        found["of groups that do not train"] = pc.invert(table["trains"])
    return {reason: pc.fill_null(out, True).to_numpy() for reason, out in found.items()}


def trajectories(table: pa.Table) -> list[Trajectory]:
    """The rows of a batch. Raises StoreError for what no store would have written."""
    try:
        found = arrow.from_table(table)
        for node in (node for trajectory in found for node in trajectory.nodes):
            node.check()
        return found
    except (pa.ArrowException, ValueError, TypeError) as error:
        reason = str(error).strip().splitlines()[0]
        raise StoreError(f"a trajectory of step {table['step'][0]} cannot be read: {reason}") from error


def _table(path: Path) -> pa.Table:
    if path.is_dir():
        for folder in (path, path / "trajectories"):
            if (folder / stored.MANIFEST).is_file():
                return stored.committed(folder)
        raise ConfigError(f"'{path}' is no trajectory store: it has no {stored.MANIFEST}. Name RUN/trajectories, or a file")
    if not path.is_file():
        raise ConfigError(f"there is no '{path}': name a run's trajectories folder, or an Arrow or Parquet file")
    try:
        return _fitted(_file(path), path)
    except (pa.ArrowException, OSError) as error:
        reason = str(error).strip().splitlines()[0]
        raise ConfigError(f"'{path}' cannot be read as Arrow or Parquet: {reason}") from error


def _file(path: Path) -> pa.Table:
    """By what the file begins with, whatever it is called."""
    with open(path, "rb") as file:
        magic = file.read(6)
    if magic.startswith(b"PAR1"):
        return pq.read_table(path)
    with pa.memory_map(str(path)) as source:
        opened = pa.ipc.open_file(source) if magic == b"ARROW1" else pa.ipc.open_stream(source)
        return opened.read_all()


def _fitted(table: pa.Table, path: Path) -> pa.Table:
    """`table` with the columns of `arrow.SCHEMA`, and `trains` if it has that."""
    needed = [name for name in arrow.SCHEMA.names if name not in (*DERIVED, *FORK)]
    missing = [name for name in needed if name not in table.column_names]
    if missing:
        flat = " Nested columns are left out by SQL: write the table that troupe.open(RUN).trajectories() gives."
        hint = flat if {"nodes", "steps"} & set(missing) else ""
        raise ConfigError(f"'{path}' has no column {', '.join(map(repr, missing))}.{hint}")
    if arrow.VERSION_KEY in (table.schema.metadata or {}):  # other programs drop it
        arrow.check_version(table.schema)
    columns = []
    for field in arrow.SCHEMA:
        if field.name in DERIVED or field.name not in table.column_names:
            columns.append(pa.nulls(table.num_rows, field.type))
            continue
        found = table[field.name]
        try:
            columns.append(found.cast(field.type))
        except pa.ArrowException as error:
            raise ConfigError(f"'{path}': column '{field.name}' is {found.type}, not {field.type}") from error
        if found.null_count and field.name not in MAY_BE_NULL:
            raise ConfigError(f"'{path}': column '{field.name}' lacks a value in {found.null_count} rows")
    fitted = pa.table(columns, schema=arrow.SCHEMA)
    if "trains" in table.column_names:
        fitted = fitted.append_column("trains", table["trains"].cast(pa.bool_()))
    return fitted
