"""Say which tools to call: requests to an assistant at home, graded call by call against what was asked for.

The agent answers a request with one message, in which each line between the tags is a call:

    <calls>
    {"name": "set_timer", "arguments": {"minutes": 12, "label": "eggs"}}
    {"name": "turn_on", "arguments": {"device": "lamp", "room": "kitchen"}}
    </calls>

Nothing is run: the reward is ToolRL's, format (0 or 1) and correctness (−3 to 3, see `tool_grading`), each in named parts.

Promises: one request in five, by the digest of its calls, is held out; what cannot be read is graded, not refused.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from typing import Any, ClassVar, NamedTuple

from troupe.envs.base import Task, TextWorld, Turn, belongs, rng_of
from troupe.envs.tool_grading import LOWEST, ToolCall, grade
from troupe.protocol.errors import TaskFailed

_READ = 4_000  # characters of a message that are looked at
_MOST = 8  # calls that are graded
_DRAWS = 1_000
_BLOCK = re.compile(r"<calls>\n(.*?)\n</calls>", re.DOTALL)

_VALUES: dict[str, tuple[str, ...]] = {
    "label": ("tea", "eggs", "pasta", "bread", "soup"),
    "room": ("kitchen", "bedroom", "office", "garden"),
    "device": ("lamp", "heater", "radio", "fan"),
    "artist": ("Bach", "Nina Simone", "Queen", "Miles Davis"),
    "to": ("Ada", "Grace", "Alan", "Linus"),
    "text": ("I am late", "dinner is ready", "call me back", "see you soon"),
    "day": ("Monday", "Tuesday", "Friday", "Sunday"),
    "title": ("dentist", "lunch", "football", "piano lesson"),
}


class _Tool(NamedTuple):
    """asks: ways to ask for it, with its arguments in braces."""

    name: str
    about: str
    arguments: tuple[str, ...]
    asks: tuple[str, ...]


_TOOLS = (
    _Tool("set_timer", "start a timer", ("minutes", "label"), (
        "set a timer of {minutes} minutes for the {label}", "tell me when the {label} has had {minutes} minutes")),
    _Tool("turn_on", "switch a device on", ("device", "room"), (
        "turn on the {device} in the {room}", "I need the {device} in the {room}")),
    _Tool("turn_off", "switch a device off", ("device", "room"), (
        "turn off the {device} in the {room}", "no more {device} in the {room}")),
    _Tool("play", "play music", ("artist", "room"), (
        "play {artist} in the {room}", "some {artist} for the {room}")),
    _Tool("send", "send a message", ("to", "text"), (
        "write to {to}: {text}", "let {to} know: {text}")),
    _Tool("add_event", "put something into the calendar", ("title", "day", "hour"), (
        "put {title} on {day} at {hour}", "I have {title} on {day} at {hour}")),
)  # fmt: skip
_NUMBERS = {"minutes": (1, 59), "hour": (7, 21)}
_TYPES = {name: "integer" for name in _NUMBERS}
_EXAMPLE = ToolCall("turn_on", {"device": "lamp", "room": "hall"})


class ToolCalls(TextWorld):
    """Options: calls: most calls that a request needs, 1 to 4."""

    name: ClassVar[str] = "tool_calls"
    max_turns: ClassVar[int] = 1
    inline: ClassVar[bool] = True

    def __init__(self, calls: int = 2) -> None:
        if not 1 <= calls <= 4:
            raise ValueError(f"calls is {calls}; it is 1 to 4")
        self.calls = calls

    def reset(self, task: Task) -> str:
        for _ in range(_DRAWS):
            drawn = [self._draw() for _ in range(self.rng.randint(1, self.calls))]
            self.reference = [call for call, _ in drawn]
            if belongs(written(sorted(self.reference, key=str)), task.split):
                request = ", and ".join(words for _, words in drawn)
                return request[0].upper() + request[1:] + "."
        raise TaskFailed(f"no request of split '{task.split}' in {_DRAWS} draws")

    def _draw(self) -> tuple[ToolCall, str]:
        tool = self.rng.choice(_TOOLS)
        arguments = {name: self._value(name, self.rng) for name in tool.arguments}
        return ToolCall(tool.name, arguments), self.rng.choice(tool.asks).format(**arguments)

    @staticmethod
    def _value(name: str, rng: random.Random) -> Any:
        return rng.randint(*_NUMBERS[name]) if name in _NUMBERS else rng.choice(_VALUES[name])

    def step(self, text: str) -> Turn:
        calls, clean = read(text)
        parts = {"format": float(clean), "lowest": LOWEST}
        correct = LOWEST
        if calls is not None:
            found = grade(calls, self.reference)
            correct, parts = found.correct, parts | found.parts
        right = clean and correct == -LOWEST
        return Turn("Done." if right else "Not what I asked for.", parts["format"] + correct, True, right, parts)

    # -- its scripted player -----------------------------------------------------------------------------------------

    def play(self, rng: random.Random, noise: float) -> str:
        return written([self._slip(call, rng) if rng.random() < noise else call for call in self.reference])

    def _slip(self, call: ToolCall, rng: random.Random) -> ToolCall:
        """A call of some other tool, or another value of one argument."""
        if rng.random() < 0.3:
            other = rng.choice(_TOOLS)
            return ToolCall(other.name, {name: self._value(name, rng) for name in other.arguments})
        name = rng.choice(list(call.arguments))
        return ToolCall(call.name, {**call.arguments, name: self._value(name, rng)})

    @classmethod
    def corpus(cls) -> Iterator[str]:
        yield cls.system
        yield from ("Done.", "Not what I asked for.")
        yield from (value for values in _VALUES.values() for value in values)
        for index in range(64):
            world, task = cls(), cls.task("train", index)
            world.rng = rng_of(task)
            yield world.reset(task)
            yield world.play(world.rng, noise=0.0)


def written(calls: list[ToolCall]) -> str:
    """The message that makes these calls."""
    lines = (json.dumps({"name": call.name, "arguments": call.arguments}) for call in calls)
    return "\n".join(("<calls>", *lines, "</calls>"))


def read(message: str) -> tuple[list[ToolCall] | None, bool]:
    """(the calls, whether the message is nothing but them); None for calls that cannot be read, or more than eight."""
    found = _BLOCK.search(message[:_READ])
    if found is None:
        return None, False
    calls = []
    for line in found[1].splitlines():
        try:
            said = json.loads(line)
        except (ValueError, RecursionError):
            return None, False
        match said:
            case {"name": str(name), "arguments": dict(arguments), **others} if not others:
                calls.append(ToolCall(name, arguments))
            case _:
                return None, False
    alone = found[0] == message.strip()
    return (calls, alone) if len(calls) <= _MOST else (None, False)


def _signature(tool: _Tool) -> str:
    arguments = ", ".join(f"{name}: {_TYPES.get(name, 'string')}" for name in tool.arguments)
    return f"{tool.name}({arguments}): {tool.about}"


ToolCalls.system = "\n".join(
    (
        "You are an assistant at home. Your tools:",
        *map(_signature, _TOOLS),
        "Answer with the calls that the request needs and nothing else, one a line, like",
        written([_EXAMPLE]),
    )
)
