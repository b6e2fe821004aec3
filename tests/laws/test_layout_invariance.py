"""Law 5: gradients do not depend on packing, padding, micro-batch size or the order of trajectories."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from troupe.learner.config import LearnerConfig, ModelConfig
from troupe.learner.optimiser import Optimiser
from troupe.learner.tiny import make_tiny
from troupe.learner.trainer import Trainer
from troupe.protocol.trajectory import ENVIRONMENT, POLICY, TEMPLATE, Node, Task, Trajectory

Parts = list[tuple[int, int]]


def trajectory(index: int, group: int, reward: float, parts: Parts, fork: bool) -> Trajectory:
    """A root, then (observation, action) pairs of the given numbers of tokens; `fork`: one more branch from the first."""
    rng = np.random.default_rng(index)

    def node(parent: int, n: int, provenance: int) -> Node:
        k = n if provenance == POLICY else 0
        return Node(
            parent=parent,
            role="x",
            step=-1,
            tokens=rng.integers(0, 250, n).astype(np.int32),
            provenance=np.full(n, provenance, np.uint8),
            logprobs=rng.normal(-5.6, 0.5, k).astype(np.float32),
            versions=np.zeros(k, np.int32),
        )

    nodes = [node(-1, 3, TEMPLATE)]
    for observed, acted in parts:
        nodes.append(node(len(nodes) - 1, observed, ENVIRONMENT))
        nodes.append(node(len(nodes) - 1, acted, POLICY))
    if fork:
        nodes.append(node(2, 4, ENVIRONMENT))
        nodes.append(node(len(nodes) - 1, 5, POLICY))
    task = Task("t", "w", "train", group)
    return Trajectory(f"e{index}", 0, group, index, "train", 1, task, "completed", "terminated", nodes, reward=reward)


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    folder = make_tiny(tmp_path_factory.mktemp("tiny"), ["a b"], hidden=16, layers=2, heads=2, mlp=24)
    return Trainer(LearnerConfig(device="cpu"), ModelConfig(path=str(folder)), seed=0)


def gradient(trainer: Trainer, trajectories: list[Trajectory], capacity: int, entropy: float) -> torch.Tensor:
    """The gradient that reaches the optimiser in a training step; it is taken away there, so the weights stay."""
    trainer.config = LearnerConfig(tokens_per_micro_batch=capacity, entropy_coef=entropy, device="cpu")
    seen: list[torch.Tensor] = []

    def taken(_: Optimiser, lr: float) -> float:
        seen.append(torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None]))
        trainer.model.zero_grad()
        return 0.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Optimiser, "step", taken)
        trainer.train(trajectories)
    (only,) = seen
    return only


lengths = st.lists(st.tuples(st.integers(1, 12), st.integers(1, 12)), min_size=1, max_size=4)
members = st.tuples(st.sampled_from([0.0, 0.5, 1.0]), lengths, st.booleans())


@settings(max_examples=25, deadline=None)
@given(
    groups=st.lists(st.lists(members, min_size=1, max_size=4), min_size=1, max_size=3),
    capacity=st.integers(1, 200),
    entropy=st.sampled_from([0.0, 0.01]),
    order=st.randoms(use_true_random=False),
)
def test_gradients_do_not_depend_on_layout(
    trainer: Trainer,
    groups: list[list[tuple[float, Parts, bool]]],
    capacity: int,
    entropy: float,
    order: np.random.Generator,
) -> None:
    # a pair with something to compare, so that there always is a gradient
    groups = [*groups, [(0.0, [(3, 4)], False), (1.0, [(2, 7), (1, 1)], True)]]
    made = [
        trajectory(10 * g + i, g, reward, parts, fork)
        for g, group in enumerate(groups)
        for i, (reward, parts, fork) in enumerate(group)
    ]
    reference = gradient(trainer, made, 1, entropy)  # each sequence alone
    order.shuffle(made)
    other = gradient(trainer, made, capacity, entropy)
    assert (other - reference).norm() <= 1e-5 * reference.norm()
