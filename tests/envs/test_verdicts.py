"""Verdicts of worlds with tools: an answer or a limit ends the episode with what `verify` says."""

import asyncio
import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.envs.tool_world import TASK, Desk, driven
from troupe.envs.base import InvalidAction, Turn
from troupe.envs.drive import Driver
from troupe.envs.tools import Rewards, ToolWorld
from troupe.protocol.errors import EnvironmentFailed


class Judge(Desk):
    def verify(self):
        return self.judged(self) if callable(self.judged) else self.judged


class AsyncJudge(Desk):
    async def verify(self):
        await asyncio.sleep(0)
        return self.judged(self) if callable(self.judged) else self.judged


def world_judging(kind, judged):
    world = kind()
    world.judged = judged
    return world


@pytest.mark.parametrize("kind", [Judge, AsyncJudge])
@pytest.mark.parametrize(
    ("judged", "turn"),
    [
        (True, Turn("", 1.0, True, True, {"outcome": 1.0})),
        (False, Turn("", 0.0, True, False, {"outcome": 0.0})),
        (0.25, Turn("", 0.25, True, True, {"outcome": 0.25})),
        (-1, Turn("", -1.0, True, False, {"outcome": -1.0})),
        (Rewards(1.0, polite=0.5), Turn("", 1.5, True, True, {"outcome": 1.0, "polite": 0.5})),
        (Rewards(0.0, gate="outcome", polite=0.5), Turn("", 0.0, True, False, {"outcome": 0.0})),
    ],
)
def test_an_answer_and_a_limit_end_the_episode_with_the_worlds_verdict(kind, judged, turn):
    assert driven(lambda driver: driver.step("42"), world_judging(kind, judged)) == turn
    assert driven(lambda driver: driver.verify(), world_judging(kind, judged)) == turn


@pytest.mark.parametrize("kind", [Judge, AsyncJudge])
@pytest.mark.parametrize("judged", [None, "1", float("nan"), [1], object()])
def test_no_verdict_is_a_failed_environment_and_never_a_reward(kind, judged):
    for play in (lambda driver: driver.step("42"), lambda driver: driver.verify()):
        with pytest.raises(EnvironmentFailed, match="outcome is"):
            driven(play, world_judging(kind, judged))


@pytest.mark.parametrize("kind", [Judge, AsyncJudge])
def test_an_answer_that_cannot_be_read_is_told_and_is_no_answer(kind):
    async def play(driver):
        with pytest.raises(InvalidAction):
            await driver.step("forty-two")
        assert driver.world.answer == ""
        turn = await driver.step("42")
        return turn, driver.world.answer

    turn, answer = driven(play, world_judging(kind, lambda world: int(world.answer) == 42))
    assert turn.reward == 1.0 and answer == "42"


@pytest.mark.parametrize("error", [ValueError("boom"), InvalidAction("boom"), RuntimeError("boom")])
@pytest.mark.parametrize("kind", [Judge, AsyncJudge])
def test_a_verdict_at_a_limit_that_raises_is_the_worlds_fault(kind, error):
    def judged(world):
        raise error

    with pytest.raises(EnvironmentFailed, match=f"{kind.__name__}.verify .*raised {type(error).__name__}: boom"):
        driven(lambda driver: driver.verify(), world_judging(kind, judged))


def test_a_world_that_rewards_in_its_steps_needs_no_verify():
    class Own(ToolWorld):
        inline = True

        def reset(self, task):
            return ""

        def step(self, text):
            return Turn("go on", reward=0.5)

    async def play(driver):
        return await driver.step("x"), await driver.verify()

    assert driven(play, Own()) == (Turn("go on", reward=0.5), None)


def test_the_world_knows_its_task_and_forgets_the_last_answer():
    class Goal(Desk):
        def verify(self):
            return self.answer == str(self.task.data["goal"])

    async def play(driver):
        first = await driver.step("3")
        await driver.reset(dataclasses.replace(TASK, data={"goal": ""}))
        return first.success, (await driver.verify()).success

    assert driven(play, Goal()) == (True, True)
    assert Goal.task("train", 4).seed == 4


def test_the_time_of_an_answer_is_its_verdicts():
    class Judged(Desk):
        def verify(self):
            return 1.0

    timed = []

    async def play():
        driver = Driver(Judged(), timed=lambda call, seconds: timed.append(call))
        await driver.reset(TASK)
        await driver.step("done")
        await driver.close()

    asyncio.run(play())
    assert timed == ["reset", "verify"]


parts = st.dictionaries(st.sampled_from(["polite", "short", "safe"]), st.floats(-5, 5))


@given(st.floats(-5, 5), parts, st.sampled_from([None, "outcome", "safe"]))
def test_the_parts_that_count_sum_to_the_reward_and_a_shut_gate_leaves_the_outcome(outcome, others, gate):
    if gate == "safe" and "safe" not in others:
        with pytest.raises(EnvironmentFailed, match="no part 'safe'"):
            Rewards(outcome, gate, **others)
        return
    rewards = Rewards(outcome, gate, **others)
    is_open = gate is None or {"outcome": outcome, **others}[gate] > 0
    assert rewards.parts == ({"outcome": outcome, **others} if is_open else {"outcome": outcome})
    assert rewards.total == sum(rewards.parts.values()) and rewards.success == (outcome > 0)


def test_a_part_that_is_no_number_is_caught_even_behind_a_shut_gate():
    with pytest.raises(EnvironmentFailed, match="polite is nan, not a finite number"):
        Rewards(0.0, gate="outcome", polite=float("nan"))
