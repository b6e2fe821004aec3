"""Tools: described from their signatures, and offered to the agent."""

import json
import threading
from typing import Any

import pytest

from tests.envs.tool_world import Desk, called, driven
from troupe.envs.base import Task, TextWorld
from troupe.envs.tools import ToolWorld, make_tool, tool
from troupe.protocol.errors import EnvironmentFailed, UnknownTool


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


def test_a_function_is_described_under_the_name_it_is_given():
    def find(name: str = "x"):
        """Find."""

    assert make_tool("other", find).spec["name"] == "other"
    with pytest.raises(TypeError, match="is no name for a tool"):
        make_tool("<lambda>", find)
