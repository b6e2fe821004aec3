"""Law 5: gradients do not depend on packing, padding, micro-batch size or the order of trajectories."""

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

from troupe.learner.config import LearnerConfig, ModelConfig
from troupe.learner.optimiser import Optimiser
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
def make(tmp_path_factory: pytest.TempPathFactory) -> Make:
    """A trainer for a loss, an estimator and perhaps a reference; its other settings may be exchanged."""
    folder = make_tiny(tmp_path_factory.mktemp("tiny"), ["a b"], hidden=16, layers=1, heads=2, mlp=24)

    @cache
    def trainer(loss: str, advantage: str = "grpo", kl: bool = False) -> Trainer:
        config = LearnerConfig(loss=loss, advantage=advantage, kl={"coef": 0.1} if kl else None, device="cpu")
        return Trainer(config, ModelConfig(path=str(folder)), seed=0)

    return trainer


def gradient(trainer: Trainer, trajectories: list[Trajectory], capacity: int, **config: Any) -> torch.Tensor:
    """The gradients that reach the optimiser in a training step, one after another.

    They are taken away there, and the weights are moved a little instead, the same way each time, so that in a second pass
    ratios are not 1; at the end the weights are as they were.
    """
    start = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    before = trainer.config
    trainer.config = before.model_copy(update={"tokens_per_micro_batch": capacity, **config})
    seen: list[torch.Tensor] = []

    def taken(_: Optimiser, lr: float) -> float:
        seen.append(torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None]))
        trainer.model.zero_grad()
        generator = torch.Generator().manual_seed(len(seen))
        with torch.no_grad():
            for p in trainer.model.parameters():
                p.add_(torch.randn(p.shape, generator=generator) * 0.02)
        return 0.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Optimiser, "step", taken)
        patch.setattr("troupe.learner.critic.Critic.learn", lambda *_: 0.0)
        trainer.train(trajectories)
    trainer.config = before
    with torch.no_grad():
        for name, p in trainer.model.named_parameters():
            p.copy_(start[name])
    assert len(seen) == trainer.config.model_copy(update=config).passes
    return torch.cat(seen)


def same(one: torch.Tensor, other: torch.Tensor) -> bool:
    return bool((one - other).norm() <= 1e-5 * one.norm())


lengths = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=4)
members = st.tuples(st.sampled_from([0.0, 0.5, 1.0]), lengths, st.booleans())


@settings(max_examples=25, deadline=None)
@given(
    groups=st.lists(st.lists(members, min_size=1, max_size=3), min_size=1, max_size=2),
    capacity=st.integers(1, 200),
    entropy=st.sampled_from([0.0, 0.01]),
    kl=st.booleans(),
    advantage=st.sampled_from(["grpo", "gigpo", "turn_level", "treepo", "reinforce_pp", "gae", "bi_level_gae"]),
    order=st.randoms(use_true_random=False),
)
def test_gradients_do_not_depend_on_layout(
    make: Make,
    groups: list[list[tuple[float, Parts, bool]]],
    capacity: int,
    entropy: float,
    kl: bool,
    advantage: str,
    order: random.Random,
) -> None:
    # a pair with something to compare, so that there always is a gradient
    groups = [*groups, [(0.0, [(3, 4)], False), (1.0, [(2, 7), (1, 1)], True)]]
    made = [
        trajectory(10 * g + i, g, reward, parts, fork)
        for g, group in enumerate(groups)
        for i, (reward, parts, fork) in enumerate(group)
    ]
    trainer = make("ppo_clip", advantage, kl)
    reference = gradient(trainer, made, 1, entropy_coef=entropy)  # each sequence alone
    order.shuffle(made)
    assert same(reference, gradient(trainer, made, capacity, entropy_coef=entropy))


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
