"""Guess: secrets held out, rewards bounded and explained, only a number in range counts."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from troupe.envs.base import Task, rng_of
from troupe.envs.check import player_score
from troupe.envs.guess import Guess
from troupe.protocol.errors import InvalidAction


def opened(split="train", seed=0, **options) -> Guess:
    task = Task("x", "guess", split, seed)
    world = Guess(**options)
    world.rng = rng_of(task)
    world.reset(task)
    return world


@pytest.mark.parametrize("high", [20, 100])
def test_no_secret_is_in_both_splits(high):
    secrets = {s: {opened(s, seed, high=high).secret for seed in range(500)} for s in ("train", "heldout")}
    assert not secrets["train"] & secrets["heldout"]
    assert min(map(len, secrets.values())) >= 2
    assert secrets["train"] | secrets["heldout"] <= set(range(1, high + 1))


@settings(deadline=None)
@given(st.integers(0, 1000), st.lists(st.integers(1, 20), min_size=5, max_size=5), st.floats(0, 1))
def test_parts_sum_to_a_reward_within_0_and_1_that_a_hit_makes_1(seed, guesses, closeness):
    world = opened(seed=seed, closeness=closeness)
    for guess in guesses:
        turn = world.step(str(guess))
        if turn.done:
            break
    assert turn.done and turn.success == (world.secret in guesses)
    assert turn.reward == pytest.approx(sum(turn.parts.values()))
    assert 0.0 <= turn.reward <= 1.0
    assert turn.success == (turn.reward == pytest.approx(1.0)) or closeness > 0.9


def test_partial_credit_grows_with_how_near_the_best_guess_came():
    def reward(guess: int) -> float:
        world = opened(turns=1, closeness=0.5)
        world.secret = 10
        return world.step(str(guess)).reward

    assert 1.0 == reward(10) > reward(11) > reward(19) > 0.0


def test_the_feedback_points_to_the_secret_and_the_hint_names_what_is_left():
    world = opened()
    world.secret = 13
    assert world.step("I say 10, not 11").text == "The secret number is higher than 10. It is between 11 and 20. Your guess?"
    assert world.step("15").text == "The secret number is lower than 15. It is between 11 and 14. Your guess?"
    assert "between" not in opened(hint=False).step("1" if opened(hint=False).secret > 1 else "2").text


@pytest.mark.parametrize("text", ["", "ten", "0", "21", "-5", "9" * 5000, "٣", "\x00"])
def test_no_number_in_range_is_invalid_and_costs_no_guess(text):
    world = opened()
    with pytest.raises(InvalidAction, match="between 1 and 20"):
        world.step(text)
    assert world.left == world.turns


def test_bisection_always_finds_the_secret_of_the_default_game():
    for split in ("train", "heldout"):
        assert player_score(Guess, n=100, split=split).success == 1.0
    assert player_score(Guess, n=200, noise=1.0).success < 0.6


def test_the_player_moves_by_the_given_chance_only():
    world = opened()
    assert world.play(random.Random(5), 1.0) == world.play(random.Random(5), 1.0)
