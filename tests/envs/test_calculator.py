"""Calculator: the tool is exact, bounded and evaluates nothing but arithmetic."""

from contextlib import suppress
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from troupe.envs.base import Task, belongs, rng_of
from troupe.envs.calculator import Calculator, evaluate, show
from troupe.envs.check import player_score
from troupe.protocol.errors import InvalidAction


def opened(split="train", seed=0, **options) -> Calculator:
    task = Task("x", "calculator", split, seed)
    world = Calculator(**options)
    world.rng = rng_of(task)
    world.reset(task)
    return world


numbers = st.integers(0, 999).map(str)
expressions = st.recursive(
    numbers,
    lambda inner: st.tuples(inner, st.sampled_from("+-*"), inner).map(lambda t: f"({''.join(t)})"),
    max_leaves=12,
)


@settings(deadline=None)
@given(expressions)
def test_the_tool_agrees_with_python(expression):
    assert evaluate(expression) == eval(expression)


@pytest.mark.parametrize(
    ("expression", "shown"),
    [
        ("7/2", "3.5"),
        ("1/3", "0.333333"),
        ("6/3", "2"),
        ("2**10", "1024"),
        ("2**-1", "0.5"),
        ("-7//2", "-4"),
        ("7%4", "3"),
        ("0.1+0.2", "0.3"),
        (" ( 1 + 2 ) * 3 ", "9"),
        ("+5", "5"),
    ],
)
def test_results_are_exact_and_readable(expression, shown):
    assert show(evaluate(expression)) == shown


@pytest.mark.parametrize(
    "expression",
    [
        *("", "1+", "01", "1(2)", "(" * 150, "1/0", "1%0", "0**-1", "2**0.5"),
        *("9**9**9", "2**100000", "9" * 190, "*".join(["9" * 60] * 3), "1" * 10_000),
        *("__import__('os')", "1 if 1 else 2", "x", "1e9", "(1,2)", "1\n2", "1\x00", "0x10"),
    ],
)
def test_what_is_not_bounded_arithmetic_is_refused_with_a_reason(expression):
    with pytest.raises(ValueError) as refused:
        evaluate(expression)
    assert str(refused.value)


@settings(deadline=None)
@given(st.text(alphabet="0123456789+-*/%(). ", max_size=220))
def test_any_arithmetic_looking_text_gives_a_number_or_a_value_error(expression):
    with suppress(ValueError):
        assert isinstance(evaluate(expression), Fraction)


def test_the_agent_may_use_the_tool_and_then_answers():
    world = opened()
    result = world.step(f"Let me see.\ncalc: {world.expression}\nanswer: 0")
    assert (result.text, result.done) == (f"{world.expression} = {world.value}", False)
    answer = world.step(f"  Answer:  {world.value}.0 ")
    assert (answer.done, answer.success, answer.reward) == (True, True, 1.0)


def test_a_wrong_answer_ends_the_episode_without_reward():
    world = opened()
    answer = world.step(f"answer: {int(world.value) + 1}")
    assert (answer.done, answer.success, answer.reward) == (True, False, 0.0)


@pytest.mark.parametrize("text", ["", "444", "calc 1+1", "calc: print(1)", "answer: many", "answer:", "\x00", ":" * 100_000])
def test_what_is_neither_is_invalid_and_the_episode_goes_on(text):
    world = opened()
    with pytest.raises(InvalidAction):
        world.step(text)
    assert world.step(f"answer: {world.value}").success


@settings(deadline=None)
@given(st.integers(0, 2**31))
def test_no_expression_is_in_both_splits(seed):
    assert belongs(opened("train", seed).expression, "train")
    assert belongs(opened("heldout", seed).expression, "heldout")


def test_the_player_succeeds_by_the_tool_and_fails_by_guessing():
    assert player_score(Calculator, {"operands": 4}, n=50).success == 1.0
    assert player_score(Calculator, n=50, noise=1.0).success < 0.2
