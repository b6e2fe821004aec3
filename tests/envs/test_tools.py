"""Tools: described from their signatures, run only with fitting arguments, answered whatever they return."""

import asyncio
import dataclasses
import enum
import json
import threading
from typing import Annotated, Any, Literal

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import Field

from troupe.envs.base import InvalidAction, Task, TextWorld, Turn
from troupe.envs.drive import Driver
from troupe.envs.tools import Rewards, ToolWorld, make_tool, tool
from troupe.protocol.errors import BadArguments, EnvironmentFailed, TaskFailed, TimedOut, UnknownTool

TASK = Task("train/7", "desk", "train", 7, {"goal": 3})


class Colour(enum.Enum):
    RED = "red"


@dataclasses.dataclass
class Place:
    title: str
    floor: int = 0


class Desk(ToolWorld):
    inline = True
    judged = 1.0

    def reset(self, task):
        self.log = []
        return "hello"

    @tool
    def find_order(self, order_id: str, at_most: Annotated[int, Field(description="how many", ge=1)] = 5) -> list[str]:
        """Look an order up
        by its number.

        Not for the agent.
        """
        self.log.append((order_id, at_most))
        return [order_id] * at_most

    @tool
    async def move(self, to: Place, colour: Colour | None = None, speed: Literal["slow", "fast"] = "slow") -> Any:
        """Move something."""
        return to

    @tool
    def say(self, what: Any) -> Any:
        """Give back what came."""
        return what

    @tool
    def give(self, name: str) -> Any:
        """Give one of the things that a test has put there."""
        thing = self.things[name]
        if isinstance(thing, BaseException):
            raise thing
        return thing

    def helper(self):
        """No tool."""

    def verify(self):
        return self.judged


def driven(play, world=None, task=TASK):
    async def run():
        driver = Driver(world or Desk(), timeout_s=20)
        await driver.reset(task)
        try:
            return await play(driver)
        finally:
            await driver.close()

    return asyncio.run(run())


def called(name, arguments, world=None):
    return driven(lambda driver: driver.call(name, arguments), world)


# -- what the agent is told ------------------------------------------------------------------------------------------


def test_a_tool_is_described_by_its_signature_and_the_first_paragraph_of_its_docstring():
    specs = {spec["name"]: spec for spec in Desk().tools()}
    assert list(specs) == ["find_order", "move", "say", "give"]
    assert specs["find_order"] == {
        "name": "find_order",
        "description": "Look an order up by its number.",
        "parameters": {
            "type": "object",
            "properties": {
                "order_id": {"type": "string"},
                "at_most": {"type": "integer", "description": "how many", "minimum": 1, "default": 5},
            },
            "required": ["order_id"],
        },
    }
    move = specs["move"]["parameters"]
    assert move["properties"]["speed"] == {"type": "string", "enum": ["slow", "fast"], "default": "slow"}
    assert "title" in move["$defs"]["Place"]["properties"] and json.dumps(specs)


def test_a_world_without_tools_has_none():
    class Plain(TextWorld):
        inline = True

        def reset(self, task):
            return "hello"

    async def play(driver):
        with pytest.raises(UnknownTool, match="no tool 'find': Plain has none"):
            await driver.call("find", {})
        return driver.tools(), await driver.verify()

    assert driven(play, Plain()) == ([], None)


def _untold(self, name: str): ...


def _unhinted(self, name):
    """Find."""


def _many(self, *names: str):
    """Find."""


def _rest(self, **names: str):
    """Find."""


def _positional(self, name: str, /):
    """Find."""


def _unreadable(self, name: "Nowhere"):  # noqa: F821
    """Find."""


def _no_json(self, name: threading.Thread):
    """Find."""


@pytest.mark.parametrize(
    ("function", "reason"),
    [
        (_untold, "tool 'find' has no docstring"),
        (_unhinted, "give the argument 'name' a type hint"),
        (_many, r"'\*names: str' cannot be given by its name"),
        (_rest, r"'\*\*names: str' cannot be given by its name"),
        (_positional, "cannot be given by its name"),
        (_unreadable, "name 'Nowhere' is not defined"),
        (_no_json, "cannot be described as JSON"),
        (staticmethod(_untold), "is a staticmethod: make it a plain method"),
    ],
)
def test_a_tool_that_cannot_be_described_is_refused_when_its_class_is_defined(function, reason):
    with pytest.raises(TypeError, match=reason) as error:
        type("World", (ToolWorld,), {"find": tool(function)})
    assert "\n" not in str(error.value)


@pytest.mark.parametrize("name", ["step", "reset", "verify", "close", "tools", "task", "name"])
def test_a_tool_cannot_take_the_name_of_something_that_the_world_needs(name):
    def find(self):
        """Find."""

    with pytest.raises(TypeError, match=f"tool '{name}' of World: .*call it otherwise"):
        type("World", (ToolWorld,), {name: tool(find)})


def test_an_argument_may_have_any_name_and_a_tool_may_be_called_answer():
    class Odd(Desk):
        @tool
        def answer(self, schema: str, model_config: int, _x: int, copy: bool, a0: int = 4) -> list[Any]:
            """Odd."""
            return [schema, model_config, _x, copy, a0]

    arguments = {"schema": "s", "model_config": 1, "_x": 2, "copy": True}
    assert called("answer", arguments, Odd()).text == '["s", 1, 2, true, 4]'


def test_subclasses_inherit_tools_and_an_override_is_one_only_if_marked():
    class Less(Desk):
        say = None

        def move(self):
            """No longer for the agent."""

    class More(Less):
        @tool
        def move(self, by: int) -> int:
            """Move by some steps."""
            return by

    assert [spec["name"] for spec in Less().tools()] == ["find_order", "give"]
    assert [spec["name"] for spec in More().tools()] == ["find_order", "move", "give"]
    assert called("move", {"by": 3}, More()).text == "3"


def test_tools_added_for_one_episode_are_gone_in_the_next():
    class Changing(Desk):
        def reset(self, task):
            def lucky() -> int:
                """Give the number of the task."""
                return task.seed

            if task.seed:
                self.add_tool(lucky)
                self.add_tool(lambda: 1, "said") if task.seed > 8 else None
            return "hello"

    async def play(driver):
        assert (await driver.call("lucky", {})).text == "7"
        await driver.reset(Task("train/0", "desk", "train", 0))
        with pytest.raises(UnknownTool, match="no tool 'lucky'"):
            await driver.call("lucky", {})
        with pytest.raises(EnvironmentFailed, match=r"Changing.reset .*tool 'said' has no docstring"):
            await driver.reset(Task("train/9", "desk", "train", 9))

    driven(play, Changing())


def test_a_tool_that_is_not_offered_cannot_be_called():
    class Shy(Desk):
        def tools(self):
            return [spec for spec in super().tools() if spec["name"] != "say"]

    with pytest.raises(UnknownTool, match="no tool 'say'"):
        called("say", {"what": 1}, Shy())


@pytest.mark.parametrize("offered", [[1], [{"name": "x"}], [{"name": 1, "parameters": {}}], RuntimeError("boom")])
def test_nonsense_instead_of_tools_is_a_failed_environment(offered):
    class Broken(Desk):
        def tools(self):
            if isinstance(offered, Exception):
                raise offered
            return offered

    async def play(driver):
        with pytest.raises(EnvironmentFailed, match=r"Broken\.tools"):
            driver.tools()

    driven(play, Broken())


# -- arguments -------------------------------------------------------------------------------------------------------


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


# -- what comes back -------------------------------------------------------------------------------------------------


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


# -- calls that run together -----------------------------------------------------------------------------------------


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


# -- verdicts --------------------------------------------------------------------------------------------------------


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


def test_a_function_is_described_under_the_name_it_is_given():
    def find(name: str = "x"):
        """Find."""

    assert make_tool("other", find).spec["name"] == "other"
    with pytest.raises(TypeError, match="is no name for a tool"):
        make_tool("<lambda>", find)
