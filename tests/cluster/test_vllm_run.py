"""A run whose generator samples with vLLM: its logprobs are the learner's, and a server that is killed is replaced."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.actors.engines.servers import VLLM
from tests.cluster.test_sglang_run import play

pytestmark = [pytest.mark.timeout(1800), pytest.mark.xdist_group("ray"), *VLLM.marks]  # the first limit counts


def test_a_run_samples_with_vllm_and_survives_the_death_of_its_server(tmp_path: Path) -> None:
    output = play(tmp_path / "run", "vllm", VLLM.python, "EngineCore")
    assert "generator-0 died" in output and "vLLM of generator-0" in output
