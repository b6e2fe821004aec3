"""Calls of tools: run only with fitting arguments, answered whatever they return, also side by side."""

import asyncio
import json
import threading
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.envs.tool_world import TASK, Colour, Desk, Place, called, driven
from troupe.envs.base import InvalidAction, Turn
from troupe.envs.tools import ToolWorld, tool
from troupe.protocol.errors import BadArguments, EnvironmentFailed, TaskFailed, TimedOut, UnknownTool


def test_a_tool_gets_arguments_of_the_types_it_asked_for_and_its_defaults():
    async def play(driver):
        assert (await driver.call("find_order", {"order_id": "a", "at_most": "2"})).text == '["a", "a"]'
        await driver.call("find_order", {"order_id": "b"})
        assert driver.world.log == [("a", 2), ("b", 5)]
        turn = await driver.call("move", {"to": {"title": "attic"}, "colour": "red"})
        assert json.loads(turn.text) == {"title": "attic", "floor": 0}

    driven(play)


@pytest.mark.parametrize(
    ("name", "arguments", "error", "reason"),
    [
        ("find_ordr", {}, UnknownTool, "no tool 'find_ordr'. Did you mean 'find_order'? Known: find_order, move, say, give"),
        ("helper", {}, UnknownTool, "no tool 'helper'"),
        ("__init__", {}, UnknownTool, "no tool '__init__'"),
        ("find_order", {}, BadArguments, "find_order needs the argument 'order_id'"),
        ("find_order", {"ordr_id": 1}, BadArguments, "find_order has no argument 'ordr_id'. Did you mean 'order_id'?"),
        ("find_order", {"order_id": 3}, BadArguments, "find_order: argument 'order_id': Input should be a valid string"),
        (
            "find_order",
            {"order_id": "a", "at_most": 0},
            BadArguments,
            "find_order: argument 'at_most': Input should be greater",
        ),
        ("find_order", {"order_id": "a", "self": 0}, BadArguments, "find_order has no argument 'self'"),
        ("find_order", {"order_id": "a", "a0": 0}, BadArguments, "find_order has no argument 'a0'"),
        ("find_order", ["a"], BadArguments, "find_order: arguments are an object with names, not a list"),
        ("move", {"to": {"floor": 1}}, BadArguments, "move: argument 'to.title': Field required"),
        ("move", {"to": {"title": "x"}, "speed": "warp"}, BadArguments, "move: argument 'speed': Input should be 'slow' or"),
    ],
)
def test_a_wrong_call_is_one_line_that_says_what_is_wrong_and_the_episode_goes_on(name, arguments, error, reason):
    async def play(driver):
        with pytest.raises(error) as told:
            await driver.call(name, arguments)
        assert reason in str(told.value) and "\n" not in str(told.value)
        assert (await driver.call("say", {"what": "fine"})).text == "fine" and driver.world.log == []

    driven(play)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(exclude_categories=())),
    lambda inner: (
        st.lists(inner, max_size=4) | st.dictionaries(st.text(st.characters(exclude_categories=())), inner, max_size=4)
    ),
    max_leaves=8,
)
NAMES = st.sampled_from(["find_order", "move", "say"]) | st.text(st.characters(exclude_categories=()))
KEYS = st.sampled_from(["order_id", "at_most", "to", "colour", "speed", "what"]) | st.text()


@given(NAMES, st.dictionaries(KEYS, JSON, max_size=4) | JSON)
def test_whatever_an_agent_writes_it_is_answered_in_words_that_can_be_encoded(name, arguments):
    async def play(driver):
        try:
            text = (await driver.call(name, arguments)).text
        except (UnknownTool, BadArguments, InvalidAction) as error:
            text = str(error)
            assert len(text) < 600 and "\n" not in text
        text.encode()
        assert (await driver.call("say", {"what": ""})).text == ""

    driven(play)


def test_deeply_nested_arguments_are_refused_or_answered():
    deep: Any = {}
    for _ in range(20_000):
        deep = {"a": deep}
    with pytest.raises((BadArguments, EnvironmentFailed)):
        called("find_order", {"order_id": deep})


@pytest.mark.parametrize(
    ("thing", "text"),
    [
        ("", ""),
        (None, ""),
        ("plain", "plain"),
        (3, "3"),
        (True, "true"),
        ({"a": [1, None]}, '{"a": [1, null]}'),
        (Place("café"), '{"title": "café", "floor": 0}'),
        (Colour.RED, '"red"'),
        (("a", {1}), '["a", [1]]'),
        ("\ud800", "?"),
    ],
)
def test_a_tool_may_return_text_nothing_or_anything_that_json_can_say(thing, text):
    world = Desk()
    world.things = {"it": thing}
    assert called("give", {"name": "it"}, world) == Turn(text)


@pytest.mark.parametrize("thing", [object(), lambda: 1, Turn(3), Turn("x", reward=float("nan")), RuntimeError("boom")])
def test_a_tool_that_returns_nonsense_or_breaks_is_a_failed_environment_that_names_it(thing):
    world = Desk()
    world.things = {"it": thing}
    with pytest.raises(EnvironmentFailed, match=r"Desk.give \(task train/7, seed 7\)"):
        called("give", {"name": "it"}, world)


def test_a_result_that_holds_itself_is_a_failed_environment():
    world, endless = Desk(), []
    endless.append(endless)
    world.things = {"it": endless}
    with pytest.raises(EnvironmentFailed, match="is no JSON"):
        called("give", {"name": "it"}, world)


@pytest.mark.parametrize("error", [InvalidAction("no such order"), ValueError("no such order")])
def test_a_tool_that_refuses_tells_the_agent_and_the_episode_goes_on(error):
    world = Desk()
    world.things = {"it": error}

    async def play(driver):
        with pytest.raises(InvalidAction, match="no such order"):
            await driver.call("give", {"name": "it"})
        return await driver.call("say", {"what": "still here"})

    assert driven(play, world).text == "still here"


def test_a_task_that_cannot_be_run_anywhere_says_so_itself():
    world = Desk()
    world.things = {"it": TaskFailed("no such file")}
    with pytest.raises(TaskFailed, match="no such file"):
        called("give", {"name": "it"}, world)


def test_a_tool_may_end_the_episode_with_a_reward():
    world = Desk()
    world.things = {"it": Turn("sold", reward=2.0, done=True, parts={"price": 2.0})}

    async def play(driver):
        assert await driver.call("give", {"name": "it"}) == Turn("sold", 2.0, True, None, {"price": 2.0})
        with pytest.raises(InvalidAction, match="the episode is over"):
            await driver.call("give", {"name": "it"})
        with pytest.raises(EnvironmentFailed, match="outside of an episode"):
            await driver.verify()

    driven(play, world)


class Together(ToolWorld):
    def reset(self, task):
        self.inside = self.most = 0
        self.order = []
        self.gate = asyncio.Event()
        return ""

    @tool
    def slow(self, number: int) -> int:
        """Take a moment in a thread."""
        self.inside += 1
        self.most = max(self.most, self.inside)
        threading.Event().wait(0.15)
        self.inside -= 1
        self.order.append(number)
        return number

    @tool
    async def wait(self) -> str:
        """Wait for the gate."""
        await self.gate.wait()
        return "waited"

    @tool
    async def open(self) -> str:
        """Open the gate."""
        self.gate.set()
        return "opened"

    @tool
    def submit(self, right: bool) -> Turn:
        """End the episode from a thread."""
        return Turn("end", reward=float(right), done=True)

    @tool
    async def end(self) -> Turn:
        """End the episode at the gate."""
        await self.gate.wait()
        return Turn("end", reward=1.0, done=True)


def test_synchronous_tools_of_one_world_never_run_two_at_a_time_and_waiting_is_not_counted_as_their_own_time():
    async def play(driver):
        driver.timeout_s = 1.0
        turns = await asyncio.gather(*(driver.call("slow", {"number": n}) for n in range(10)))
        assert [turn.text for turn in turns] == [str(n) for n in range(10)]
        assert driver.world.most == 1 and driver.world.order == list(range(10))

    driven(play, Together())


def test_async_tools_run_at_the_same_time():
    async def play(driver):
        return await asyncio.gather(driver.call("wait", {}), driver.call("open", {}))

    assert [turn.text for turn in driven(play, Together())] == ["waited", "opened"]


def test_an_episode_is_over_once_however_many_calls_end_it():
    async def play(driver):
        sync = await asyncio.gather(*(driver.call("submit", {"right": True}) for _ in range(3)), return_exceptions=True)
        await driver.reset(TASK)
        calls = [driver.call("end", {}) for _ in range(3)]
        later = await asyncio.gather(*calls, driver.call("open", {}), return_exceptions=True)
        return sync, later[:3]

    for turns in driven(play, Together()):
        assert [turn.reward for turn in turns if isinstance(turn, Turn)] == [1.0]
        assert [str(error) for error in turns if isinstance(error, InvalidAction)] == ["the episode is over"] * 2


def test_calls_beside_one_that_hangs_are_told_that_the_world_is_lost():
    release = threading.Event()

    class Hangs(Together):
        @tool
        def hang(self) -> None:
            """Hang."""
            release.wait(30)

    async def play(driver):
        driver.timeout_s = 0.1
        calls = (driver.call("hang", {}), driver.call("slow", {"number": 1}))
        first, second = await asyncio.gather(*calls, return_exceptions=True)
        assert isinstance(first, TimedOut) and "Hangs.hang (task train/7, seed 7) has not returned for 0.1 s" in str(first)
        assert isinstance(second, EnvironmentFailed) and "an earlier call has not returned" in str(second)
        release.set()

    driven(play, Hangs())
