"""A trajectory store's folder, as anybody reads it: which groups are committed, and their rows mapped from disk.

Promises: only what the manifest names is seen, so no lock is needed while a store writes; what is lost or damaged is a
StoreError that names the file. `actors/store.py` says how the folder is written.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pyarrow as pa
import pyarrow.compute as pc

from troupe.protocol import arrow
from troupe.protocol.errors import StoreError
from troupe.protocol.trajectory import Kind

MANIFEST = "manifest.jsonl"
VERSION = 2


@dataclass(slots=True)
class Group:
    """One committed group: its record batch is bytes [start, end) of `segment` (none if it has no rows).

    tokens: sampled. data_failures: task id → the messages (their beginnings) of its failures of kind "data".
    """

    segment: str
    start: int
    end: int
    rows: int
    group: int
    kind: Kind
    step: int
    trains: bool
    episodes: list[str]
    completed: int
    failed: int
    cancelled: int
    tokens: int
    data_failures: dict[str, list[str]]


@dataclass(slots=True)
class Manifest:
    """What is committed, in order; which attempts are dead; the length in bytes of the complete lines."""

    groups: list[Group]
    fences: dict[str, int]
    length: int = 0


def manifest(folder: str | Path) -> Manifest:
    """The manifest of `folder`, empty if there is none.

    Raises StoreError if a line that is not the last cannot be read: no crash of a store leaves that behind.
    """
    path = Path(folder) / MANIFEST
    lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
    found = Manifest([], {})
    for number, line in enumerate(lines, 1):
        try:
            if not line.endswith(b"\n"):
                raise ValueError("it has no end")
            entry = json.loads(line)
            version = entry["version"]
            if version == VERSION:
                found.groups += [Group(**group) for group in entry["groups"]]
                found.fences = fenced(found.fences, entry["fences"])
        except (ValueError, TypeError, KeyError, AttributeError) as error:
            if number < len(lines):
                raise StoreError(f"'{path}' line {number} is damaged ({error}): restore it from a copy") from error
            break  # the tail of a write that a crash interrupted, or that goes on right now
        if version != VERSION:
            raise StoreError(f"'{path}' line {number} has version {version}, this side reads {VERSION}")
        found.length += len(line)
    return found


def read(folder: str | Path, groups: list[Group]) -> list[pa.RecordBatch]:
    """The rows of each of `groups` that has any, mapped from disk, not copied. Raises StoreError if they are lost."""
    segments: dict[str, pa.Buffer] = {}
    batches = []
    for group in groups:
        if not group.rows:
            continue
        path = Path(folder) / group.segment
        try:
            opened = segments.get(group.segment)
            if opened is None:
                with pa.memory_map(str(path)) as file:
                    opened = segments[group.segment] = file.read_buffer()
                if group.end <= opened.size:
                    arrow.check(pa.ipc.read_schema(opened))
            if group.end > opened.size:
                raise short(path, opened.size, group.end)
            batches.append(pa.ipc.read_record_batch(opened.slice(group.start, group.end - group.start), arrow.SCHEMA))
        except (OSError, pa.ArrowException) as error:
            raise StoreError(f"'{path}' cannot be read: {error}") from error
    return batches


def committed(folder: str | Path) -> pa.Table:
    """Everything committed so far, in the order of the manifest. Safe while a store writes here; no folder, no rows.

    Columns: `protocol.arrow.SCHEMA` and `trains` (false for evaluations and for groups that a filter dropped).
    """
    groups = [group for group in manifest(folder).groups if group.rows]
    table = pa.Table.from_batches(read(folder, groups), arrow.SCHEMA)
    trains = [pa.repeat(pa.scalar(group.trains), group.rows) for group in groups]
    return table.append_column("trains", pa.chunked_array(trains, pa.bool_()))


def training(folder: str | Path, groups: list[Group]) -> pa.Table:
    """What the learner is given of `groups`: completed trajectories only, ordered by id."""
    table = pa.Table.from_batches(read(folder, groups), arrow.SCHEMA)
    table = table.filter(pc.equal(table["status"], "completed")).combine_chunks()
    return table.take(pc.sort_indices(table["id"]))


def fenced(fences: dict[str, int], more: dict[str, int]) -> dict[str, int]:
    """Both together; a fence around all episodes ("") replaces the lower ones around single ones."""
    merged = fences | {episode: max(attempt, fences.get(episode, 0)) for episode, attempt in more.items()}
    floor = merged.get("", 0)
    return {episode: attempt for episode, attempt in merged.items() if not episode or attempt > floor}


def short(path: Path, size: int, end: int) -> StoreError:
    """A segment that lost bytes."""
    return StoreError(f"'{path}' has {size} bytes, the manifest names {end}: restore it from a copy")
