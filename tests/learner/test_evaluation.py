"""Estimators of success, against numbers worked out by hand and against every way of drawing k trials."""

from __future__ import annotations

import itertools
import json
import math
import random
from dataclasses import asdict

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from troupe.learner.evaluation import bootstrap, estimate, evaluate, pass_at_k, pass_hat_k, tally, wilson
from troupe.protocol.errors import ConfigError


def counts(*values: int) -> np.ndarray:
    return np.array(values, np.int64)


def outcomes(**tasks: str) -> list[tuple[str, bool | None]]:
    """a="10x": task a has a success, a failure and an episode that broke."""
    return [(task, {"1": True, "0": False, "x": None}[mark]) for task, marks in tasks.items() for mark in marks]


def test_eight_trials_with_four_successes_are_as_the_formulas_say() -> None:
    assert pass_at_k(counts(8), counts(4), 2)[0] == pytest.approx(11 / 14, abs=1e-15)  # .7857
    assert pass_hat_k(counts(8), counts(4), 2)[0] == pytest.approx(3 / 14, abs=1e-15)  # .2143


@given(st.lists(st.booleans(), min_size=1, max_size=8), st.data())
def test_they_are_the_mean_over_every_way_of_drawing_k_trials(trials: list[bool], data: st.DataObject) -> None:
    k = data.draw(st.integers(1, len(trials)))
    draws = list(itertools.combinations(trials, k))
    n, c = counts(len(trials)), counts(sum(trials))
    assert pass_at_k(n, c, k)[0] == pytest.approx(np.mean([any(draw) for draw in draws]), abs=1e-12)
    assert pass_hat_k(n, c, k)[0] == pytest.approx(np.mean([all(draw) for draw in draws]), abs=1e-12)


@given(st.integers(1, 300), st.data())
def test_they_agree_with_binomial_coefficients_for_many_trials(n: int, data: st.DataObject) -> None:
    c, k = data.draw(st.integers(0, n)), data.draw(st.integers(1, n))
    at, hat = pass_at_k(counts(n), counts(c), k)[0], pass_hat_k(counts(n), counts(c), k)[0]
    assert at == pytest.approx(1 - math.comb(n - c, k) / math.comb(n, k), abs=1e-12)
    assert hat == pytest.approx(math.comb(c, k) / math.comb(n, k), rel=1e-9, abs=1e-300)
    assert 0 <= hat <= at + 1e-12 <= 1 + 1e-12


def test_pass_at_k_is_unbiased_where_the_naive_estimator_is_not() -> None:
    p, n, k = 0.3, 5, 3
    chance = [math.comb(n, c) * p**c * (1 - p) ** (n - c) for c in range(n + 1)]
    every = counts(*range(n + 1))
    trials = np.full(n + 1, n)
    assert np.dot(chance, pass_at_k(trials, every, k)) == pytest.approx(1 - (1 - p) ** k, abs=1e-12)
    assert np.dot(chance, pass_hat_k(trials, every, k)) == pytest.approx(p**k, abs=1e-12)
    assert abs(np.dot(chance, 1 - (1 - every / n) ** k) - (1 - (1 - p) ** k)) > 0.01


def test_a_task_with_fewer_than_k_trials_says_nothing_about_k() -> None:
    assert np.isnan(pass_at_k(counts(0, 1, 2), counts(0, 1, 2), 2)).tolist() == [True, True, False]
    scores = evaluate(outcomes(a="11", b="0"), [2, 3])
    assert (scores.pass_at[2].value, scores.pass_at[2].tasks) == (1.0, 1)
    assert (scores.pass_at[3].value, scores.pass_at[3].low, scores.pass_at[3].tasks) == (None, None, 0)


def test_k_below_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="k = 0"):
        evaluate(outcomes(a="1"), [0])


def test_trials_are_grouped_by_task_whatever_their_order() -> None:
    mixed = [("b", True), ("a", False), ("b", None), ("a", True), ("b", False)]
    found = tally(mixed)
    assert found.tasks == ["a", "b"]
    assert (found.trials.tolist(), found.successes.tolist(), found.broken.tolist()) == ([2, 2], [1, 1], [0, 1])


def test_success_weighs_trials_and_avg_weighs_tasks() -> None:
    scores = evaluate(outcomes(a="1111", b="0"))
    assert scores.success.value == pytest.approx(4 / 5)
    assert scores.avg.value == pytest.approx(1 / 2)


def test_an_episode_that_broke_is_no_trial_and_is_counted_beside() -> None:
    whole = evaluate(outcomes(a="1100", b="1000"), [1, 2], seed=3)
    broken = evaluate(outcomes(a="1100xx", b="1000x"), [1, 2], seed=3)
    assert (broken.trials, broken.broken, whole.broken) == (8, 3, 0)
    assert {**asdict(broken), "broken": 0} == asdict(whole)


def test_a_task_whose_episodes_all_broke_changes_no_score() -> None:
    some = evaluate(outcomes(a="1100", b="1000"), [2], seed=3)
    more = evaluate(outcomes(a="1100", aa="xx", b="1000"), [2], seed=3)
    assert {**asdict(more), "broken": 0} == asdict(some)
    nothing = evaluate(outcomes(a="xx"), [1])
    assert (nothing.success.value, nothing.wilson, nothing.trials, nothing.broken) == (None, (0.0, 1.0), 0, 2)
    assert evaluate([]).avg.tasks == 0


@given(st.integers(0, 2**32 - 1), st.randoms(use_true_random=False))
def test_scores_depend_on_the_seed_and_the_trials_not_on_their_order(seed: int, shuffle: random.Random) -> None:
    ordered = outcomes(a="110", b="100", c="1x0", d="0")
    mixed = list(ordered)
    shuffle.shuffle(mixed)
    values = np.array([0.2, 0.9, 0.4])
    assert bootstrap(values, seed=seed, resamples=50) == bootstrap(values, seed=seed, resamples=50)
    assert asdict(tally(mixed))["tasks"] == asdict(tally(ordered))["tasks"]
    assert tally(mixed).successes.tolist() == tally(ordered).successes.tolist()


def test_another_seed_is_another_bootstrap() -> None:
    values = np.random.default_rng(0).random(30)
    assert bootstrap(values, seed=1, resamples=200) != bootstrap(values, seed=2, resamples=200)


def test_the_bootstrap_of_two_tasks_is_that_of_all_their_resamples() -> None:
    # 0 and 1 drawn twice: means 0, ½, 1 with chances ¼, ½, ¼, so 95 % reach from one end to the other
    assert bootstrap(np.array([0.0, 1.0]), seed=0) == (0.0, 1.0)
    weighted = estimate(np.array([0.2, 1.0]), np.array([1.0, 3.0]), seed=0)
    assert (weighted.value, weighted.low, weighted.high) == pytest.approx((0.8, 0.2, 1.0))


def test_the_bootstrap_agrees_with_the_normal_interval_of_many_tasks() -> None:
    values = np.random.default_rng(0).normal(0.5, 0.1, 400)
    low, high = bootstrap(values, seed=0)
    half = 1.96 * values.std(ddof=1) / math.sqrt(400)
    assert low == pytest.approx(values.mean() - half, abs=half / 10)
    assert high == pytest.approx(values.mean() + half, abs=half / 10)


def test_the_bootstrap_resamples_tasks_not_trials() -> None:
    """Twenty trials of each of five tasks, always or never solved: five tasks are known, not a hundred trials."""
    scores = evaluate(outcomes(a="1" * 20, b="1" * 20, c="1" * 20, d="0" * 20, e="0" * 20))
    assert scores.success.low is not None and scores.success.high is not None
    assert scores.success.high - scores.success.low > 2 * (scores.wilson[1] - scores.wilson[0])


@pytest.mark.parametrize(
    ("successes", "trials", "low", "high"),
    [
        (0, 10, 0.0, 0.27753),  # z² / (n + z²)
        (10, 10, 0.72247, 1.0),
        (5, 10, 0.23659, 0.76341),
        (81, 263, 0.25529, 0.36621),  # Newcombe 1998, table I
        (15, 148, 0.06239, 0.16053),
        (0, 0, 0.0, 1.0),
    ],
)
def test_wilson_is_as_worked_out(successes: int, trials: int, low: float, high: float) -> None:
    assert wilson(successes, trials) == pytest.approx((low, high), abs=6e-5)


def test_scores_are_json_without_nan() -> None:
    text = json.dumps(asdict(evaluate(outcomes(a="1", b="x"), [1, 5])), allow_nan=False)
    assert json.loads(text)["pass_at"]["5"]["value"] is None
