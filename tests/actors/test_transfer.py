"""Weights on their way: to the byte, no more than what changed, and nothing left behind."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pytest

from troupe.actors import transfer
from troupe.actors.learner import Learner
from troupe.actors.settings import GeneratorSettings
from troupe.actors.simulated import Simulation
from troupe.learner.config import LearnerConfig, LoraSettings, ModelConfig
from troupe.learner.model import arrays_of, load, parameters_of
from troupe.learner.tiny import make_tiny
from troupe.learner.trainer import Trainer
from troupe.protocol.checksum import checksum_of
from troupe.protocol.errors import ActorLost, CheckpointError
from troupe.protocol.messages import ColdStart, Demonstrations


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("tiny"), ["go up"], hidden=64, layers=4, heads=2))


def published(model: ModelConfig, outbox: Path, way: str) -> tuple[Any, Any]:
    """What a real learner sends as version 0, as a generator gets it: (message, tensors)."""
    with Simulation(1) as simulation:

        async def main(context: Any) -> Any:
            def make() -> Trainer:
                return Trainer(LearnerConfig(device="cpu"), model, seed=0)

            await context.spawn("learner", Learner, make_trainer=make, folder=str(outbox / "none"), way=way, outbox=str(outbox))
            trained = await context.ref("learner", Learner).cold_start(ColdStart(Demonstrations([], [], 0.0), 0, 1))
            return trained.weights, await transfer.fetch(context.blobs, trained.weights)

        weights, tensors = simulation.run(main)
        return weights, arrays_of(tensors) if way == "gloo" else tensors


@pytest.mark.parametrize("way", ["object_store", "disk", "gloo"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_arrives_is_what_was_sent_to_the_byte(tiny: str, tmp_path: Path, way: str, dtype: Any) -> None:
    model = ModelConfig(path=tiny, dtype=dtype)
    weights, tensors = published(model, tmp_path, way)
    assert checksum_of(tensors) == weights.checksum
    assert {array.dtype for array in tensors.values()} == {np.dtype(np.int16 if dtype == "bfloat16" else np.float32)}
    own = parameters_of(load(model, seed=0))
    assert tensors.keys() == own.keys()
    assert weights.size == sum(p.numel() * p.element_size() for p in own.values())


@pytest.mark.parametrize("way", ["object_store", "disk", "gloo"])
def test_with_lora_only_the_adapter_travels(tiny: str, tmp_path: Path, way: str) -> None:
    whole, _ = published(ModelConfig(path=tiny), tmp_path, way)
    weights, tensors = published(ModelConfig(path=tiny, lora=LoraSettings(rank=2)), tmp_path, way)
    assert all(".lora_" in name for name in tensors)
    assert weights.size == sum(array.nbytes for array in tensors.values()) < whole.size / 10
    if way == "disk":
        assert os.path.getsize(tmp_path / "version-0.safetensors") < weights.size + 64 * 1024


def test_a_disk_keeps_the_newest_two_and_those_of_a_learner_before_until_it_has_sent_two(tmp_path: Path) -> None:
    with Simulation(1) as simulation:

        async def main(context: Any) -> list[list[str]]:
            left, folder = [], str(tmp_path / "weights")
            for versions in [(8, 9, 10), (7, 8, 9)]:
                way = transfer.Disk(context.blobs, folder)
                for version in versions:
                    way.send(version, {"w": np.full(3, version, np.float32)})
                    left.append(sorted(int(Path(name).stem.removeprefix("version-")) for name in os.listdir(folder)))
            return left

        assert simulation.run(main) == [[8], [8, 9], [9, 10], [7, 9, 10], [7, 8], [8, 9]]


@pytest.mark.parametrize("damage", ["it is gone", "it is cut"])
def test_a_file_that_cannot_be_read_is_named(tmp_path: Path, damage: str) -> None:
    with Simulation(1) as simulation:

        async def main(context: Any) -> Any:
            way = transfer.Disk(context.blobs, str(tmp_path))
            weights = await transfer.pack(context.blobs, way, 3, {"w": np.zeros(3, np.float32)})
            file = tmp_path / "version-3.safetensors"
            if damage == "it is gone":
                file.unlink()
            else:
                file.write_bytes(file.read_bytes()[:-5])
            return await transfer.fetch(context.blobs, weights)

        words = "is not there: .* does not see the run folder" if damage == "it is gone" else "cannot be read"
        with pytest.raises((CheckpointError, ActorLost), match=rf"version-3\.safetensors' {words}"):
            simulation.run(main)


def test_every_way_that_can_be_chosen_exists() -> None:
    assert set(transfer.WAYS) == set(get_args(GeneratorSettings.model_fields["transfer"].annotation))
