"""Trajectories ↔ Arrow: the one table that the store keeps, the learner reads and SQL asks.

Promises:
- one row a trajectory; `from_table(to_table(trajectories))` equals `trajectories` (arrays keep dtype and every bit),
  whatever slices and chunks the table went through in between;
- nested columns are built from flat buffers and offsets, and read back as views of them: no Python object a token;
- the schema names its version in its metadata; a table of another version is a `StoreError`, never a guess.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from itertools import pairwise
from operator import attrgetter
from typing import Any

import numpy as np
import pyarrow as pa

from troupe.protocol.errors import StoreError
from troupe.protocol.trajectory import Call, Failure, Fork, Node, Step, Task, Trajectory

VERSION = 3
VERSION_KEY = b"troupe.trajectories"
"""Of the schema's metadata."""

_ARRAYS = {"tokens": np.int32, "provenance": np.uint8, "logprobs": np.float32, "versions": np.int32}

CALL = pa.struct(
    [("id", pa.string()), ("name", pa.string()), ("arguments", pa.string()), ("status", pa.string()), ("seconds", pa.float64())]
)
"""One tool call; the fields of `trajectory.Call`, in their order."""

STEP = pa.struct(
    [
        ("reward", pa.float64()),
        ("parts", pa.map_(pa.string(), pa.float64())),
        ("state_key", pa.string()),
        ("action", pa.string()),
        ("invalid", pa.bool_()),
        ("terminated", pa.bool_()),
        ("truncated", pa.bool_()),
        ("generate_s", pa.float64()),
        ("env_s", pa.float64()),
        ("finish", pa.string()),
        ("calls", pa.list_(CALL)),
    ]
)
"""One act → observe round; the fields of `trajectory.Step`, in their order."""

NODE = pa.struct(
    [
        ("parent", pa.int32()),
        ("role", pa.string()),
        ("step", pa.int32()),
        ("tokens", pa.list_(pa.int32())),
        ("provenance", pa.list_(pa.uint8())),
        ("logprobs", pa.list_(pa.float32())),
        ("versions", pa.list_(pa.int32())),
        ("text", pa.string()),
        ("agent", pa.string()),
    ]
)
"""One message; the fields of `trajectory.Node`, in their order. logprobs and versions have one entry a policy token."""

SCHEMA = pa.schema(
    [
        ("id", pa.string()),
        ("attempt", pa.int32()),
        ("group", pa.int64()),
        ("member", pa.int32()),
        ("kind", pa.string()),
        ("step", pa.int64()),
        ("task_id", pa.string()),
        ("env", pa.string()),
        ("split", pa.string()),
        ("task_seed", pa.int64()),
        ("task_data", pa.string()),  # JSON
        ("status", pa.string()),
        ("stop", pa.string()),
        ("reward", pa.float64()),
        ("success", pa.bool_()),  # null: the world has no verdict
        ("failure_kind", pa.string()),  # null, as are the next three: it did not break
        ("failure_type", pa.string()),
        ("failure_message", pa.string()),
        ("failure_where", pa.string()),
        ("sampling", pa.string()),  # JSON
        ("pool", pa.string()),
        ("seed", pa.int64()),
        ("started_at", pa.float64()),
        ("seconds", pa.float64()),
        ("fork_episode", pa.string()),  # null, as are the next two: it began at the start
        ("fork_attempt", pa.int32()),
        ("fork_tokens", pa.int32()),
        # Derived, so that SQL need not open the nested columns:
        ("turns", pa.int32()),
        ("tokens", pa.int32()),
        ("policy_tokens", pa.int32()),
        ("version_min", pa.int32()),
        ("version_max", pa.int32()),
        ("steps", pa.list_(STEP)),
        ("nodes", pa.list_(NODE)),
    ],
    metadata={VERSION_KEY: str(VERSION).encode()},
)
"""One row a trajectory; the fields of `trajectory.Trajectory` with its task, failure and fork flattened."""

_TASK = {"task_id": "id", "env": "env", "split": "split", "task_seed": "seed"}
_FAILURE = {f"failure_{name}": name for name in ("kind", "type", "message", "where")}
_FORK = {f"fork_{name}": name for name in ("episode", "attempt", "tokens")}
_PLAIN = (
    *("id", "attempt", "group", "member", "kind", "step", "status", "stop", "reward", "success"),
    *("pool", "seed", "started_at", "seconds"),
)


def to_table(trajectories: Sequence[Trajectory]) -> pa.Table:
    """`trajectories` as a table of `SCHEMA`, in their order.

    Raises StoreError if a value does not fit its column: integers of more than 64 bits, text that is no Unicode, task
    data or sampling settings that are not JSON.
    """
    try:
        return pa.Table.from_arrays([_column(name, trajectories) for name in SCHEMA.names], schema=SCHEMA)
    except (pa.ArrowException, TypeError, ValueError, OverflowError) as error:
        which = trajectories[0].id if len(trajectories) == 1 else f"one of {len(trajectories)}"
        raise StoreError(f"trajectory {which} does not fit the store's schema: {error}") from error


def from_table(table: pa.Table) -> list[Trajectory]:
    """The inverse of `to_table`; derived and foreign columns are ignored. Token arrays are read-only views of `table`.

    Raises StoreError for a table of another schema or version.
    """
    check(table.schema)
    columns = {name: table.column(name) for name in SCHEMA.names}
    plain = {name: columns[name].to_pylist() for name in _PLAIN}
    task = {field: columns[name].to_pylist() for name, field in _TASK.items()}
    task["data"] = [json.loads(text) for text in columns["task_data"].to_pylist()]
    failure = {field: columns[name].to_pylist() for name, field in _FAILURE.items()}
    fork = {field: columns[name].to_pylist() for name, field in _FORK.items()}
    sampling = [json.loads(text) for text in columns["sampling"].to_pylist()]
    nodes = _lists(columns["nodes"], _read_nodes)
    steps = _lists(columns["steps"], _read_steps)
    return [
        Trajectory(
            **{name: values[row] for name, values in plain.items()},
            task=Task(**{name: values[row] for name, values in task.items()}),
            failure=None if kind is None else Failure(**{name: values[row] for name, values in failure.items()}),
            fork=None if fork["episode"][row] is None else Fork(**{name: values[row] for name, values in fork.items()}),
            sampling=sampling[row],
            nodes=nodes[row],
            steps=steps[row],
        )
        for row, kind in enumerate(failure["kind"])
    ]


def check(schema: pa.Schema) -> None:
    """Raises StoreError unless `schema` is of this version and has every column of `SCHEMA`."""
    check_version(schema)
    for field in SCHEMA:
        if schema.get_field_index(field.name) < 0 or not schema.field(field.name).type.equals(field.type):
            raise StoreError(f"trajectories without the column '{field.name}: {field.type}'; the table was altered")


def check_version(schema: pa.Schema) -> None:
    """Raises StoreError unless `schema` says that it is of this version."""
    version = (schema.metadata or {}).get(VERSION_KEY)
    if version is None:
        raise StoreError("not a table of trajectories: its schema has no 'troupe.trajectories' version")
    if version != str(VERSION).encode():
        found = version.decode(errors="replace")
        raise StoreError(f"trajectories of schema version {found}, this side reads {VERSION}: use the one that wrote them")


# -- writing ---------------------------------------------------------------------------------------------------------


def _column(name: str, trajectories: Sequence[Trajectory]) -> pa.Array:
    if name in ("steps", "nodes"):
        rows = [getattr(trajectory, name) for trajectory in trajectories]
        flat = [item for row in rows for item in row]
        return pa.ListArray.from_arrays(_offsets(rows), _steps(flat) if name == "steps" else _nodes(flat))
    values: Iterable[Any]
    if name in _PLAIN:
        values = map(attrgetter(name), trajectories)
    elif name in _TASK:
        values = map(attrgetter(f"task.{_TASK[name]}"), trajectories)
    elif name in _FAILURE:
        values = (t.failure and getattr(t.failure, _FAILURE[name]) for t in trajectories)
    elif name in _FORK:
        values = (t.fork and getattr(t.fork, _FORK[name]) for t in trajectories)
    elif name == "task_data":
        values = (_json(t.task.data) for t in trajectories)
    elif name == "sampling":
        values = (_json(t.sampling) for t in trajectories)
    elif name == "turns":
        values = (len(t.steps) for t in trajectories)
    elif name == "tokens":
        values = (sum(len(node.tokens) for node in t.nodes) for t in trajectories)
    elif name == "policy_tokens":
        values = (t.policy_tokens for t in trajectories)
    else:
        end = ("version_min", "version_max").index(name)
        values = (t.versions[end] for t in trajectories)
    return pa.array(list(values), SCHEMA.field(name).type)


def _steps(steps: list[Step]) -> pa.Array:
    parts = [step.parts for step in steps]
    keys = pa.array([key for part in parts for key in part], pa.string())
    items = pa.array([value for part in parts for value in part.values()], pa.float64())
    nested = {
        "parts": pa.MapArray.from_arrays(_offsets(parts), keys, items),
        "calls": pa.ListArray.from_arrays(
            _offsets([step.calls for step in steps]), _structs([call for step in steps for call in step.calls], CALL)
        ),
    }
    return _structs(steps, STEP, nested)


def _structs(items: Sequence[Any], kind: pa.StructType, nested: dict[str, pa.Array] | None = None) -> pa.Array:
    """Objects as structs, field by field; the columns in `nested` are ready."""
    ready = nested or {}
    arrays = [
        ready[field.name] if field.name in ready else pa.array([getattr(item, field.name) for item in items], field.type)
        for field in kind
    ]
    return pa.StructArray.from_arrays(arrays, fields=list(kind))


def _nodes(nodes: list[Node]) -> pa.Array:
    arrays = []
    for field in NODE:
        values = list(map(attrgetter(field.name), nodes))
        if field.name in _ARRAYS:
            # An empty array in front gives the dtype of no arrays at all.
            dtype = _ARRAYS[field.name]
            flat = np.concatenate([np.empty(0, dtype), *values], dtype=dtype, casting="same_kind")
            arrays.append(pa.ListArray.from_arrays(_offsets(values), pa.array(flat, field.type.value_type)))
        else:
            arrays.append(pa.array(values, field.type))
    return pa.StructArray.from_arrays(arrays, fields=list(NODE))


def _offsets(rows: Sequence[Any]) -> pa.Array:
    offsets = np.zeros(len(rows) + 1, np.int64)
    np.cumsum(np.fromiter(map(len, rows), np.int64, len(rows)), out=offsets[1:])
    return pa.array(offsets).cast(pa.int32())  # raises if a table has more than 2³¹ tokens


def _json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False, separators=(",", ":")) if value else "{}"


# -- reading ---------------------------------------------------------------------------------------------------------


def _lists(column: pa.ChunkedArray, read: Any) -> list[list[Any]]:
    """Each row's items, `read` from the flat struct array below. `.offsets` and `.values` agree for slices too."""
    rows: list[list[Any]] = []
    for chunk in column.chunks:
        offsets = chunk.offsets.to_numpy()
        first = int(offsets[0])
        items = read(chunk.values.slice(first, int(offsets[-1]) - first))
        cuts = (offsets - first).tolist()
        rows.extend(items[a:b] for a, b in pairwise(cuts))
    return rows


def _read_steps(flat: pa.StructArray) -> list[Step]:
    columns = [array.to_pylist() for array in flat.flatten()]
    parts = STEP.get_field_index("parts")
    columns[parts] = [dict(pairs) for pairs in columns[parts]]
    calls = STEP.get_field_index("calls")
    columns[calls] = [[Call(**call) for call in row] for row in columns[calls]]
    return [Step(*row) for row in zip(*columns, strict=True)]


def _read_nodes(flat: pa.StructArray) -> list[Node]:
    columns = [
        _views(array) if field.name in _ARRAYS else array.to_pylist()  # tokens never become Python objects
        for field, array in zip(NODE, flat.flatten(), strict=True)
    ]
    return [Node(*row) for row in zip(*columns, strict=True)]


def _views(array: pa.ListArray) -> list[Any]:
    values = array.values.to_numpy(zero_copy_only=True)
    return [values[a:b] for a, b in pairwise(array.offsets.to_numpy().tolist())]
