"""A learner's checkpoint on disk: complete or absent.

Layout: `model/` (a Hugging Face folder with the tokenizer, or a peft adapter), `optimiser.pt`, and `trainer.json` with
the step, the seed and the checksum of the published weights, which `read` proves.
"""

from __future__ import annotations

import json
import os
import pickle
import shutil
import uuid
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from troupe.learner.model import restore_model, save_model, tensors_of
from troupe.protocol.checksum import checksum_of
from troupe.protocol.errors import CheckpointError

FORMAT = 1


@dataclass(slots=True)
class State:
    """What `read` gives back beside the weights, which go straight into the model."""

    step: int
    optimiser: dict[str, Any]


def write(folder: Path, model: torch.nn.Module, source: Path, *, optimiser: dict[str, Any], step: int, seed: int) -> None:
    """Writes beside `folder`, makes it durable, then renames. `source`: the model folder with the tokenizer."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    partial = folder.parent / f".{folder.name}.{uuid.uuid4().hex[:8]}.partial"
    try:
        partial.mkdir()
        save_model(model, partial / "model", source)
        torch.save(optimiser, partial / "optimiser.pt")
        about = {"format": FORMAT, "step": step, "seed": seed, "checksum": checksum_of(tensors_of(model))}
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
    try:
        about = json.loads((folder / "trainer.json").read_text())
        state = torch.load(folder / "optimiser.pt", map_location="cpu", weights_only=True)
    except (OSError, ValueError, RuntimeError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"'{folder}' is no complete checkpoint: {error}") from error
    if about.get("format") != FORMAT:
        raise CheckpointError(f"'{folder}' has checkpoint format {about.get('format')!r}; this version reads {FORMAT}")
    if about["seed"] != seed:
        raise CheckpointError(f"'{folder}' was written by a run with seed {about['seed']}, this one has {seed}")
    restore_model(model, folder / "model")
    found = checksum_of(tensors_of(model))
    if found != about["checksum"]:
        raise CheckpointError(f"'{folder}' is damaged: checksum of its weights {found}, written {about['checksum']}")
    return State(step=int(about["step"]), optimiser=state)


def _sync(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
