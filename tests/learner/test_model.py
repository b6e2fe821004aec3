"""Weights as named arrays: what goes out comes in again, proved by checksum."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

from troupe.learner.config import LoraSettings, ModelConfig
from troupe.learner.model import arrays_of, beside, exchange, load, load_tensors, tensors_of
from troupe.protocol.checksum import checksum_of
from troupe.protocol.errors import CheckpointError, ConfigError

KINDS = [("float32", False), ("bfloat16", False), ("float32", True), ("bfloat16", True)]


def config(path: str, dtype: str, lora: bool) -> ModelConfig:
    return ModelConfig(path=path, dtype=dtype, lora=LoraSettings(rank=2) if lora else None)  # type: ignore[arg-type]


@pytest.mark.parametrize(("dtype", "lora"), KINDS)
def test_loaded_tensors_have_the_checksum_of_those_that_were_sent(tiny: str, dtype: str, lora: bool) -> None:
    learner, engine = (load(config(tiny, dtype, lora), seed=s) for s in (0, 1))
    sent = {name: array.copy() for name, array in tensors_of(learner).items()}
    assert checksum_of(tensors_of(engine)) != checksum_of(sent)
    for array in sent.values():
        array.flags.writeable = False  # as it comes out of an object store
    load_tensors(engine, sent)
    assert checksum_of(tensors_of(engine)) == checksum_of(sent)
    assert {str(a.dtype) for a in sent.values()} == {"int16" if dtype == "bfloat16" and not lora else "float32"}


@pytest.mark.parametrize(("dtype", "lora"), KINDS)
def test_tensors_that_were_given_away_become_the_parameters_and_arrays_never_do(tiny: str, dtype: str, lora: bool) -> None:
    learner, engine = (load(config(tiny, dtype, lora), seed=s) for s in (0, 1))
    sent, before = tensors_of(learner), {name: array.copy() for name, array in tensors_of(engine).items()}
    given = {name: tensor.clone() for name, tensor in beside(learner, sent).items()}
    memory = {name: tensor.data_ptr() for name, tensor in given.items()}
    copies = beside(engine, given)
    assert checksum_of(tensors_of(engine)) == checksum_of(before)
    exchange(engine, copies)
    assert checksum_of(tensors_of(engine)) == checksum_of(sent) and checksum_of(arrays_of(copies)) == checksum_of(before)
    assert {name: array.ctypes.data for name, array in tensors_of(engine).items()} == memory
    assert not {array.ctypes.data for array in sent.values()} & {t.data_ptr() for t in beside(engine, sent).values()}

    name = next(iter(given))
    with pytest.raises(CheckpointError, match=r"float16.* where the model has"):
        beside(engine, given | {name: given[name].to(torch.float16)})


def test_with_lora_only_adapters_are_published(tiny: str) -> None:
    names = tensors_of(load(config(tiny, "float32", True), seed=0))
    assert names and all(".lora_" in name and ".default" not in name for name in names)


def test_tied_weights_are_published_once(tiny: str) -> None:
    assert "lm_head.weight" not in tensors_of(load(config(tiny, "float32", False), seed=0))


def test_the_seed_decides_the_weights_and_the_global_generator_is_left_alone(tiny: str) -> None:
    torch.manual_seed(5)
    before = torch.random.get_rng_state()
    a, b, c = (checksum_of(tensors_of(load(config(tiny, "float32", lora=True), seed=s))) for s in (0, 0, 1))
    assert a == b != c
    assert torch.equal(before, torch.random.get_rng_state())


def test_tensors_of_another_model_are_refused_and_nothing_changes(tiny: str) -> None:
    model = load(config(tiny, "float32", False), seed=0)
    before = checksum_of(tensors_of(model))
    wrong = {name: array.copy() + 1 for name, array in tensors_of(model).items()}
    wrong["model.norm.weight"] = np.zeros(3, np.float32)
    wrong["extra"] = wrong.pop("model.embed_tokens.weight")
    with pytest.raises(CheckpointError) as error:
        load_tensors(model, wrong)
    for part in ("missing 'model.embed_tokens.weight'", "unexpected 'extra'", "'model.norm.weight' is float32[3]"):
        assert part in str(error.value)
    assert checksum_of(tensors_of(model)) == before


def test_a_folder_that_is_no_model_is_named(tmp_path: Path, tiny: str) -> None:
    with pytest.raises(ConfigError, match="does not exist"):
        load(ModelConfig(path=str(tmp_path / "none")), seed=0)
    with pytest.raises(ConfigError, match=r"no config\.json"):
        load(ModelConfig(path=str(tmp_path)), seed=0)
    (tmp_path / "config.json").write_text("{not json")
    with pytest.raises(ConfigError, match="cannot be loaded"):
        load(ModelConfig(path=str(tmp_path)), seed=0)
    with pytest.raises(ConfigError, match="nowhere"):
        load(ModelConfig(path=tiny, lora=LoraSettings(targets=["nowhere"])), seed=0)
