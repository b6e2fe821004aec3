"""Functions to write: only hidden tests decide, and what the agent answers is read as programs are usually written."""

import random

import pytest

from troupe.envs.base import Task, ToolCall
from troupe.envs.check import player_score
from troupe.envs.code import Code
from troupe.envs.drive import Driver
from troupe.protocol.errors import ConfigError, InvalidAction


async def opened(options, seed=0, **more):
    driver = Driver(Code(**options, **more), timeout_s=60)
    return driver, await driver.reset(Task("x", "code", "train", seed))


@pytest.mark.parametrize(
    ("answer", "right"),
    [
        ("```python\n{source}\n```", True),
        ("So:\n```\ndef nothing(): pass\n```\nor rather\n```py\n{source}\n```\nDone.", True),
        ("{source}", True),
        ("```python\n{source}", True),
        ("", False),
        ("passed", False),
        ("```python\nprint('passed')\n```", False),
    ],
)
async def test_an_answer_is_worth_what_hidden_tests_say(answer, right, bubblewrap):
    driver, observation = await opened(bubblewrap)
    assert observation.startswith("Write the Python function ") and observation.count("\n") == 2
    turn = await driver.step(answer.replace("{source}", driver.world.function.source))
    share = 0.2 if right else 0.0
    assert (turn.done, turn.success, turn.parts) == (True, right, {"outcome": float(right), "tests": share})
    await driver.close()


async def test_a_program_that_only_knows_what_was_shown_passes_no_hidden_test_but_by_chance(bubblewrap):
    driver, _ = await opened(bubblewrap, seed=4)
    function = driver.world.function
    known = {repr(argument): value for argument, value in function.examples[1:3]}
    source = f"def {function.name}(x):\n    return {known!r}.get(repr(x), 'unknown')"
    turn = await driver.step(source)
    assert turn.success is False and turn.parts == {"outcome": 0.0, "tests": 0.0}
    await driver.close()


async def test_the_agent_may_try_programs_while_it_has_turns(bubblewrap):
    driver, _ = await opened(bubblewrap, turns=2)
    assert [found["name"] for found in driver.tools()] == ["run_python"]
    before = driver.state_key()
    assert (await driver.call("run_python", {"code": "print(6 * 7)"})).text == "42"
    assert driver.state_key() != before
    with pytest.raises(InvalidAction, match="you have run 1 programs, which is all you may"):
        await driver.call("run_python", {"code": "print(1)"})
    await driver.close()
    driver, _ = await opened(bubblewrap, turns=1)
    assert driver.tools() == [] and not isinstance(driver.play(random.Random(0), 0.0), ToolCall)
    await driver.close()


async def test_what_is_not_shaped_has_no_part(bubblewrap):
    driver, _ = await opened(bubblewrap, shaped=0.0)
    assert (await driver.verify()).parts == {"outcome": 0.0}
    await driver.close()


@pytest.mark.slow
def test_the_player_gets_better_with_less_noise(bubblewrap):
    assert player_score(Code, bubblewrap, n=20).success == 1.0
    assert player_score(Code, bubblewrap, n=20, noise=1.0).success < 0.5


@pytest.mark.parametrize(("option", "value"), [("turns", 0), ("turns", 9), ("tests", 1), ("tests", 21), ("shaped", -1)])
def test_options_out_of_range_are_refused(option, value):
    with pytest.raises(ConfigError, match=f"{option} is {value}; it is"):
        Code(sandbox="subprocess", trusted=True, **{option: value})
