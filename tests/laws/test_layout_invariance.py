"""Law 5: gradients do not depend on packing, padding, micro-batch size, number of ranks or the order of trajectories."""

from __future__ import annotations

import random
from collections.abc import Callable
from functools import cache
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.learner.probe import gradients
from troupe.learner.config import LearnerConfig, ModelConfig
from troupe.learner.ranked import Ranked
from troupe.learner.tiny import make_tiny
from troupe.learner.trainer import Trainer
from troupe.protocol.trajectory import ENVIRONMENT, POLICY, TEMPLATE, Node, Step, Task, Trajectory

Parts = list[tuple[int, int]]


def trajectory(index: int, group: int, reward: float, parts: Parts, fork: bool) -> Trajectory:
    """A root, then (observation, action) pairs of the given numbers of tokens; `fork`: one more branch from the first."""
    rng = np.random.default_rng(index)

    def node(parent: int, n: int, provenance: int, step: int = -1) -> Node:
        k = n if provenance == POLICY else 0
        return Node(
            parent=parent,
            role="x",
            step=step,
            tokens=rng.integers(0, 250, n).astype(np.int32),
            provenance=np.full(n, provenance, np.uint8),
            logprobs=rng.normal(-5.6, 0.5, k).astype(np.float32),
            versions=np.zeros(k, np.int32),
        )

    nodes = [node(-1, 3, TEMPLATE)]
    for turn, (observed, acted) in enumerate(parts):
        nodes.append(node(len(nodes) - 1, observed, ENVIRONMENT, turn))
        nodes.append(node(len(nodes) - 1, acted, POLICY, turn))
    if fork:
        nodes.append(node(2, 4, ENVIRONMENT))
        nodes.append(node(len(nodes) - 1, 5, POLICY))
    task = Task("t", "w", "train", group)
    steps = [Step(state_key="s" if turn % 2 else "", reward=0.1 * turn) for turn in range(len(parts))]
    return Trajectory(f"e{index}", 0, group, index, "train", 1, task, "completed", "terminated", nodes, steps, reward)


Make = Callable[..., Trainer]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("tiny"), ["a b"], hidden=16, layers=1, heads=2, mlp=24))


@pytest.fixture(scope="module")
def make(folder: str) -> Make:
    """A trainer for a loss, an estimator and perhaps a reference; its other settings may be exchanged."""

    @cache
    def trainer(loss: str, advantage: str = "grpo", kl: bool = False) -> Trainer:
        return Trainer(settings_of(loss, advantage, kl), ModelConfig(path=folder), seed=0)

    return trainer


def settings_of(loss: str, advantage: str, kl: bool) -> LearnerConfig:
    return LearnerConfig(loss=loss, advantage=advantage, kl={"coef": 0.1} if kl else None, device="cpu")


def gradient(trainer: Trainer, trajectories: list[Trajectory], capacity: int, **config: Any) -> torch.Tensor:
    """The policy's gradients in all optimiser steps of a training step, one after another."""
    return gradients(trainer, trajectories, tokens_per_micro_batch=capacity, **config)["policy"]


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool((one - other).norm() <= 1e-5 * one.norm())


lengths = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=4)
members = st.tuples(st.sampled_from([0.0, 0.5, 1.0]), lengths, st.booleans())


groups_of = st.lists(st.lists(members, min_size=1, max_size=3), min_size=1, max_size=2)
Groups = list[list[tuple[float, Parts, bool]]]
ESTIMATORS = ["grpo", "gigpo", "turn_level", "treepo", "reinforce_pp", "gae", "bi_level_gae"]


def trajectories_of(groups: Groups) -> list[Trajectory]:
    # and a pair with something to compare, so that there always is a gradient
    groups = [*groups, [(0.0, [(3, 4)], False), (1.0, [(2, 7), (1, 1)], True)]]
    return [
        trajectory(10 * g + i, g, reward, parts, fork)
        for g, group in enumerate(groups)
        for i, (reward, parts, fork) in enumerate(group)
    ]


@settings(max_examples=25, deadline=None)
@given(
    groups=groups_of,
    capacity=st.integers(1, 200),
    entropy=st.sampled_from([0.0, 0.01]),
    kl=st.booleans(),
    advantage=st.sampled_from(ESTIMATORS),
    order=st.randoms(use_true_random=False),
)
def test_gradients_do_not_depend_on_layout(
    make: Make, groups: Groups, capacity: int, entropy: float, kl: bool, advantage: str, order: random.Random
) -> None:
    made = trajectories_of(groups)
    trainer = make("ppo_clip", advantage, kl)
    reference = gradient(trainer, made, 1, entropy_coef=entropy)  # each sequence alone
    order.shuffle(made)
    assert same(reference, gradient(trainer, made, capacity, entropy_coef=entropy))


@pytest.mark.xdist_group("ranks")
@settings(max_examples=10, deadline=None)
@given(
    groups=groups_of,
    capacity=st.integers(1, 200),
    entropy=st.sampled_from([0.0, 0.01]),
    kl=st.booleans(),
    advantage=st.sampled_from(["grpo", "gae"]),
    loss=st.sampled_from(["ppo_clip", "gspo"]),
)
def test_gradients_do_not_depend_on_the_number_of_ranks(
    make: Make,
    two_ranks: Ranked,
    folder: str,
    groups: Groups,
    capacity: int,
    entropy: float,
    kl: bool,
    advantage: str,
    loss: str,
) -> None:
    made = trajectories_of(groups)
    config = {"tokens_per_micro_batch": capacity, "entropy_coef": entropy, "passes": 2}
    alone = gradients(make(loss, advantage, kl), made, **config)
    name = two_ranks.call("trainer", settings_of(loss, advantage, kl), ModelConfig(path=folder))
    shared = two_ranks.call("gradients", name, made, **config)
    assert alone.keys() == shared.keys()
    for whose, found in alone.items():
        assert same(found, torch.tensor(shared[whose])), whose


CORRECTIONS: list[dict[str, Any]] = [
    {"correct": "none"},
    {"correct": "none", "ratio": "rollout"},
    {"correct": "tis"},
    {"correct": "icepop"},
    {"correct": "decoupled"},
    {"correct": "tis", "correct_level": "sequence"},
    {"correct": "icepop", "correct_level": "sequence", "icepop_low": 0.0, "icepop_high": 1e6},
]


@pytest.mark.parametrize("aggregate", ["token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum", "constant"])
@pytest.mark.parametrize("loss", ["ppo_clip", "gspo", "cispo", "sapo", "reinforce"])
def test_every_loss_aggregate_and_correction_is_blind_to_layout(make: Make, loss: str, aggregate: str) -> None:
    made = [
        trajectory(0, 0, 0.0, [(3, 1)], False),
        trajectory(1, 0, 1.0, [(2, 3), (1, 4)], True),
        trajectory(2, 1, 0.5, [(5, 9)], False),
        trajectory(3, 1, 0.0, [(1, 2), (1, 1), (4, 3)], True),
    ]
    trainer = make(loss)
    plain = None
    for correction in CORRECTIONS:
        if loss in ("gspo", "reinforce") and correction["correct"] == "decoupled":
            continue  # refused
        config = {"aggregate": aggregate, "aggregate_length": 16, "passes": 1 if loss == "reinforce" else 2, **correction}
        reference = gradient(trainer, made, 1, **config)
        assert same(reference, gradient(trainer, made[::-1], 40, **config)), correction
        plain = reference if plain is None else plain
        if correction["correct"] != "none":
            assert not same(plain, reference), f"{correction} does nothing"
