"""Ray of a run on this machine: started once more if it did not come up, and gone afterwards, folders included."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import ray

from troupe.cluster import launch
from troupe.protocol.errors import TroupeError


@pytest.mark.parametrize("failures", [0, 1, 2])
def test_a_busy_machine_gets_a_second_try_and_then_one_line(monkeypatch: Any, tmp_path: Path, failures: int) -> None:
    left = [Exception("The current node timed out during startup.\nmore")] * failures
    monkeypatch.setattr(launch.tempfile, "tempdir", str(tmp_path))
    monkeypatch.setattr(launch, "_LONGEST_TMPDIR", 999)

    def init(**_: Any) -> None:
        if left:
            raise left.pop()

    monkeypatch.setattr(ray, "init", init)
    monkeypatch.setattr(ray, "shutdown", lambda: None)
    monkeypatch.setattr(ray, "get_runtime_context", lambda: SimpleNamespace(gcs_address="here"))
    if failures < 2:
        with launch.ray_session(None, "a run") as address:
            assert address == "here" and len(list(tmp_path.iterdir())) == 1
    else:
        with (
            pytest.raises(
                TroupeError, match=r"^Ray did not start on this machine: .* timed out during startup\. Is it very busy"
            ),
            launch.ray_session(None, "a run"),
        ):
            pass
    assert not left and not list(tmp_path.iterdir())
