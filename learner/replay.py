"""A step of a run, taken again: from a checkpoint and the store to weights that must be the run's to the byte (law 7).

Promises: nothing is written into the run, which may still be going on; the batch is the one that the run's learner was
given; what the run recorded (metrics.jsonl, and the checksums in journal.jsonl) is compared without tolerance.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import pyarrow as pa

from troupe.protocol import stored
from troupe.protocol.errors import ConfigError, nearest

NOT_COMPARED = ("learn_s",)
"""Metrics that are no function of weights and batch."""


@dataclass(frozen=True, slots=True)
class Version:
    """What the run's journal says of a weight version: its checksum, and what it was computed with ("" if unknown)."""

    checksum: str
    device: str
    torch: str


class Past:
    """The run in `folder`. Raises ConfigError if there is none."""

    def __init__(self, folder: str | Path) -> None:
        self.folder = Path(folder)
        self.recipe = self.folder / "config.toml"
        if not self.recipe.is_file():
            beside = self.folder.parent
            names = [str(f) for f in beside.iterdir() if (f / "config.toml").is_file()] if beside.is_dir() else []
            raise ConfigError(f"'{folder}' is no run folder: it has no config.toml.{nearest(str(folder), names)}")

    @cached_property
    def metrics(self) -> dict[int, dict[str, Any]]:
        """What was measured of each step."""
        return {row["step"]: row for row in _rows(self.folder / "metrics.jsonl") if "step" in row}

    @cached_property
    def versions(self) -> dict[int, Version]:
        """What was announced; version k is what step k made."""
        found: dict[int, Version] = {}
        device = torch = ""
        for row in _rows(self.folder / "journal.jsonl"):
            if row.get("event") in ("begun", "resumed"):
                device, torch = row.get("device", ""), row.get("torch", "")
            elif row.get("event") == "announced":
                found[row["version"]] = Version(row["checksum"], device, torch)
        return found

    @cached_property
    def remedies(self) -> list[dict[str, Any]]:
        """What the run did about its health (see `health.in_force`)."""
        return [row for row in _rows(self.folder / "journal.jsonl") if row.get("event") == "remedy"]

    def model(self, named: str) -> str:
        """The folder of its policy, which its recipe calls `named`."""
        if not named:
            return str(self.folder / "model")
        if not Path(named).is_dir():
            raise ConfigError(f"the run's model '{named}' is no folder here: say with --model where it lies")
        return named

    def batch(self, step: int, groups: int) -> pa.Table:
        """What the learner was given for `step`: its first `groups` training groups. Raises ConfigError if they are not
        all there, naming the steps that are."""
        of: dict[int, list[stored.Group]] = {}
        for group in stored.manifest(self.folder / "trajectories").groups:
            if group.trains:
                of.setdefault(group.step, []).append(group)
        there = [k for k, found in of.items() if len(found) >= groups]
        if step not in there:
            whole = f"whole batches are there of steps {min(there)} to {max(there)}" if there else "it holds no whole batch"
            raise ConfigError(f"step {step} is not in '{self.folder / 'trajectories'}': {whole}")
        return stored.training(self.folder / "trajectories", of[step][:groups])

    def checkpoint(self, step: int, *, cold_started: bool) -> Path | None:
        """The newest checkpoint from before `step`; None if there is none and the run began with its model as it lay
        there. Raises ConfigError if it began with a cold start, whose demonstrations no store has."""
        names = [path.name for path in (self.folder / "checkpoints").glob("step-*")]
        kept = sorted(int(name[5:]) for name in names if name[5:].isdigit())
        before = [k for k in kept if k < step]
        if before:
            return self.folder / "checkpoints" / f"step-{before[-1]}"
        if cold_started:
            there = ", ".join(f"step-{k}" for k in kept) or "none"
            raise ConfigError(
                f"no checkpoint of '{self.folder}' comes before step {step} (there: {there}): name another with --from"
            )
        return None

    def recorded(self, step: int) -> bool:
        """Is there anything to compare `step` with?"""
        return step in self.metrics or step in self.versions


@dataclass(frozen=True, slots=True)
class Difference:
    """One number of a step that is not the run's."""

    name: str
    here: Any
    run: Any


def differences(past: Past, step: int, metrics: dict[str, float], checksum: str) -> list[Difference]:
    """What `step`, taken again, has not in common with the run; metrics first, in their order. What the run did not
    record is not compared."""
    recorded = past.metrics.get(step, {})
    found = [
        Difference(name, value, recorded[name])
        for name, value in metrics.items()
        if name in recorded and name not in NOT_COMPARED and not _same(value, recorded[name])
    ]
    version = past.versions.get(step)
    if version is not None and version.checksum != checksum:
        found.append(Difference("weights", checksum, version.checksum))
    return found


def _same(one: Any, other: Any) -> bool:
    return bool(one == other or (one != one and other != other))  # both NaN


def _rows(path: Path) -> list[dict[str, Any]]:
    """Whole lines; one may be half-written right now."""
    rows = []
    for line in path.read_bytes().splitlines() if path.is_file() else []:
        try:
            rows.append(json.loads(line))
        except ValueError:
            continue
    return rows
