"""The trajectory: branches are what the model saw, and provenance alone decides what is trained."""

from __future__ import annotations

from collections import Counter
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from troupe.protocol.trajectory import ENVIRONMENT, POLICY, TEMPLATE, Node, Task, Trajectory


def node(parent: int, tokens: list[int], provenance: list[int], logprob: float = -1.0, version: int = 0) -> Node:
    policy = provenance.count(POLICY)
    return Node(
        parent=parent,
        role="assistant",
        step=0,
        tokens=np.array(tokens, np.int32),
        provenance=np.array(provenance, np.uint8),
        logprobs=np.full(policy, logprob, np.float32),
        versions=np.full(policy, version, np.int32),
    )


def trajectory(*nodes: Node) -> Trajectory:
    task = Task("t", "env", "train", 0)
    return Trajectory("e", 0, 0, 0, "train", 1, task, "completed", "terminated", nodes=list(nodes))


def test_a_fork_makes_two_samples_and_trains_the_shared_node_once() -> None:
    forked = trajectory(
        node(-1, [1, 2], [TEMPLATE, POLICY], logprob=-0.5, version=3),
        node(0, [3], [POLICY], logprob=-0.25, version=4),
        node(0, [4, 5], [ENVIRONMENT, POLICY], logprob=-0.125, version=5),
    )
    assert list(forked.branches()) == [[0, 1], [0, 2]]
    first, second = forked.samples()
    assert first.tokens.tolist() == [1, 2, 3] and second.tokens.tolist() == [1, 2, 4, 5]
    assert first.mask.tolist() == [False, True, True]
    assert second.mask.tolist() == [False, False, False, True]
    assert first.logprobs.tolist() == [0, -0.5, -0.25] and second.logprobs.tolist() == [0, 0, 0, -0.125]
    assert first.versions.tolist() == [-1, 3, 4] and second.versions.tolist() == [-1, -1, -1, 5]
    assert (forked.policy_tokens, forked.versions) == (3, (3, 5))


def test_without_sampled_tokens_there_is_no_version_and_nothing_to_train() -> None:
    silent = trajectory(node(-1, [1, 2], [TEMPLATE, ENVIRONMENT]))
    assert silent.versions == (-1, -1) and silent.policy_tokens == 0
    assert not next(silent.samples()).mask.any()
    assert list(trajectory().samples()) == []


@settings(deadline=None)
@given(data=st.data())
def test_every_branch_is_a_path_from_a_root_to_a_leaf(data: st.DataObject, trajectories: Any) -> None:
    drawn = data.draw(trajectories)
    branches = list(drawn.branches())
    parents = {n.parent for n in drawn.nodes}
    assert [branch[-1] for branch in branches] == [i for i in range(len(drawn.nodes)) if i not in parents]
    for branch in branches:
        assert [drawn.nodes[i].parent for i in branch] == [-1, *branch[:-1]]
    assert {i for branch in branches for i in branch} == set(range(len(drawn.nodes)))


@settings(deadline=None)
@given(data=st.data())
def test_each_policy_token_is_trained_once_with_its_own_logprob_and_version(data: st.DataObject, trajectories: Any) -> None:
    drawn = data.draw(trajectories)
    trained: Counter[int] = Counter()
    for branch, sample in zip(drawn.branches(), drawn.samples(), strict=True):
        nodes = [drawn.nodes[i] for i in branch]
        assert sample.tokens.tolist() == [token for n in nodes for token in n.tokens]  # exactly what the model saw
        assert sample.steps.tolist() == [n.step for n in nodes for _ in n.tokens]
        at = 0
        for i, n in zip(branch, nodes, strict=True):
            span = slice(at, at := at + len(n.tokens))
            policy, mask = n.provenance == POLICY, sample.mask[span]
            if i in trained:
                assert not mask.any()
            else:
                assert (mask == policy).all()
                assert sample.logprobs[span][policy].tobytes() == n.logprobs.tobytes()
                assert sample.versions[span][policy].tolist() == n.versions.tolist()
            trained[i] += 1
        assert (sample.logprobs[~sample.mask] == 0).all() and (sample.versions[~sample.mask] == -1).all()
    assert sum(int(sample.mask.sum()) for sample in drawn.samples()) == drawn.policy_tokens


@pytest.mark.parametrize(
    ("field", "value", "reason"),
    [
        ("tokens", np.zeros(3, np.int32), "3 tokens but 2 provenances"),
        ("logprobs", np.zeros(0, np.float32), "1 policy tokens, 0 logprobs"),
        ("versions", np.zeros(2, np.int32), "2 versions"),
    ],
)
def test_arrays_that_contradict_each_other_are_found(field: str, value: Any, reason: str) -> None:
    good = node(-1, [1, 2], [TEMPLATE, POLICY])
    good.check()
    setattr(good, field, value)
    with pytest.raises(ValueError, match=reason):
        good.check()
