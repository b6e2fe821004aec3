"""A tiny policy and trajectories for it, as the learner's tests use them."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from troupe.learner.tiny import make_tiny
from troupe.protocol.trajectory import ENVIRONMENT, POLICY, TEMPLATE, Node, Step, Task, Trajectory

VERSION = 0


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Folder of a model of a few thousand parameters."""
    folder = tmp_path_factory.mktemp("tiny")
    return str(make_tiny(folder, ["go up down left right"], hidden=16, layers=2, heads=2, mlp=24, context=256))


def node(rng: np.random.Generator, parent: int, n: int, provenance: int, step: int = -1) -> Node:
    k = n if provenance == POLICY else 0
    return Node(
        parent=parent,
        role=("system", "assistant", "user")[provenance],
        step=step,
        tokens=rng.integers(0, 260, n).astype(np.int32),
        provenance=np.full(n, provenance, np.uint8),
        logprobs=rng.normal(-5.6, 0.1, k).astype(np.float32),
        versions=np.full(k, VERSION, np.int32),
    )


def trajectory(index: int, group: int, reward: float, *, turns: int = 2, forked: bool = False) -> Trajectory:
    """System prompt, then `turns` of observation and action. `forked`: a second branch leaves the first action."""
    rng = np.random.default_rng([index, 7])
    nodes = [node(rng, -1, int(rng.integers(2, 6)), TEMPLATE)]
    for turn in range(turns):
        nodes.append(node(rng, len(nodes) - 1, int(rng.integers(1, 8)), ENVIRONMENT, turn))
        nodes.append(node(rng, len(nodes) - 1, int(rng.integers(1, 8)), POLICY, turn))
    if forked:
        nodes.append(node(rng, 2, 3, ENVIRONMENT, 1))
        nodes.append(node(rng, len(nodes) - 1, 4, POLICY, 1))
    return Trajectory(
        id=f"e{index:04d}",
        attempt=0,
        group=group,
        member=index,
        kind="train",
        step=1,
        task=Task("t/0", "world", "train", group),
        status="completed",
        stop="terminated",
        nodes=nodes,
        steps=[Step() for _ in range(turns)],
        reward=reward,
        sampling={"temperature": 1.0},
    )


@pytest.fixture(scope="session")
def make_trajectory() -> Callable[..., Trajectory]:
    return trajectory


@pytest.fixture
def batch() -> list[Trajectory]:
    """Three groups of four: two with something to learn from (one of its trajectories forks), one all equal."""
    rewards = [1.0, 0.0, 0.0, 0.0, 0.3, 0.9, 0.9, -1.0, 1.0, 1.0, 1.0, 1.0]
    return [trajectory(i, i // 4, r, turns=1 + i % 3, forked=i == 5) for i, r in enumerate(rewards)]


@pytest.fixture
def scratch(tmp_path: Path) -> Path:
    return tmp_path
