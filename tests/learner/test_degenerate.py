"""Batches that have broken other systems: a step on them is finite, or is refused before anything changes."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from troupe.learner.config import LearnerConfig, ModelConfig
from troupe.learner.errors import BatchError
from troupe.learner.trainer import Trainer
from troupe.protocol.checksum import checksum_of
from troupe.protocol.trajectory import Step, Trajectory

Make = Callable[..., Trajectory]

ADVANTAGES = (
    "grpo", "dr_grpo", "rloo", "grpo_loo", "reinforce", "reinforce_pp", "reinforce_pp_baseline", "gae", "bi_level_gae",
    "starpo", "gigpo", "turn_level", "pass_at_k", "treepo", "aspo",
)  # fmt: skip
LOSSES = ("ppo_clip", "gspo", "cispo", "reinforce", "sapo")
FILTERS = ("all", "informative", "top_std", "top_k", "top_p", "softmax_top_p", "min_p")


def groups(make: Make, *rewards: list[float]) -> list[Trajectory]:
    found: list[Trajectory] = []
    for group, members in enumerate(rewards):
        found += [make(len(found) + i, group, reward, turns=1 + i % 3) for i, reward in enumerate(members)]
    return found


def with_steps(t: Trajectory, *rewards: float) -> Trajectory:
    return replace(t, steps=[Step(reward=r, state_key="s") for r in rewards], reward=float(sum(rewards)))


def shifted(t: Trajectory, by: float) -> Trajectory:
    """Its tokens are told to have been sampled with other probabilities: of an engine that is far off, say."""
    nodes = [replace(n, logprobs=(n.logprobs + by).astype(np.float32)) for n in t.nodes]
    return replace(t, nodes=nodes)


BATCHES: dict[str, Callable[[Make], list[Trajectory]]] = {
    "all equal": lambda make: groups(make, [1.0] * 4, [1.0] * 4),
    "all zero": lambda make: groups(make, [0.0] * 4, [0.0] * 4),
    "equal but for rounding": lambda make: groups(make, [0.1 + 0.2, 0.3, 0.3, 0.1 + 0.2], [1.0, 1.0]),
    "seven at 0.35 and one 0": lambda make: groups(make, [0.35] * 7 + [0.0]),
    "a group of one": lambda make: groups(make, [1.0]),
    "groups of one": lambda make: groups(make, [1.0], [0.0], [-3.0]),
    "unequal groups": lambda make: groups(make, [1.0], [0.0, 1.0], [0.0] * 5 + [1.0]),
    "huge rewards": lambda make: groups(make, [1e15, -1e15, 0.0, 1.0], [1e15] * 3),
    "tiny differences": lambda make: groups(make, [1.0, 1.0 + 1e-12, 1.0], [1e-30, 0.0, 0.0]),
    "one trajectory with a reward, one without steps": lambda make: [
        make(0, 0, 1.0), replace(make(1, 0, 0.0), steps=[]), make(2, 0, 0.0)
    ],
    "rewards of steps 0, 1, 0 and 1 at the end": lambda make: [
        with_steps(make(0, 0, 0.0, turns=3), 0.0, 1.0, 1.0), with_steps(make(1, 0, 0.0, turns=3), 0.0, 0.0, 0.0)
    ],
    "an engine far off": lambda make: [
        shifted(t, by) for t, by in zip(groups(make, [1.0, 0.0, 1.0, 0.0]), (-40.0, 5.0, 0.0, -200.0), strict=True)
    ],
}  # fmt: skip


def step(tiny: str, batch: list[Trajectory], **config: Any) -> dict[str, float] | None:
    """The metrics of a step; None if it was refused, and then nothing had changed."""
    trainer = Trainer(LearnerConfig(**{"device": "cpu", "lr": 1e-3, **config}), ModelConfig(path=tiny), seed=0)
    before = checksum_of(trainer.tensors())
    try:
        told = trainer.train(batch)
    except BatchError:
        assert (trainer.step, checksum_of(trainer.tensors())) == (0, before)
        return None
    assert all(np.isfinite(array).all() for array in trainer.tensors().values())
    assert {name: value for name, value in told.items() if not math.isfinite(value)} == {}
    return told


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("advantage", ADVANTAGES)
def test_every_estimator_survives(tiny: str, make_trajectory: Make, name: str, advantage: str) -> None:
    assert step(tiny, BATCHES[name](make_trajectory), advantage=advantage) is not None


@pytest.mark.parametrize(
    "name", ["all equal", "seven at 0.35 and one 0", "a group of one", "huge rewards", "an engine far off"]
)
@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("correct", ["none", "tis", "icepop"])
def test_every_loss_survives(tiny: str, make_trajectory: Make, name: str, loss: str, correct: str) -> None:
    for level in ("token", "sequence"):
        told = step(tiny, BATCHES[name](make_trajectory), loss=loss, correct=correct, correct_level=level, entropy_coef=0.01)
        assert told is not None


@pytest.mark.parametrize("name", BATCHES)
@pytest.mark.parametrize("chosen", FILTERS)
def test_every_filter_survives(tiny: str, make_trajectory: Make, name: str, chosen: str) -> None:
    told = step(tiny, BATCHES[name](make_trajectory), filter=chosen, filter_value=1 if chosen == "top_k" else 0.25)
    assert told is not None and 0 <= told["kept_groups"] <= 1


@pytest.mark.parametrize("name", ["all equal", "all zero", "a group of one", "groups of one", "equal but for rounding"])
@pytest.mark.parametrize("advantage", ["grpo", "dr_grpo", "rloo", "grpo_loo", "reinforce_pp_baseline", "pass_at_k", "starpo"])
def test_where_nothing_can_be_compared_nothing_moves(tiny: str, make_trajectory: Make, name: str, advantage: str) -> None:
    told = step(tiny, BATCHES[name](make_trajectory), advantage=advantage)
    assert told is not None and told["grad_norm"] < 1e-9


@pytest.mark.parametrize("aggregate", ["token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum", "constant"])
def test_lengths_1_and_3_with_advantages_plus_and_minus_1_weigh_as_their_aggregate_says(
    tiny: str, make_trajectory: Make, aggregate: str, tmp_path: Any
) -> None:
    (tmp_path / "mine.py").write_text("def signs(group):\n    return [1.0 if r > 0 else -1.0 for r in group.returns]\n")
    short, long = make_trajectory(0, 0, 1.0, turns=1), make_trajectory(1, 0, 0.0, turns=1)
    batch = [_said(short, 1), _said(long, 3)]
    told = step(
        tiny, batch, advantage=f"{tmp_path / 'mine.py'}:signs", aggregate=aggregate, aggregate_length=4, correct="none"
    )  # fmt: skip
    # on-policy each token's loss is -A: -1 for the one token, +1 for each of the three
    expected = {"token-mean": 2 / 4, "sequence-mean-token-mean": 0.0, "sequence-mean-token-sum": 2 / 2, "constant": 2 / (2 * 4)}
    assert told is not None and told["loss"] == pytest.approx(expected[aggregate], abs=1e-6)


def _said(t: Trajectory, n: int) -> Trajectory:
    """The trajectory with an answer of `n` tokens."""
    last = t.nodes[-1]
    tokens = np.arange(20, 20 + n, dtype=np.int32)
    answer = replace(
        last, tokens=tokens, provenance=np.full(n, last.provenance[0], np.uint8),
        logprobs=np.full(n, -5.6, np.float32), versions=np.zeros(n, np.int32),
    )  # fmt: skip
    return replace(t, nodes=[*t.nodes[:-1], answer])


def _refused(tiny: str, batch: list[Trajectory], match: str, **config: Any) -> None:
    trainer = Trainer(LearnerConfig(**{"device": "cpu", **config}), ModelConfig(path=tiny), seed=0)
    with pytest.raises(BatchError, match=match):
        trainer.train(batch)


@pytest.mark.parametrize("other", [{"id": "x"}, {"env": "x"}, {"split": "x"}, {"seed": 99}])
def test_two_tasks_in_a_group_are_refused(tiny: str, make_trajectory: Make, other: dict[str, Any]) -> None:
    batch = groups(make_trajectory, [1.0, 0.0])
    batch[1] = replace(batch[1], task=replace(batch[1].task, **other))
    _refused(tiny, batch, "group 0 has trajectories of two tasks")


@pytest.mark.parametrize("reward", [1e39, -1e39, 1e31])
def test_a_reward_that_cannot_be_computed_with_is_refused(tiny: str, make_trajectory: Make, reward: float) -> None:
    _refused(tiny, groups(make_trajectory, [reward, 0.0]), "beyond ±1e\\+30")


@pytest.mark.parametrize(
    ("returns", "says"),
    [
        ("None", "gave None: return one array per trajectory"),
        ("1.0", "gave 1.0: return one array"),
        ("1 / 0", "failed: ZeroDivisionError: division by zero"),
        ("[1.0]", "gave 1 advantages for 2"),
        ("['x', 'y']", "is no number: 'x'"),
        ("[None, {}]", "."),
    ],
)
def test_a_users_estimator_that_is_wrong_is_named(
    tiny: str, make_trajectory: Make, tmp_path: Any, returns: str, says: str
) -> None:
    (tmp_path / "mine.py").write_text(f"def mine(group):\n    return {returns}\n")
    _refused(tiny, groups(make_trajectory, [1.0, 0.0]), says, advantage=f"{tmp_path / 'mine.py'}:mine")
