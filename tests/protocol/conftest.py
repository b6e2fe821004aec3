"""What the protocol's tests share: trajectories drawn at random, and equality that looks into arrays."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from troupe.protocol.trajectory import ENVIRONMENT, POLICY, TEMPLATE, Failure, Fork, Node, Step, Task, Trajectory

INT32 = st.integers(-(2**31), 2**31 - 1)
INT64 = st.integers(-(2**63), 2**63 - 1)
TEXT = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
JSON = st.dictionaries(
    TEXT,
    st.recursive(st.none() | st.booleans() | INT64 | st.floats(allow_nan=False) | TEXT, st.lists, max_leaves=4),
    max_size=3,
)


@st.composite
def nodes(draw: st.DrawFn, index: int, steps: int) -> Node:
    provenance = np.array(draw(st.lists(st.sampled_from([TEMPLATE, POLICY, ENVIRONMENT]), max_size=6)), np.uint8)
    policy = int((provenance == POLICY).sum())
    return Node(
        parent=draw(st.integers(-1, index - 1)),
        role=draw(st.sampled_from(["system", "user", "assistant", "tool"])),
        step=draw(st.integers(-1, steps - 1)),
        tokens=np.array(draw(st.lists(INT32, min_size=len(provenance), max_size=len(provenance))), np.int32),
        provenance=provenance,
        logprobs=np.array(draw(st.lists(st.floats(width=32), min_size=policy, max_size=policy)), np.float32),
        versions=np.array(draw(st.lists(st.integers(0, 9), min_size=policy, max_size=policy)), np.int32),
        text=draw(TEXT),
        agent=draw(st.sampled_from(["main", "critic"])),
    )


def steps() -> st.SearchStrategy[Step]:
    return st.builds(
        Step,
        reward=st.floats(),
        parts=st.dictionaries(TEXT, st.floats(), max_size=2),
        state_key=TEXT,
        action=TEXT,
        invalid=st.booleans(),
        terminated=st.booleans(),
        truncated=st.booleans(),
        generate_s=st.floats(),
        env_s=st.floats(),
    )


@st.composite
def _trajectories(draw: st.DrawFn) -> Trajectory:
    rounds = draw(st.lists(steps(), max_size=3))
    return Trajectory(
        id=draw(TEXT),
        attempt=draw(INT32),
        group=draw(INT64),
        member=draw(INT32),
        kind=draw(st.sampled_from(["train", "eval"])),
        step=draw(INT64),
        task=draw(st.builds(Task, id=TEXT, env=TEXT, split=TEXT, seed=INT64, data=JSON)),
        status=draw(st.sampled_from(["completed", "failed", "cancelled"])),
        stop=draw(st.sampled_from(["terminated", "max_turns", "failed"])),
        nodes=[draw(nodes(index, len(rounds))) for index in range(draw(st.integers(0, 6)))],
        steps=rounds,
        reward=draw(st.floats()),
        success=draw(st.none() | st.booleans()),
        failure=draw(st.none() | st.builds(Failure, st.sampled_from(["infrastructure", "data"]), TEXT, TEXT, TEXT)),
        sampling=draw(JSON),
        pool=draw(TEXT),
        seed=draw(INT64),
        started_at=draw(st.floats()),
        seconds=draw(st.floats()),
        fork=draw(st.none() | st.builds(Fork, TEXT, st.integers(0, 2**31 - 1), st.integers(0, 2**31 - 1))),
    )


def _same(a: Any, b: Any) -> bool:
    """Equal in type and every bit that matters (a NaN equals a NaN)."""
    if isinstance(a, np.ndarray):
        return isinstance(b, np.ndarray) and a.dtype == b.dtype and a.shape == b.shape and a.tobytes() == b.tobytes()
    if type(a) is not type(b):
        return False
    if dataclasses.is_dataclass(a):
        return all(_same(getattr(a, f.name), getattr(b, f.name)) for f in dataclasses.fields(a))
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(_same(a[key], b[key]) for key in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(_same, a, b))
    return bool(a == b or (a != a and b != b))


@pytest.fixture(scope="session")
def trajectories() -> st.SearchStrategy[Trajectory]:
    return _trajectories()


@pytest.fixture(scope="session")
def same() -> Any:
    return _same
