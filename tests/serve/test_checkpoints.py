"""The checkpoint that was meant is found, and what cannot be found is named."""

from __future__ import annotations

from pathlib import Path

import pytest

from troupe.protocol.errors import CheckpointError
from troupe.serve import checkpoints
from troupe.serve.checkpoints import CheckpointMissing


def test_a_version_a_name_a_folder_and_nothing_each_find_theirs(run: Path) -> None:
    folder = run / "checkpoints"
    assert checkpoints.find(run).version == 2
    assert checkpoints.find(run, 0).path == folder / "step-0"
    assert checkpoints.find(run, "step-1").path == folder / "step-1"
    assert checkpoints.find(run, str(folder / "step-1")).version == 1


def test_a_missing_one_is_named_with_those_that_are_there(run: Path) -> None:
    with pytest.raises(CheckpointMissing, match=r"no checkpoint 'step-9'.*step-0, step-1, step-2"):
        checkpoints.find(run, 9)


def test_a_run_without_any_says_how_to_get_one(tmp_path: Path) -> None:
    with pytest.raises(CheckpointMissing, match=r"has no checkpoint yet: .*--resume"):
        checkpoints.find(tmp_path)


def test_half_a_checkpoint_is_none(tmp_path: Path) -> None:
    (tmp_path / "checkpoints" / "step-3").mkdir(parents=True)
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        checkpoints.find(tmp_path)
