"""What else a step measures the policy by: its reference, a preference, a teacher."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest
import torch

from tests.learner.training import BF16, FULL, LORA, Make, logprobs_of, trainer
from troupe.learner.errors import BatchError
from troupe.learner.tiny import make_tiny
from troupe.learner.trainer import Trainer
from troupe.protocol.checksum import checksum_of
from troupe.protocol.errors import ConfigError
from troupe.protocol.trajectory import Trajectory


@pytest.mark.parametrize("kind", [FULL, LORA])
@pytest.mark.parametrize("where", ["loss", "reward"])
def test_a_divergence_holds_the_policy_near_its_reference(tiny: str, batch: list[Trajectory], kind: str, where: str) -> None:
    """The same steps with and without a (strong) price: with it, the policy stays where it was."""
    moved = []
    for coef in (0.0, 50.0):
        t = trainer(tiny, kind, kl={"coef": coef, "where": where, "estimator": "k1" if where == "reward" else "k3"})
        for _ in range(6):
            t.train(batch)
        moved.append(reference_divergence(t, batch))
    assert moved[1] < moved[0] / 2


def reference_divergence(t: Trainer, batch: list[Trajectory]) -> float:
    """k3 to the reference, as the trainer's own metric tells it."""
    t.config = t.config.model_copy(update={"kl": t.config.kl.model_copy(update={"where": "loss", "estimator": "k3"})})
    return t.train(batch)["kl_reference"]


def test_with_lora_the_reference_is_the_base_model_and_nothing_is_copied(tiny: str, batch: list[Trajectory]) -> None:
    t = trainer(tiny, LORA, kl={"coef": 0.1})
    first = t.train(batch)["kl_reference"]
    assert first == pytest.approx(0, abs=1e-6)  # a fresh adapter does nothing
    assert t.train(batch)["kl_reference"] > 1e-6
    assert t._reference is not None and t._reference.state_dict() == {}


def test_the_reference_can_be_reset(tiny: str, batch: list[Trajectory]) -> None:
    t = trainer(tiny, kl={"coef": 0.1, "reset_every": 2})
    assert [t.train(batch)["kl_reference"] > 1e-6 for _ in range(4)] == [False, True, False, True]


@pytest.mark.parametrize("kind", [FULL, BF16])
def test_with_the_reference_the_optimiser_can_be_reset(tiny: str, batch: list[Trajectory], kind: str) -> None:
    moments = {}
    for on in (False, True):
        t = trainer(tiny, kind, kl={"coef": 0.1, "reset_every": 2, "reset_optimiser": on})
        moments[on] = []
        for _ in range(5):
            t.train(batch)
            adam = t._optimiser.state_dict()["adam"]["state"]
            moments[on].append({int(state["step"]) for state in adam.values()})
    assert moments == {False: [{1}, {2}, {3}, {4}, {5}], True: [{1}, {2}, {1}, {2}, {1}]}


def test_an_optimiser_that_forgets_its_moments_keeps_what_a_narrower_type_cannot_hold(
    tiny: str, batch: list[Trajectory]
) -> None:
    t = trainer(tiny, BF16, lr=1e-5)
    t.train(batch)
    before = [master.clone() for master in t._optimiser.state_dict()["masters"]]
    t._optimiser.forget()
    after = t._optimiser.state_dict()
    assert not after["adam"]["state"] and all(torch.equal(a, b) for a, b in zip(before, after["masters"], strict=True))
    assert any((master != master.bfloat16().float()).any() for master in before)


def test_preferences_make_success_likelier_than_failure(tiny: str, make_trajectory: Make) -> None:
    good, bad = make_trajectory(0, 0, 1.0), make_trajectory(1, 0, 0.0)
    t = trainer(tiny, lr=1e-2)
    first = t.prefer([good, bad])
    assert first["dpo_loss"] == pytest.approx(math.log(2), rel=1e-5)  # the policy is its own reference
    for _ in range(8):
        last = t.prefer([good, bad])
    assert last["dpo_accuracy"] == 1 and last["dpo_loss"] < 0.6 and t.step == 9


def test_a_step_on_preferences_without_a_pair_teaches_nothing_and_counts(tiny: str, make_trajectory: Make) -> None:
    t = trainer(tiny, objective="preference", passes=2)
    before = checksum_of(t.tensors())
    told = t.train([make_trajectory(0, 0, 1.0), make_trajectory(1, 0, 1.0)])
    assert (told["pairs"], told["grad_norm"], told["success"], t.step) == (0, 0, 1, 1)
    assert checksum_of(t.tensors()) == before
    told = t.train([make_trajectory(0, 0, 1.0), make_trajectory(1, 0, 0.0)])
    assert told["pairs"] == 1 and told["grad_norm"] > 0 and checksum_of(t.tensors()) != before


def test_distillation_moves_the_policy_to_its_teacher(tiny: str, batch: list[Trajectory]) -> None:
    t, teacher = trainer(tiny, advantage="distill", lr=1e-2), trainer(tiny)
    batch = [x for x in batch if len(list(x.samples())) == 1]
    with torch.no_grad():
        for p in teacher.model.parameters():
            p.mul_(3)
    graded = {x.id: logprobs_of(teacher, x, 1.0) for x in batch}

    def gap() -> float:
        return float(np.mean([np.abs(logprobs_of(t, x, 1.0) - graded[x.id]).mean() for x in batch]))

    before = gap()
    for _ in range(15):
        t.train(batch, teacher=graded)
    assert gap() < before / 2
    with pytest.raises(BatchError, match="teacher has no logprobs for trajectory 'e0000'"):
        t.train(batch)
    with pytest.raises(BatchError, match="policy token"):
        t.train(batch, teacher={x.id: [0.0] for x in batch})


def test_a_teacher_that_is_named_grades_as_its_logprobs_given_with_the_batch_do(
    tiny: str, batch: list[Trajectory], tmp_path: Path
) -> None:
    teacher = trainer(tiny)
    with torch.no_grad():
        for p in teacher.model.parameters():
            p.mul_(3)
    teacher.save(tmp_path / "teacher")
    graded = {x.id: logprobs_of(teacher, x, x.sampling["temperature"]) for x in batch if len(list(x.samples())) == 1}
    batch = [x for x in batch if x.id in graded]
    named = trainer(tiny, advantage="distill", teacher=str(tmp_path / "teacher" / "model")).train(batch)
    given = trainer(tiny, advantage="distill").train(batch, teacher=graded)
    ungraded = trainer(tiny, advantage="grpo").train(batch)
    for name in ("loss", "grad_norm"):
        assert named[name] == pytest.approx(given[name], rel=1e-3) != pytest.approx(ungraded[name], rel=1e-3)


def test_a_teacher_of_another_vocabulary_is_refused(tiny: str, tmp_path: Path) -> None:
    other = make_tiny(tmp_path / "other", ["other words that make another vocabulary"], hidden=16, layers=1, heads=2, mlp=24)
    with pytest.raises(ConfigError, match="same tokenizer"):
        trainer(tiny, advantage="distill", teacher=str(other))
