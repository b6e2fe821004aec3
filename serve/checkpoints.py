"""Which checkpoint is meant: finds it in a run or on disk, without opening its weights.

Promises: what `find` returns was complete when it looked; what it cannot find it names, together with what is there.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

from troupe.actors.learner import checkpoints
from troupe.protocol.errors import CheckpointError


class CheckpointMissing(CheckpointError):
    """There is no such checkpoint."""


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """A checkpoint folder, the weight version in it and the checksum of its published weights as they were written."""

    path: Path
    version: int
    checksum: str

    @property
    def model_folder(self) -> Path:
        """Where its weights and its tokenizer lie."""
        return self.path / "model"


def find(run: Path, wanted: str | int | None = None) -> Checkpoint:
    """The checkpoint `wanted` of `run`: a version, "step-N", the path of a checkpoint folder, or None for the newest.

    Raises CheckpointMissing if there is none, CheckpointError if it cannot be read.
    """
    there = checkpoints(str(run / "checkpoints"))
    if wanted is None:
        if not there:
            raise CheckpointMissing(f"run '{run}' has no checkpoint yet: go on with `troupe train --resume {run}`")
        return _read(Path(there[-1][1]))
    name = f"step-{wanted}" if isinstance(wanted, int) else wanted
    for step, path in there:
        if name == f"step-{step}":
            return _read(Path(path))
    folder = Path(name).expanduser()
    if not isinstance(wanted, int) and folder.is_dir():
        return _read(folder)
    names = ", ".join(f"step-{step}" for step, _ in there) or "none"
    raise CheckpointMissing(f"no checkpoint '{name}' in run '{run}', nor a folder of that name; the run has: {names}")


def _read(folder: Path) -> Checkpoint:
    try:
        about = json.loads((folder / "trainer.json").read_text())
        return Checkpoint(folder.resolve(), int(about["step"]), str(about["checksum"]))
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"'{folder}' is no complete checkpoint: trainer.json cannot be read ({error})") from error
