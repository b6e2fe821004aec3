"""Numbers that make no sense are named when a verifier is made: no episode is broken by them later."""

import math

import pytest

from troupe.envs.verifiers import Case, Composition, Judge, Symbolic, UnitTests
from troupe.protocol.errors import ConfigError


def composition(**options):
    return Composition(lambda subject: 1, {"p": lambda subject: 1}, **options)


def judge(**options):
    return Judge("{answer}", model="m", base_url="http://127.0.0.1:1/v1", **options)


def unit_tests(**options):
    return UnitTests([Case("f(1)", 1)], **options)


def symbolic(**options):
    pytest.importorskip("math_verify", reason="Symbolic needs math-verify: pip install 'troupe-rl[math]'")
    return Symbolic("1", **options)


TIMES = [
    (composition, "timeout_s"),
    (judge, "timeout_s"),
    (symbolic, "timeout_s"),
    (unit_tests, "each_s"),
    (unit_tests, "all_s"),
]
NUMBERS = [(composition, "passes"), (judge, "temperature")]


@pytest.mark.parametrize("value", [0, -1, math.nan, math.inf, "1", None])
@pytest.mark.parametrize(("make", "name"), TIMES)
def test_a_time_is_a_finite_number_above_0(make, name, value):
    with pytest.raises(ConfigError, match=rf"{name} is {value!r}; it is a ") as error:
        make(**{name: value})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("value", [math.nan, -math.inf, "1", None])
@pytest.mark.parametrize(("make", "name"), NUMBERS)
def test_a_number_is_finite(make, name, value):
    with pytest.raises(ConfigError, match=rf"{name} is {value!r}; it is a finite number"):
        make(**{name: value})


@pytest.mark.parametrize("name", ["outcome", "p"])
@pytest.mark.parametrize("value", [math.nan, math.inf, "1", None])
def test_a_weight_is_finite_and_named(name, value):
    with pytest.raises(ConfigError, match=rf"Composition: the weight of '{name}' is {value!r}; it is a finite number"):
        composition(weights={name: value})


def test_what_makes_sense_is_taken():
    made = composition(weights={"p": -1}, passes=0, timeout_s=0.5)
    assert (made.weights, made.passes, made.timeout_s) == ({"outcome": 1.0, "p": -1.0}, 0.0, 0.5)
    assert (unit_tests(each_s=2, all_s=3).each_s, judge(timeout_s=2).timeout_s) == (2, 2.0)
