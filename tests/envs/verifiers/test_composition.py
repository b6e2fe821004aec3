"""An outcome decides, parts count behind a gate, and a verifier that fails breaks the episode by its name."""

import asyncio
import math
import time
from types import SimpleNamespace

import pytest

from troupe.envs.base import Task
from troupe.envs.calls import stuck
from troupe.envs.drive import Driver
from troupe.envs.tools import ToolWorld
from troupe.envs.verifiers import F1, Composition, Exact, Format, StateMatch, of
from troupe.envs.verifiers.text import inside
from troupe.protocol.errors import ConfigError, EnvironmentFailed, InvalidAction, TaskFailed


def worth(composition, subject="x"):
    rewards = asyncio.run(composition(subject))
    return rewards.parts, rewards.success


def always(value):
    return lambda subject: value


async def slowly(subject):
    await asyncio.sleep(0.01)
    return 0.5


def test_parts_count_with_their_weights_once_the_outcome_is_reached():
    parts = {"polite": slowly, "brief": always(True)}
    weights = {"polite": 0.2, "brief": 0.1, "outcome": 2}
    assert worth(Composition(always(1), parts, weights=weights)) == ({"outcome": 2, "polite": 0.1, "brief": 0.1}, True)
    assert worth(Composition(always(0), parts, weights=weights)) == ({"outcome": 0}, False)
    assert worth(Composition(always(0), parts, weights=weights, gate=None)) == (
        {"outcome": 0, "polite": 0.1, "brief": 0.1},
        False,
    )


def test_partial_credit_is_no_success_and_opens_no_gate():
    parts = {"brief": always(1)}
    half = always(0.5)
    assert worth(Composition(half, parts)) == ({"outcome": 0.5}, False)
    assert worth(Composition(half, parts, partial=False)) == ({"outcome": 0}, False)
    assert worth(Composition(half, parts, passes=0.5)) == ({"outcome": 0.5, "brief": 1}, True)


def test_another_part_may_be_the_gate_and_the_outcome_still_decides():
    parts = {"format": always(0), "brief": always(1)}
    assert worth(Composition(always(1), parts, gate="format")) == ({"outcome": 1}, True)
    assert worth(Composition(always(0), {**parts, "format": always(1)}, gate="format")) == (
        {"outcome": 0, "format": 1, "brief": 1},
        False,
    )


def test_parts_behind_a_closed_gate_are_not_asked():
    asked = []
    composition = Composition(always(0), {"judge": lambda subject: asked.append(subject) or 1})
    assert worth(composition) == ({"outcome": 0}, False) and asked == []


def test_each_verifier_is_given_what_it_judges():
    episode = SimpleNamespace(answer="<answer>the red lamp</answer>", orders={"4711": "back"})
    graded = Composition(
        of("orders", StateMatch({"4711": "back"})),
        {"form": of("answer", Format("answer")), "words": of("answer", of(lambda said: inside("answer", said), F1("lamp")))},
    )
    assert worth(graded, episode) == ({"outcome": 1, "form": 1, "words": pytest.approx(2 / 3)}, True)


def raising(error):
    def verifier(subject):
        raise error

    return verifier


async def raising_late(subject):
    await asyncio.sleep(0)
    raise InvalidAction("no")


async def hanging(subject):
    await asyncio.sleep(60)


def spinning(subject):
    while True:
        time.sleep(0.001)


@pytest.mark.parametrize(
    ("verifier", "reason"),
    [
        (raising(ValueError("no")), "verifier 'bad' raised ValueError: no"),
        (raising(SystemExit(1)), "verifier 'bad' raised SystemExit"),
        (raising_late, "verifier 'bad' raised InvalidAction: no"),
        (of("nothing", always(1)), "verifier 'bad' raised AttributeError"),
        (raising(EnvironmentFailed("the judge is out")), "the judge is out"),
        (always(math.nan), "verifier 'bad' gave is nan, not a finite number"),
        (always("1"), "verifier 'bad' gave is '1', not a finite number"),
        (always(None), "verifier 'bad' gave is None"),
        (hanging, r"verifier 'bad' has not answered for 0\.3 s"),
        (spinning, r"verifier 'bad' has not answered for 0\.3 s"),
    ],
)
def test_a_verifier_that_fails_breaks_the_episode_by_its_name_and_is_never_a_zero(verifier, reason):
    ended = []

    async def other(subject):
        try:
            await asyncio.sleep(30)
        finally:
            ended.append(subject)

    with pytest.raises(EnvironmentFailed, match=reason):
        worth(Composition(always(1), {"bad": verifier, "other": other}, timeout_s=0.3))
    assert ended == ["x"]  # the others end with it
    for _ in range(200):
        if not stuck():
            break
        time.sleep(0.02)
    assert not stuck()  # what hung was ended


def test_a_task_that_cannot_be_judged_keeps_its_type():
    with pytest.raises(TaskFailed):
        worth(Composition(raising(TaskFailed("no reference"))))


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"parts": {"outcome": always(1)}}, "cannot be called 'outcome'"),
        ({"parts": {"gate": always(1)}}, "cannot be called 'gate'"),
        ({"gate": "polit", "parts": {"polite": always(1)}}, "no part 'polit' for a gate. Did you mean 'polite'"),
        ({"weights": {"brief": 1}}, "no part 'brief' for a weight"),
    ],
)
def test_names_that_are_not_there_are_refused(options, reason):
    with pytest.raises(ConfigError, match=reason):
        Composition(always(1), **options)


class Desk(ToolWorld):
    graded = Composition(of("answer", Exact("lamp")), {"polite": of("answer", slowly)}, weights={"polite": 0.2})

    def reset(self, task):
        return "What is it?"

    async def verify(self):
        return await self.graded(self)


def test_a_world_is_judged_by_its_composition_also_when_a_limit_ends_the_episode():
    async def play():
        driver = Driver(Desk(), timeout_s=30)
        await driver.reset(task := Task("train/7", "desk", "train", 7))
        said = await driver.step("The lamp.")
        await driver.reset(task)
        return said, await driver.verify()

    said, cut = asyncio.run(play())
    assert (said.reward, said.success, said.parts) == (pytest.approx(1.1), True, {"outcome": 1, "polite": 0.1})
    assert (cut.reward, cut.success, cut.parts) == (0, False, {"outcome": 0})
