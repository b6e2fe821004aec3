"""Problems with a real Python: what it prints is told, answers are judged exactly, problems are those of math_code."""

from importlib.util import find_spec

import pytest

from troupe.envs.base import Task, rng_of
from troupe.envs.check import player_score
from troupe.envs.drive import Driver
from troupe.envs.math_code import MathCode
from troupe.envs.math_python import MathPython
from troupe.protocol.errors import ConfigError

TRUSTED = {"sandbox": "subprocess", "trusted": True}  # nothing is run where it is used


async def opened(seed=0, split="train", **options):
    driver = Driver(MathPython(**options), timeout_s=60)
    return driver, await driver.reset(Task("x", "math_python", split, seed))


@pytest.mark.parametrize("split", ["train", "heldout"])
async def test_problems_are_those_of_math_code(split):
    for seed in range(20):
        other, task = MathCode(), Task("x", "math_code", split, seed)
        other.rng = rng_of(task)
        driver, question = await opened(seed, split, **TRUSTED)
        assert question == other.reset(task) and driver.world.problem.value == other.value


@pytest.mark.parametrize(
    ("answer", "exact", "symbolic"),
    [
        ("<answer>{v}</answer>", True, True),
        ("It is <answer>1</answer>, no: <answer> {v:,} </answer>", True, True),
        ("<answer>{v}.0</answer>", False, True),
        ("<answer>{d}/2</answer>", False, True),
        ("<answer>{d}</answer>", False, False),
        ("<answer>-{v}</answer>", False, False),
        ("<answer>{v}0</answer>", False, False),
        ("{v}", False, False),
        ("<answer></answer>", False, False),
        ("", False, False),
    ],
)
@pytest.mark.parametrize("verifier", ["exact", "symbolic"])
async def test_an_answer_is_judged_as_the_verifier_says(answer, exact, symbolic, verifier):
    if verifier == "symbolic" and find_spec("math_verify") is None:
        pytest.skip("math-verify is not installed: pip install 'troupe-rl[math]'")
    driver, _ = await opened(7, verifier=verifier, **TRUSTED)
    value = driver.world.problem.value
    assert value > 1000, "so that a comma can be in it"
    turn = await driver.step(answer.format(v=value, d=2 * value))
    right = exact if verifier == "exact" else symbolic
    assert (turn.done, turn.success, turn.reward) == (True, right, float(right))
    await driver.close()


async def test_a_program_runs_in_a_real_python(bubblewrap):
    driver, _ = await opened(**bubblewrap)
    code = "from fractions import Fraction\nimport json\nprint(json.dumps([str(sum(Fraction(1, n) for n in range(1, 5)))]))"
    assert (await driver.call("run_python", {"code": code})).text == '["25/12"]'
    await driver.close()


@pytest.mark.slow
def test_the_player_gets_better_with_less_noise(bubblewrap):
    assert player_score(MathPython, bubblewrap, n=20).success == 1.0
    assert 0.1 < player_score(MathPython, bubblewrap, n=40, noise=0.8).success < 0.9


@pytest.mark.parametrize(("option", "value"), [("turns", 9), ("largest", 9), ("largest", 201), ("verifier", "f1")])
def test_options_out_of_range_are_refused(option, value):
    with pytest.raises(ConfigError, match=f"{option} is '?{value}'?; it is"):
        MathPython(**TRUSTED, **{option: value})
