"""Checkpoints of the trainer: complete or absent, and what goes on from one is bit-identical."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.learner.training import BF16, FULL, LORA, Make, demonstrations, trainer
from troupe.learner.config import ModelConfig
from troupe.learner.model import load
from troupe.protocol.checksum import checksum_of
from troupe.protocol.errors import CheckpointError
from troupe.protocol.trajectory import Trajectory


@pytest.mark.parametrize("saved_at", [0, 2])
def test_preferences_go_on_from_a_checkpoint_against_the_same_reference(
    tiny: str, make_trajectory: Make, tmp_path: Path, saved_at: int
) -> None:
    batches = [[make_trajectory(10 * k, k, 1.0), make_trajectory(10 * k + 1, k, 0.0)] for k in range(4)]
    for pair in batches:
        pair[1].task = pair[0].task
    whole = trainer(tiny, objective="preference", lr=1e-2)
    for step, found in enumerate(batches):
        if step == saved_at:
            whole.save(tmp_path / "saved")
        whole.train(found)
    resumed = trainer(tiny, objective="preference", lr=1e-2)
    resumed.restore(tmp_path / "saved")
    for found in batches[saved_at:]:
        resumed.train(found)
    assert checksum_of(resumed.tensors()) == checksum_of(whole.tensors())


def test_a_reference_is_reset_on_time_also_in_a_step_without_pairs(tiny: str, make_trajectory: Make) -> None:
    good, bad = make_trajectory(0, 0, 1.0), make_trajectory(1, 0, 0.0)
    t = trainer(tiny, objective="preference", lr=1e-2, kl={"reset_every": 2})
    for found in ([good, bad], [good, bad], [good]):
        t.train(found)
    assert t.train([good, bad])["dpo_margin"] == 0  # the policy of step 2 is the reference, and nothing was learned since


def test_rolling_back_to_before_the_first_step_takes_the_reference_along(
    tiny: str, batch: list[Trajectory], tmp_path: Path
) -> None:
    t = trainer(tiny, lr=1e-2, kl={"coef": 0.1, "reset_every": 2})
    t.save(tmp_path / "start")
    for _ in range(3):
        t.train(batch)
    t.roll_back(tmp_path / "start")
    assert t.step == 3 and t.train(batch)["kl_reference"] == pytest.approx(0, abs=1e-9)


def test_another_decay_or_momentum_takes_effect_after_a_checkpoint(tiny: str, batch: list[Trajectory], tmp_path: Path) -> None:
    first = trainer(tiny)
    first.train(batch)
    first.save(tmp_path / "saved")
    sums = set()
    for config in ({}, {"weight_decay": 0.5}, {"betas": (0.5, 0.5)}):
        t = trainer(tiny, **config)
        t.restore(tmp_path / "saved")
        t.train(batch)
        sums.add(checksum_of(t.tensors()))
    assert len(sums) == 3


WITH_A_CRITIC = {"advantage": "gae", "critic": {"kind": "separate"}, "kl": {"coef": 0.1}}
WITH_RESETS = {"kl": {"coef": 0.1, "reset_every": 2, "reset_optimiser": True}}
WAYS = [(FULL, {}), (BF16, {}), (LORA, {})]
WAYS += [(kind, config) for kind in (FULL, BF16) for config in (WITH_A_CRITIC, WITH_RESETS)]


@pytest.mark.parametrize(("kind", "config"), WAYS)
def test_going_on_from_a_checkpoint_is_bit_identical(
    tiny: str, batch: list[Trajectory], scratch: Path, kind: str, config: Any
) -> None:
    whole = trainer(tiny, kind, passes=2, minibatches=2, warmup_steps=5, **config)
    whole.cold_start(*demonstrations(), steps=2, batch=4)
    for step in range(4):
        if step == 2:
            whole.save(scratch / "step-2")
        last = whole.train(batch)

    again = trainer(tiny, kind, passes=2, minibatches=2, warmup_steps=5, **config)
    again.restore(scratch / "step-2")
    assert again.step == 2
    for _ in range(2):
        metrics = again.train(batch)
    assert checksum_of(again.tensors()) == checksum_of(whole.tensors())
    del last["learn_s"], metrics["learn_s"]
    assert metrics == last


def test_a_checkpoint_loads_as_a_model_folder(tiny: str, batch: list[Trajectory], scratch: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from troupe.learner.model import tensors_of

    t = trainer(tiny)
    t.train(batch)
    t.save(scratch / "c")
    assert checksum_of(tensors_of(AutoModelForCausalLM.from_pretrained(scratch / "c/model"))) == checksum_of(t.tensors())
    assert AutoTokenizer.from_pretrained(scratch / "c/model")("go down")["input_ids"]


def test_a_checkpoint_with_lora_is_a_peft_adapter(tiny: str, batch: list[Trajectory], scratch: Path) -> None:
    from peft import PeftModel

    from troupe.learner.model import tensors_of

    t = trainer(tiny, LORA)
    t.train(batch)
    t.save(scratch / "c")
    loaded = PeftModel.from_pretrained(load(ModelConfig(path=tiny), seed=0), scratch / "c/model")
    assert checksum_of(tensors_of(loaded)) == checksum_of(t.tensors())


def test_a_checkpoint_is_complete_or_absent(
    tiny: str, batch: list[Trajectory], scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    t = trainer(tiny)
    t.save(scratch / "c")
    first = json.loads((scratch / "c/trainer.json").read_text())
    t.train(batch)

    def full(*_: Any) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("torch.save", full)
        for name in ("c", "d"):
            with pytest.raises(OSError, match="No space"):
                t.save(scratch / name)
    assert [p.name for p in scratch.iterdir()] == ["c"]
    assert json.loads((scratch / "c/trainer.json").read_text()) == first
    t.save(scratch / "c")
    assert [p.name for p in scratch.iterdir()] == ["c"]
    assert json.loads((scratch / "c/trainer.json").read_text())["step"] == 1


def test_a_wrong_checkpoint_is_refused(tiny: str, batch: list[Trajectory], scratch: Path) -> None:
    t = trainer(tiny)
    t.save(scratch / "c")
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        trainer(tiny).restore(scratch / "none")
    with pytest.raises(CheckpointError, match="seed"):
        trainer(tiny, seed=1).restore(scratch / "c")
    with pytest.raises(CheckpointError, match=r"without model\.lora"):
        trainer(tiny, LORA).restore(scratch / "c")
    trainer(tiny, LORA).save(scratch / "l")
    with pytest.raises(CheckpointError, match="LoRA adapter"):
        trainer(tiny).restore(scratch / "l")
    weights = scratch / "c/model/model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(CheckpointError, match="damaged"):
        trainer(tiny).restore(scratch / "c")
