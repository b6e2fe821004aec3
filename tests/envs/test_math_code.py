"""Problems with an interpreter: the programs are right, answers are judged exactly, no problem is in both splits."""

import random

import pytest

from troupe.envs.base import Task, belongs, rng_of
from troupe.envs.check import player_score
from troupe.envs.math_code import MathCode
from troupe.protocol.errors import InvalidAction


def opened(split="train", seed=0, **options):
    world, task = MathCode(**options), Task("x", "math_code", split, seed)
    world.rng = rng_of(task)
    return world, world.reset(task)


@pytest.mark.parametrize("largest", [10, 40, 200])
def test_the_players_program_prints_the_answer_that_was_computed_otherwise(largest):
    programs = set()
    for seed in range(100):
        world, _ = opened(seed=seed, largest=largest)
        told = world.step(world.play(random.Random(0), noise=0.0))
        assert (told.text, told.done) == (f"<interpreter>\n{world.value}\n</interpreter>", False)
        assert world.step(world.play(random.Random(0), noise=0.0)).success
        programs.add(world.program.partition("\n")[0][0])
    assert len(programs) >= 3


def test_no_problem_is_in_both_splits():
    for split in ("train", "heldout"):
        assert all(belongs(opened(split, seed)[1], split) for seed in range(100))


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("<answer>{v}</answer>", True),
        ("so <answer> {v}.0 </answer> then", True),
        ("<answer>{v}", True),
        ("<answer>{d}/2</answer>", True),
        ("<answer>+{v}</answer> <code>print(1)</code>", True),
        ("<answer>{v}.5</answer>", False),
        ("<answer>{d}</answer>", False),
        ("<answer>the sum</answer>", False),
        ("<answer></answer>", False),
        ("<answer>{v}/0</answer>", False),
        ("<answer>" + "9" * 3000 + "</answer>", False),
        ("<answer>{v}</answer><answer>1</answer>", True),
    ],
)
def test_an_answer_is_judged_by_its_exact_value(answer, right):
    world, _ = opened()
    turn = world.step(answer.format(v=world.value, d=2 * world.value))
    assert (turn.done, turn.success, turn.reward) == (True, right, float(right))


@pytest.mark.parametrize(
    ("message", "output"),
    [
        ("<code>\nprint(1 + 1)\n</code>", "2"),
        ("First: <code>print(1 + 1)</code> and then <answer>3</answer>", "2"),
        ("<code>\n```python\nprint(1 + 1)\n```\n</code>", "2"),
        ("<code>```python\nfor i in range(2):\n    print(i)\n```</code>", "0\n1"),
        ("<code>\nprint(1 + 1)", "2"),  # cut off, or stopped at </code>
        ("<code>\nx = 1\n</code>", ""),
        ("<code></code>", ""),
        ("<code> print(3) </code>", "3"),
        ("<code>\nprint(z)\n</code>", "Error: line 1: 'z' is not defined"),
    ],
)
def test_a_program_is_run_and_the_agent_reads_what_it_prints(message, output):
    world, _ = opened()
    before = world.state_key()
    turn = world.step(message)
    assert (turn.text, turn.reward, turn.done) == (f"<interpreter>\n{output}\n</interpreter>", 0.0, False)
    assert world.state_key() != before


def test_a_message_without_either_is_told_what_to_write():
    world, _ = opened()
    with pytest.raises(InvalidAction, match="<code> and </code>"):
        world.step("Let me think.")


def test_the_player_gets_better_with_less_noise():
    assert player_score(MathCode, n=40).success == 1.0
    assert 0.1 < player_score(MathCode, n=100, noise=0.6).success < 0.9


@pytest.mark.parametrize("largest", [9, 201])
def test_options_out_of_range_are_refused(largest):
    with pytest.raises(ValueError, match="it is 10 to 200"):
        MathCode(largest=largest)
