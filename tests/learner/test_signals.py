"""Signals of health, against numbers worked out by hand."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from troupe.learner.health import signals
from troupe.protocol.trajectory import ENVIRONMENT, POLICY, TEMPLATE, Call, Fork, Node, Step, Task, Trajectory


def make(
    name: str,
    group: int,
    turns: Sequence[Sequence[int]],
    *,
    reward: float = 0.0,
    steps: list[Step] | None = None,
    **more: Any,
) -> Trajectory:
    """A trajectory that says `turns`, with an observation before each and a closing template token after it."""
    nodes = []
    for step, said in enumerate(turns):
        ids = [900 + group, *said, 999]
        nodes.append(
            Node(
                parent=step - 1,
                role="assistant",
                step=step,
                tokens=np.array(ids, np.int32),
                provenance=np.array([ENVIRONMENT, *[POLICY] * len(said), TEMPLATE], np.uint8),
                logprobs=np.zeros(len(said), np.float32),
                versions=np.zeros(len(said), np.int32),
            )
        )
    defaults: dict[str, Any] = {"status": "completed", "stop": "terminated", "kind": "train"}
    return Trajectory(
        id=name,
        attempt=0,
        group=group,
        member=0,
        step=1,
        task=Task("t", "world", "train", group),
        nodes=nodes,
        steps=steps if steps is not None else [Step() for _ in turns],
        reward=reward,
        **{**defaults, **more},
    )


def test_rewards_are_those_of_the_groups() -> None:
    told = signals([make(f"e{i}", i // 2, [[1]], reward=r) for i, r in enumerate([1.0, 0.0, 0.35, 0.35])])
    assert told["reward_mean"] == pytest.approx(0.425)
    assert told["reward_std"] == pytest.approx(np.std([1, 0, 0.35, 0.35], ddof=1))
    assert told["group_reward_std"] == pytest.approx(math.sqrt(0.5) / 2)
    assert (told["equal_groups"], told["reward_min"], told["reward_max"]) == (0.5, 0.0, 1.0)


def test_a_group_of_one_or_of_equals_deviates_by_exactly_nothing() -> None:
    lone = [make("a", 0, [[1]], reward=0.35)]
    assert signals(lone)["group_reward_std"] == 0.0
    assert signals([make(f"e{i}", 0, [[1]], reward=0.1) for i in range(7)])["group_reward_std"] == 0.0


def test_lengths_count_sampled_tokens_only() -> None:
    told = signals([make("a", 0, [[1, 2, 3], [4]]), make("b", 0, [[5, 6]])])
    assert (told["response_tokens_mean"], told["response_tokens_max"]) == (3.0, 4.0)
    assert (told["turn_tokens_mean"], told["turn_tokens_max"]) == (2.0, 3.0)


def test_distinct_n_counts_grams_within_turns_over_all_trajectories() -> None:
    told = signals([make("a", 0, [[1, 2, 1, 2], [1, 2]]), make("b", 1, [[1, 2, 3]])])
    assert told["distinct_1"] == pytest.approx(3 / 9)
    assert told["distinct_2"] == pytest.approx(3 / 6)  # 12 21 12 | 12 | 12 23
    assert told["distinct_3"] == pytest.approx(3 / 3)  # 121 212 | - | 123


def test_similarity_compares_trajectories_of_different_groups() -> None:
    same = [make("a", 0, [[1, 2, 3, 4]]), make("b", 0, [[1, 2, 3, 4]]), make("c", 1, [[1, 2, 3, 5]])]
    assert signals(same)["self_similarity"] == pytest.approx(1 / 3)  # {123, 234} against {123, 235}, twice
    assert signals(same[:2])["self_similarity"] == 1.0
    assert signals([make("a", 0, [[1, 2, 3]]), make("b", 1, [[4, 5, 6]])])["self_similarity"] == 0.0
    assert "self_similarity" not in signals([make("a", 0, [[1, 2, 3]]), make("b", 1, [[4, 5]])])


def test_what_was_sampled_for_a_sibling_is_told_and_repeats_nothing() -> None:
    told = signals([make("a", 0, [[1, 2], [3, 4]]), make("b", 0, [[1, 2], [3, 5]], fork=Fork("a", 0, 3))])
    assert told["reused_tokens"] == pytest.approx(3 / 8) and told["response_tokens_mean"] == 4.0
    assert told["distinct_1"] == 1.0 and told["distinct_2"] == 1.0  # 1 2 3 4 and 5; 12 34 and none
    assert "reused_tokens" not in signals([make("a", 0, [[1, 2]])])


def test_a_turn_said_before_in_the_same_trajectory_is_a_repeated_one() -> None:
    told = signals([make("a", 0, [[1, 2], [1, 2], [1, 2]]), make("b", 0, [[1, 2]])])
    assert told["repeated_turns"] == pytest.approx(2 / 4)


def test_a_tool_that_failed_is_told_apart_from_a_call_that_was_none() -> None:
    statuses = ["ok", "failed", "malformed", "malformed", "refused", "unknown_tool", "bad_arguments", "truncated"]
    calls = [Call(str(i), "f", "{}", status) for i, status in enumerate(statuses)]  # type: ignore[arg-type]
    told = signals([make("a", 0, [[1], [2]], steps=[Step(calls=calls), Step(invalid=True)]), make("b", 0, [[1]])])
    assert (told["tool_calls"], told["tool_failed"], told["tool_misuse"]) == (4.0, 1 / 8, 6 / 8)
    assert (told["tool_malformed"], told["tool_refused"]) == (2 / 8, 1 / 8)
    assert told["invalid_actions"] == pytest.approx(1 / 3)
    without = signals([make("b", 0, [[1]])])
    assert without["tool_calls"] == 0.0 and "tool_failed" not in without


def test_turns_that_were_cut_and_episodes_that_ran_into_a_limit_are_counted() -> None:
    cut = [Step(finish="length"), Step(finish="stop")]
    told = signals([make("a", 0, [[1], [2]], steps=cut, stop="max_turns"), make("b", 0, [[1]]), make("c", 0, [[1]])])
    assert told["cut_turns"] == pytest.approx(1 / 4)
    assert (told["limited"], told["limited_max_turns"], told["limited_wall_clock"]) == (1 / 3, 1 / 3, 0.0)


def test_a_part_correlates_with_the_outcome_within_groups() -> None:
    def parts(outcome: float, polite: float) -> list[Step]:
        return [Step(parts={"polite": polite}), Step(parts={"outcome": outcome})]

    easy = [make(f"a{i}", 0, [[1], [1]], steps=parts(o, p)) for i, (o, p) in enumerate([(1, 5.0), (0, 6.0)])]
    hard = [make(f"b{i}", 1, [[1], [1]], steps=parts(o, p)) for i, (o, p) in enumerate([(0, 1.0), (0, 1.0)])]
    told = signals([*easy, *hard])
    assert told["reward_part_polite"] == pytest.approx(13 / 4)
    assert told["reward_part_outcome"] == pytest.approx(1 / 4)
    assert told["reward_corr_polite"] == pytest.approx(-1.0)  # over all it would be +.3: easy tasks pay both
    assert "reward_corr_outcome" not in told
    assert "reward_corr_polite" not in signals(hard)


def test_only_completed_trajectories_count_and_none_is_no_signal() -> None:
    broken = make("x", 0, [[1]], reward=9.0, status="failed", stop="failed")
    assert signals([]) == signals([broken]) == {}
    good = [make("a", 0, [[1, 2, 3]], reward=1.0), make("b", 1, [[1, 2, 4]])]
    assert signals([*good, broken]) == signals(good)


def test_the_order_of_trajectories_changes_nothing(batch: list[Trajectory]) -> None:
    assert signals(batch) == signals(batch[::-1])


def test_a_large_batch_is_measured_on_a_bounded_sample_of_all_groups() -> None:
    many = [make(f"e{i:03}", i % 64, [[7] * 3000]) for i in range(128)]
    told = signals(many)
    assert told["distinct_1"] == pytest.approx(1 / (32 * 1024))
    assert told["self_similarity"] == 1.0


numbers = st.one_of(st.floats(), st.integers(-3, 3).map(float), st.just(1e308))
turn = st.lists(st.integers(0, 2**31 - 1), max_size=5)


@st.composite
def odd_trajectories(draw: Any) -> list[Trajectory]:
    made = []
    for i in range(draw(st.integers(0, 5))):
        turns = draw(st.lists(turn, max_size=3))
        parts = st.dictionaries(st.sampled_from(["outcome", "a", ""]), numbers, max_size=2)
        steps = [Step(parts=draw(parts), invalid=draw(st.booleans())) for _ in range(draw(st.integers(0, 3)))]
        success = draw(st.sampled_from([None, True, False]))
        made.append(make(f"e{i}", draw(st.integers(0, 2)), turns, reward=draw(numbers), steps=steps, success=success))
    return made


@given(odd_trajectories())
@settings(max_examples=60)
def test_signals_never_raise_and_are_always_finite(trajectories: list[Trajectory]) -> None:
    told = signals(trajectories)
    assert all(type(value) is float and math.isfinite(value) for value in told.values())
    json.dumps(told, allow_nan=False)
