"""ToolRL's reward of tool calls, against numbers worked out by hand."""

import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from troupe.envs.tool_grading import ToolCall, grade

A = ToolCall("f", {"x": 1, "y": "a"})
B = ToolCall("g", {"z": 2})


@pytest.mark.parametrize(
    ("said", "reference", "terms"),
    [
        ([A], [A], (1, 1, 2)),  # S_max = 1 + 1 + 2 = 4
        ([B, A], [A, B], (1, 2, 3)),  # order does not matter; S_max = 1 + 2 + 3 = 6
        ([], [A], (0, 0, 0)),
        ([], [], (1, 0, 0)),  # S_max = 1
        ([A], [], (0, 0, 0)),
        ([B], [A], (0, 0, 0)),
        ([ToolCall("f", {"x": 1, "y": "b"})], [A], (1, 1, 1)),  # one value is wrong
        ([ToolCall("f", {"x": 1, "q": "a"})], [A], (1, 1 / 3, 1)),  # x of {x, y, q}
        ([ToolCall("f", {})], [A], (1, 0, 0)),
        ([A, A], [A], (1 / 2, 1, 2)),  # once too often: 1 of 2 names
        ([A], [A, A], (1 / 2, 1, 2)),  # S_max = 1 + 2 + 4 = 7
        ([A, B], [A], (1 / 2, 1, 2)),
        ([ToolCall("f", {"x": True, "y": "a"})], [A], (1, 1, 1)),  # true is not 1
        ([ToolCall("f", {"x": 1.0, "y": "a"})], [A], (1, 1, 2)),
        ([ToolCall("f", {"x": 1, "y": None})], [ToolCall("f", {"x": 1, "y": None})], (1, 1, 2)),
        ([ToolCall("f", {"x": 1})], [ToolCall("f", {"x": 1, "y": None})], (1, 1 / 2, 1)),  # left out is not null
    ],
)
def test_the_three_terms(said, reference, terms):
    most = 1 + len(reference) + sum(len(call.arguments) for call in reference)
    found = grade(said, reference)
    assert (found.names, found.arguments, found.values, found.most) == pytest.approx((*terms, most))
    assert list(found.parts.values()) == pytest.approx([6 * term / most for term in terms])
    assert found.correct == round(6 * sum(terms) / most - 3, 9)


def test_the_best_matching_counts_where_the_first_that_fits_would_take_the_wrong_one():
    """Said f(x=1, y=2) and f(x=1); wanted f(x=1) and f(x=1, y=2): each finds its own, whatever comes first."""
    one, two = ToolCall("f", {"x": 1}), ToolCall("f", {"x": 1, "y": 2})
    near = ToolCall("f", {"x": 1, "y": 3})
    for said in ([one, two], [two, one]):
        for reference in ([one, two], [two, one]):
            assert grade(said, reference).correct == 3.0
    # near is worth 1 + 1 of `two` or ½ + 1 of `one`; `two` is worth 3 of `two`. Best: two↔two and near↔one, 4.5 of 1 + 2 + 3.
    for said in ([near, two], [two, near]):
        assert grade(said, [two, one]).correct == pytest.approx(6 * (1 + 4.5) / 6 - 3)


calls = st.builds(
    ToolCall, st.sampled_from("fgh"), st.dictionaries(st.sampled_from("xyz"), st.one_of(st.integers(0, 2), st.booleans()))
)


@given(st.lists(calls, max_size=4), st.lists(calls, max_size=4), st.randoms())
def test_correctness_is_bounded_knows_no_order_and_is_3_for_the_reference_only(said, reference, chance: random.Random):
    found = grade(said, reference)
    assert -3.0 <= found.correct <= 3.0
    mixed = random.Random(chance.random()).sample(said, len(said))
    assert grade(mixed, reference).correct == pytest.approx(found.correct)
    same = sorted(map(repr, said)) == sorted(map(repr, reference))
    sorted_keys = sorted(repr((c.name, sorted(c.arguments.items()))) for c in said) == sorted(
        repr((c.name, sorted(c.arguments.items()))) for c in reference
    )
    assert (found.correct == pytest.approx(3.0)) == (same or sorted_keys)
    assert grade(reference, reference).correct == 3.0
