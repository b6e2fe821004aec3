"""Worlds whose agents call tools: a tool is a method with type hints and a docstring.

    class Desk(ToolWorld):
        @tool
        def find_order(self, order_id: str) -> dict[str, Any]:
            \"\"\"Look an order up by its number.\"\"\"

Promises:
- what the agent is told about a tool is made from its signature: types, defaults, the docstring's first paragraph, and
  `Annotated[str, Field(description=...)]` for one argument. It cannot disagree with what is checked;
- a tool runs only with arguments of the types that it asks for; all else is UnknownTool or BadArguments, of one line;
- a tool that cannot be described is a TypeError when its class is defined, not in the middle of an episode.
"""

from __future__ import annotations

import inspect
import json
import re
import typing
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from pydantic_core import to_jsonable_python

from troupe.envs.base import Task, TextWorld, Turn, finite
from troupe.protocol.errors import BadArguments, EnvironmentFailed, InvalidAction, UnknownTool, nearest

__all__ = ["Rewards", "Tool", "ToolWorld", "tool"]

F = TypeVar("F", bound=Callable[..., Any])

_MARK = "__troupe_tool__"
_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_]{0,63}")
_VERBATIM = ("default", "examples", "const", "enum")  # parts of a JSON schema that hold data, not schemas
_SHOWN = 60  # characters of what the agent wrote that an error repeats


def tool(function: F) -> F:
    """Marks a method, synchronous or `async`, as a tool. An override in a subclass is a tool only if marked again."""
    setattr(function, _MARK, True)
    return function


class Rewards:
    """An outcome, with further named parts of the reward that may count only if a gate is open.

    Rewards(outcome=1.0, polite=0.1, gate="outcome"): `polite` counts only if `outcome` is greater than 0. gate: name of a
    part, None: all parts count. Raises EnvironmentFailed for a part that is no finite number (law 6).

    total: sum of `parts`. parts: those that counted, `outcome` always. success: `outcome` is greater than 0.
    """

    def __init__(self, outcome: float, gate: str | None = None, **parts: float) -> None:
        given = {name: finite(f"Rewards: {name}", value) for name, value in {"outcome": outcome, **parts}.items()}
        if gate is not None and gate not in given:
            raise EnvironmentFailed(f"Rewards has no part '{gate}' to be the gate.{nearest(gate, given)}")
        counts = gate is None or given[gate] > 0
        self.parts = given if counts else {"outcome": given["outcome"]}
        self.total = sum(self.parts.values())
        self.success = given["outcome"] > 0


def turn_of(verdict: Any) -> Turn:
    """What `verify` returned, as the turn that ends the episode. Raises EnvironmentFailed for what is no verdict."""
    rewards = verdict if isinstance(verdict, Rewards) else Rewards(verdict)
    return Turn("", reward=rewards.total, done=True, success=rewards.success, parts=dict(rewards.parts))


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that an agent may call.

    parameters: JSON schema of its arguments, an object. run: the function, called with keywords. check: gives arguments as
    `run` wants them, or raises BadArguments.
    """

    name: str
    description: str
    parameters: dict[str, Any]
    run: Callable[..., Any]
    check: Callable[[dict[str, Any]], dict[str, Any]]

    @property
    def spec(self) -> dict[str, Any]:
        """An OpenAI function object."""
        return {"name": self.name, "description": self.description, "parameters": self.parameters}

    def validated(self, arguments: Any) -> dict[str, Any]:
        """`arguments` as the function wants them, defaults included. Raises BadArguments: which one, and why."""
        if not isinstance(arguments, dict):
            raise BadArguments(f"{self.name}: arguments are an object with names, not a {type(arguments).__name__}")
        try:
            return self.check(arguments)
        except RecursionError:
            raise BadArguments(f"{self.name}: the arguments are nested too deeply") from None


@dataclass(frozen=True, slots=True)
class _Signature:
    """What a function asks of its arguments."""

    name: str
    model: type[BaseModel]
    arguments: dict[str, str]
    """Argument → field of `model`: named otherwise, because an argument may be called as a method of the model is."""

    def __call__(self, arguments: dict[str, Any]) -> dict[str, Any]:
        try:
            ready = self.model.model_validate(arguments)
        except ValidationError as error:
            raise BadArguments(self._reason(error)) from None
        return {name: getattr(ready, field) for name, field in self.arguments.items()}

    def _reason(self, error: ValidationError) -> str:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        first = next((one for one in found if one["type"] == "extra_forbidden"), found[0])  # a misspelt name explains the rest
        place = short(".".join(map(str, first["loc"])))
        if first["type"] == "missing" and len(first["loc"]) == 1:
            return f"{self.name} needs the argument '{place}'"
        if first["type"] == "extra_forbidden" and len(first["loc"]) == 1:
            known = ", ".join(self.arguments) or "none"
            return f"{self.name} has no argument '{place}'.{nearest(place, self.arguments)} It takes: {known}"
        return f"{self.name}: argument '{place}': {short(first['msg'], 200)}"


class ToolWorld(TextWorld):
    """Base of worlds with tools. Subclasses define `reset`, some tools, and `verify` (or `step`)."""

    answer: str
    """The message that ended the episode; empty until then."""

    _tools: ClassVar[dict[str, Tool]] = {}
    _added: dict[str, Tool]

    def __init_subclass__(cls, **options: Any) -> None:
        super().__init_subclass__(**options)
        names = dict.fromkeys(name for kind in reversed(cls.__mro__) for name in vars(kind))
        cls._tools = {name: _class_tool(cls, name) for name in names if _marked(inspect.getattr_static(cls, name))}

    def _begin(self, task: Task) -> None:
        super()._begin(task)
        self._added = {}
        self.answer = ""
        vars(self)["task"] = task  # `self.task` is the one being played; `World.task(split, index)` makes one

    # -- may be refined ----------------------------------------------------------------------------------------------

    def tools(self) -> list[dict[str, Any]]:
        """What the agent may call now, as OpenAI function objects. A tool that is left out cannot be called."""
        return [found.spec for found in _all(self).values()]

    def add_tool(self, function: Callable[..., Any] | Tool, name: str = "") -> None:
        """One more tool, for this episode only: a function, or a Tool as it is. Raises TypeError if it cannot be described."""
        made = function if isinstance(function, Tool) else make_tool(name or getattr(function, "__name__", ""), function)
        self._added = {**getattr(self, "_added", {}), made.name: made}

    def step(self, text: str) -> Any:
        """The agent's message without a tool call: its answer, which ends the episode."""
        before, self.answer = self.answer, text
        try:
            verdict = self.verify()
        except (InvalidAction, ValueError):  # not an answer at all: the agent is told, and has not answered
            self.answer = before
            raise
        return self._later(verdict, before) if inspect.isawaitable(verdict) else turn_of(verdict)

    async def _later(self, verdict: Awaitable[Any], before: str) -> Turn:
        try:
            return turn_of(await verdict)
        except (InvalidAction, ValueError):
            self.answer = before
            raise

    def verify(self) -> Any:
        """What the episode is worth: `Rewards`, a number or a bool, from the world's present state.

        It is asked when the agent answers, and when a limit ends the episode before that (`self.answer` is then empty).
        May be `async`. A world that gives its rewards in `step` or in tools (as a `Turn`) need not define it.
        """
        raise TypeError(f"{type(self).__name__} does not define verify(self)")


def lookup(world: ToolWorld, name: str) -> Tool:
    """The tool that the agent means. Raises UnknownTool, with the nearest name."""
    names = [spec["name"] for spec in world.tools()]
    found = _all(world).get(name) if name in names else None
    if found is None:
        raise UnknownTool(f"no tool '{short(name)}'.{nearest(short(name), names)} Known: {', '.join(names) or 'none'}")
    return found if name in getattr(world, "_added", {}) else replace(found, run=found.run.__get__(world, type(world)))


def observed(result: Any) -> Any:
    """What a tool returned, as a Turn or a str to observe. Raises TypeError or ValueError for what is no JSON."""
    if result is None:
        return ""
    return result if isinstance(result, str | Turn) else json.dumps(to_jsonable_python(result), ensure_ascii=False)


def make_tool(name: str, function: Callable[..., Any], *, method: bool = False) -> Tool:
    """Describes a function. method: its first parameter is the world. Raises TypeError with what is missing."""
    if not _NAME.fullmatch(name):
        raise TypeError(f"'{short(name)}' is no name for a tool: letters, digits and _, at most 64; give add_tool a name")
    about = (inspect.getdoc(function) or "").strip().partition("\n\n")[0]
    if not about:
        raise TypeError(f"tool '{name}' has no docstring: say in one what it does, the agent reads it")
    try:
        hints = typing.get_type_hints(function, include_extras=True)
    except (NameError, AttributeError) as error:
        raise TypeError(f"tool '{name}': a type hint cannot be read ({error}): define the type in the module, above") from None
    fields: dict[str, Any] = {}
    arguments: dict[str, str] = {}
    for parameter in list(inspect.signature(function).parameters.values())[method:]:
        if parameter.kind not in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY):
            raise TypeError(f"tool '{name}': '{parameter}' cannot be given by its name: use plain parameters")
        if parameter.name not in hints:
            raise TypeError(f"tool '{name}': give the argument '{parameter.name}' a type hint")
        default = ... if parameter.default is parameter.empty else parameter.default
        field = arguments[parameter.name] = f"a{len(arguments)}"
        fields[field] = (Annotated[hints[parameter.name], Field(alias=parameter.name)], default)
    try:
        model = create_model(name, __config__=ConfigDict(extra="forbid"), **fields)
        schema = untitled(model.model_json_schema())
    except Exception as error:  # pydantic has many ways to refuse a type
        raise TypeError(f"tool '{name}': its arguments cannot be described as JSON: {short(str(error), 200)}") from None
    for left_out in ("description", "additionalProperties"):
        schema.pop(left_out, None)
    check = _Signature(name, model, arguments)
    return Tool(name, " ".join(about.split()), {"type": "object", "properties": {}, **schema}, function, check)


def short(text: str, length: int = _SHOWN) -> str:
    """`text` on one line, cut to `length` characters."""
    line = " ".join(text[: 2 * length].split())
    return line if len(line) <= length and len(text) <= 2 * length else line[:length] + "…"


# -- helpers ---------------------------------------------------------------------------------------------------------


def _marked(value: Any) -> bool:
    return bool(getattr(value, _MARK, False))


def _class_tool(cls: type[ToolWorld], name: str) -> Tool:
    if hasattr(ToolWorld, name):
        raise TypeError(f"tool '{name}' of {cls.__name__}: a world's own '{name}' has that name: call it otherwise")
    function = inspect.getattr_static(cls, name)
    if not inspect.isfunction(function):
        raise TypeError(f"tool '{name}' of {cls.__name__} is a {type(function).__name__}: make it a plain method")
    return make_tool(name, function, method=True)


def _all(world: ToolWorld) -> dict[str, Tool]:
    return {**world._tools, **getattr(world, "_added", {})}


def untitled(schema: Any) -> Any:
    """A JSON schema without the titles that pydantic makes of names: they tell the agent nothing and cost tokens."""
    if isinstance(schema, list):
        return [untitled(item) for item in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        key: value if key in _VERBATIM else untitled(value)
        for key, value in schema.items()
        if key != "title" or not isinstance(value, str)
    }
