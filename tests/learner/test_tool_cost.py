"""OTC-PO's reward, against numbers worked out by hand."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from troupe.learner.advantages import Group, find
from troupe.learner.batch import assemble, credit
from troupe.learner.config import LearnerConfig, OverlongSettings, ToolCostSettings
from troupe.learner.rewards import return_of, scales_of, turn_rewards
from troupe.learner.tool_cost import efficiency, scales
from troupe.protocol.trajectory import Call, Trajectory

Make = Callable[..., Trajectory]


@pytest.mark.parametrize(
    ("m", "n", "smooth", "expected"),
    [
        (0, 0, 1.0, 1.0),
        (1, 0, 1.0, 0.5),  # cos(π/3)
        (1, 0, 2.0, math.sqrt(0.5)),  # cos(π/4)
        (2, 0, 2.0, 0.5),  # cos(2π/6)
        (3, 3, 1.0, 1.0),
        (2, 1, 1.0, math.sqrt(0.75)),  # f = 4/3: sin(2π/3)
        (3, 1, 1.0, math.sqrt(0.5)),  # f = 3/2: sin(3π/4)
        (5, 1, 1.0, 0.5),  # f = 5/3: sin(5π/6)
        (10, 2, 1.0, 0.5),  # f = 10/3, n = 2: the same
    ],
)
def test_the_tool_reward_of_m_calls_where_n_would_do(m: int, n: int, smooth: float, expected: float) -> None:
    assert efficiency(m, n, smooth) == pytest.approx(expected, abs=1e-12)
    assert m != n or efficiency(m, n, smooth) == 1.0


def test_more_calls_never_pay() -> None:
    for n in range(4):
        paid = [efficiency(m, n, 1.0) for m in range(n, 40)]
        assert paid == sorted(paid, reverse=True) and all(0 < r <= 1 for r in paid)


def called(make: Make, index: int, reward: float, calls: list[int], success: bool | None = None) -> Trajectory:
    t = make(index, 0, reward, turns=len(calls))
    for step, n in zip(t.steps, calls, strict=True):
        step.calls = [Call("c", "f", "{}", "ok")] * n
    t.success = success
    return t


def test_the_fewest_calls_are_those_of_a_success_of_the_group_and_failures_keep_what_they_got(make_trajectory: Make) -> None:
    group = [
        called(make_trajectory, 0, 1.0, [2, 0]),
        called(make_trajectory, 1, 0.0, [0, 0]),  # no call at all, and no success: not the fewest
        called(make_trajectory, 2, -1.0, [7, 0]),
        called(make_trajectory, 3, 3.0, [5, 5]),
        called(make_trajectory, 4, 1.0, [1, 0], success=False),  # paid, but no success by the world's verdict
    ]
    rewards = [t.reward for t in group]
    assert scales(group, rewards, ToolCostSettings()) == pytest.approx([1.0, 1.0, 1.0, 0.5, 1.0])
    assert scales(group, rewards, ToolCostSettings(scale=2.0)) == pytest.approx([2.0, 1.0, 1.0, 1.0, 1.0])
    assert scales(group[1:3], rewards[1:3], ToolCostSettings()) == [1.0, 1.0]


def test_a_punishment_does_not_shrink_with_waste(make_trajectory: Make) -> None:
    """Also one that only the weights of parts make: 1 with a slip of −.5 counted three times is worth 0, four times −.5."""
    punished = [called(make_trajectory, i, -0.2, [m, 0], success=True) for i, m in enumerate((2, 10))]
    assert scales_of(punished, LearnerConfig(tool_cost=ToolCostSettings())) == [1.0, 1.0]
    slipped = [called(make_trajectory, i, 1.0, [m, 0], success=True) for i, m in enumerate((2, 10))]
    for t in slipped:
        t.steps[0].parts = {"slip": -0.5}
    scaled = [
        scales_of(slipped, LearnerConfig(tool_cost=ToolCostSettings(), reward_parts={"slip": weight}))
        for weight in (1.0, 2.0, 3.0, 4.0)
    ]
    fewer = efficiency(10, 2, 1.0)
    assert scaled == [[1.0, fewer], [1.0, fewer], [1.0, 1.0], [1.0, 1.0]]


def test_the_parts_of_a_reward_are_scaled_and_the_overlong_punishment_is_not(make_trajectory: Make) -> None:
    t = called(make_trajectory, 0, 1.0, [3, 0])
    t.steps[0].reward, t.steps[0].parts = 0.5, {"tidy": 0.5}
    config = LearnerConfig(reward_parts={"tidy": 3.0}, overlong=OverlongSettings(limit=t.policy_tokens, buffer=1))
    assert turn_rewards(t, config, 0.5).tolist() == [0.75, 0.25 - 1.0]
    assert return_of(t, config, 0.5) == 0.0
    assert return_of(t, LearnerConfig(), 0.5) == 0.5


@pytest.mark.parametrize("name", ["grpo", "turn_level", "gigpo", "reinforce", "gae", "bi_level_gae"])
def test_every_kind_of_estimator_sees_the_scaled_rewards(name: str, make_trajectory: Make) -> None:
    made = [called(make_trajectory, i, 0.0, [m, 0]) for i, m in enumerate((1, 5))]
    for t in made:
        t.steps[-1].reward = t.reward = 1.0
        t.success = True

    def advantages(trajectories: list[Trajectory], config: LearnerConfig) -> Any:
        batch = assemble(trajectories, config)
        return credit(batch, find(name), config, values=np.zeros(len(batch.rollout))).advantage

    scaled = advantages(made, LearnerConfig(tool_cost=ToolCostSettings()))
    made[1].steps[-1].reward = made[1].reward = 0.5  # what 5 calls, where 1 would do, leave of it
    np.testing.assert_allclose(scaled, advantages(made, LearnerConfig()), rtol=1e-6)
    made[1].steps[-1].reward = made[1].reward = 1.0
    assert not np.allclose(scaled, advantages(made, LearnerConfig()))


def test_a_group_without_the_setting_is_paid_as_it_was(make_trajectory: Make) -> None:
    made = [called(make_trajectory, i, r, [3, i]) for i, r in enumerate((0.1, 0.7))]
    group = Group(made, np.array([0.1, 0.7]))
    assert [group.turn_rewards(i).sum() for i in range(2)] == [0.1, 0.7]
