"""A run folder, for reading: what was configured, measured and experienced. Safe while the run goes on.

Promises: nothing is written; only committed trajectories and complete lines are seen; a folder that is not a run, or a
file that is not there yet, is a `ConfigError` that says what to do.
"""

from __future__ import annotations

import json
import tomllib
from pathlib import Path
from typing import Any

import pyarrow as pa

from troupe.cluster.query import query
from troupe.protocol import stored
from troupe.protocol.errors import ConfigError, nearest


class Run:
    """The run in the folder `path`. Raises ConfigError if there is none."""

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        if not self.path.is_dir():
            beside = self.path.parent
            names = [p.name for p in beside.iterdir() if (p / "config.toml").exists()] if beside.is_dir() else []
            raise ConfigError(f"there is no run folder '{path}'." + nearest(self.path.name, names))
        if not (self.path / "config.toml").is_file():
            inside = sorted(p.name for p in self.path.iterdir() if (p / "config.toml").is_file())
            fix = f" Did you mean '{self.path / inside[-1]}'?" if inside else " Name a folder that `troupe train` made."
            raise ConfigError(f"'{path}' is not a run folder: it has no config.toml.{fix}")

    def __repr__(self) -> str:
        return f"Run({str(self.path)!r})"

    def trajectories(self) -> pa.Table:
        """All committed trajectories, mapped from disk: the columns of `protocol.arrow.SCHEMA`, and `trains`."""
        return stored.committed(self.path / "trajectories")

    def query(self, sql: str) -> pa.Table:
        """Answers SQL over the tables `trajectories`, `steps` and `nodes` (see `cluster.query`). Raises QueryError."""
        return query(sql, self.trajectories())

    def config(self) -> dict[str, Any]:
        """The resolved recipe that the run was started with."""
        try:
            return tomllib.loads((self.path / "config.toml").read_text(encoding="utf-8"))
        except tomllib.TOMLDecodeError as error:
            raise ConfigError(f"'{self.path / 'config.toml'}' is not TOML: {error}") from error

    def metrics(self) -> list[dict[str, Any]]:
        """One object a step, oldest first; empty before the first."""
        path = self.path / "metrics.jsonl"
        lines = path.read_bytes().splitlines(keepends=True) if path.exists() else []
        rows = []
        for number, line in enumerate(lines, 1):
            try:
                if line.endswith(b"\n"):  # else it is being written right now
                    rows.append(json.loads(line))
            except ValueError as error:
                raise ConfigError(f"'{path}' line {number} is not JSON: {error}") from error
        return rows

    def summary(self) -> dict[str, Any]:
        """What the run came to. Raises ConfigError while it has not ended."""
        path = self.path / "summary.json"
        if not path.exists():
            raise ConfigError(f"'{self.path}' has no summary.json: the run goes on, or stopped early (see metrics)")
        try:
            return dict(json.loads(path.read_text(encoding="utf-8")))
        except ValueError as error:
            raise ConfigError(f"'{path}' is not JSON: {error}") from error
