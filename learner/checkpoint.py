"""A learner's checkpoint on disk: complete or absent.

Layout: `model/` (a Hugging Face folder with the tokenizer, or a peft adapter), `optimiser.pt`, and `trainer.json` with
the step, the seed and the checksum of the published weights, which `read` proves. It holds whole tensors: any number of
ranks can write it (the first does) and read it (each from the same folder).
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from troupe.learner import ranks
from troupe.learner.model import restore_model, save_model, saved_weights, tensors_of
from troupe.protocol.checksum import checksum_of
from troupe.protocol.errors import CheckpointError

FORMAT = 2


@dataclass(slots=True)
class State:
    """What `read` gives back beside the weights, which go straight into the model."""

    step: int
    optimiser: dict[str, Any]


def write(folder: Path, model: torch.nn.Module, source: Path, *, optimiser: dict[str, Any], step: int, seed: int) -> None:
    """Writes beside `folder`, makes it durable, then renames. `source`: the model folder with the tokenizer."""
    weights, published, optimiser = saved_weights(model), tensors_of(model), ranks.gathered(optimiser)
    with ranks.together():
        if ranks.first():
            about = {"format": FORMAT, "step": step, "seed": seed, "checksum": checksum_of(published)}
            _write(folder, about, optimiser, lambda to: save_model(model, to, source, weights))


def _write(folder: Path, about: dict[str, Any], optimiser: dict[str, Any], save: Callable[[Path], None]) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.parent / f".{folder.name}.{uuid.uuid4().hex[:8]}.partial"
    try:
        partial.mkdir()
        save(partial / "model")
        torch.save(optimiser, partial / "optimiser.pt")
        (partial / "trainer.json").write_text(json.dumps(about, indent=2) + "\n")
        for path in [*partial.rglob("*"), partial]:
            _sync(path)
        if folder.exists():
            old = partial.with_suffix(".old")
            folder.rename(old)
            partial.rename(folder)
            shutil.rmtree(old)
        else:
            partial.rename(folder)
        _sync(folder.parent)
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def read(folder: Path, model: torch.nn.Module, *, seed: int) -> State:
    """Loads the weights into `model` and returns the rest.

    Raises CheckpointError if anything is missing, of another model or seed, or not what was written.
    """
    with ranks.together():
        try:
            about = json.loads((folder / "trainer.json").read_text())
            state = torch.load(folder / "optimiser.pt", map_location="cpu", weights_only=True)
        except (OSError, ValueError, RuntimeError, pickle.UnpicklingError) as error:
            raise CheckpointError(f"'{folder}' is no complete checkpoint: {error}") from error
        if about.get("format") != FORMAT:
            raise CheckpointError(f"'{folder}' has checkpoint format {about.get('format')!r}; this version reads {FORMAT}")
        if lacking := [name for name in ("seed", "step", "checksum") if name not in about]:
            raise CheckpointError(f"'{folder}' is no complete checkpoint: trainer.json has no {' or '.join(lacking)}")
        if about["seed"] != seed:
            raise CheckpointError(f"'{folder}' was written by a run with seed {about['seed']}, this one has {seed}")
        restore_model(model, folder / "model")
    published = tensors_of(model)
    with ranks.together():
        if ranks.first() and (found := checksum_of(published)) != about["checksum"]:
            raise CheckpointError(f"'{folder}' is damaged: checksum of its weights {found}, written {about['checksum']}")
    return State(step=int(about["step"]), optimiser=state)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
