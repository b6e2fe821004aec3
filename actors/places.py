"""Which conversations say the same: each beginning of one has a number, and equal beginnings have the same.

Owns what was said in one episode so far. Promises:
- two beginnings have the same number exactly if they are of the same agent with the same tools, and say the same in the same
  order: thoughts do not count, since clients do not send them back, nor space around a text, nor how the JSON of a call is
  written;
- a message that was seen at its place before costs one comparison, so a turn costs what is new in it, however long the
  conversation has become; one that was changed in place meanwhile is noticed.
"""

from __future__ import annotations

import contextlib
import json
from dataclasses import dataclass, field
from typing import Any

from troupe.actors.rendering import Message, Tool, text_of


@dataclass(slots=True)
class _Seen:
    """The latest conversation of an agent. root: of its tools. stamps: each message as it was; places, sizes: one more."""

    root: str
    stamps: list[Message | str]
    places: list[int]
    sizes: list[int]


@dataclass(slots=True)
class Places:
    """The beginnings of an episode's conversations."""

    _numbers: dict[tuple[Any, ...], int] = field(default_factory=dict)
    _seen: dict[str, _Seen] = field(default_factory=dict)

    def of(self, agent: str, tools: list[Tool] | None, messages: list[Message]) -> tuple[list[int], int]:
        """The numbers of the empty beginning, the first message, the first two, …, and the characters of all texts.

        The numbers are a list that the next call changes."""
        root = repr(tools) if tools else ""
        seen = self._seen.get(agent)
        if seen is None or seen.root != root:
            seen = self._seen[agent] = _Seen(root, [], [self._number(0, agent, root)], [0])
        if (same := len(seen.stamps)) > len(messages) or seen.stamps != messages[:same]:
            same = _same(seen.stamps, messages)
            del seen.stamps[same:], seen.places[same + 1 :], seen.sizes[same + 1 :]
        for message in messages[same:]:
            seen.stamps.append(_stamp(message))
            seen.places.append(self.after(seen.places[-1], message))
            seen.sizes.append(seen.sizes[-1] + len(text_of(message)))
        return seen.places, seen.sizes[-1]

    def after(self, place: int, message: Message) -> int:
        """The number of the beginning that ends with `message` after the one of number `place`."""
        role = message.get("role")
        calls, answers = message.get("tool_calls"), message.get("tool_call_id")
        more = repr([[_call(call) for call in calls or []], answers or ""]) if calls or answers else ""
        return self._number(place, role if type(role) is str else repr(role), text_of(message).strip(), more)

    def _number(self, *said: Any) -> int:
        return self._numbers.setdefault(said, len(self._numbers) + 1)


def _same(stamps: list[Message | str], messages: list[Message]) -> int:
    """How many of the first messages are as they were."""
    for count, (stamp, message) in enumerate(zip(stamps, messages, strict=False)):
        if (message if type(stamp) is dict else repr(message)) != stamp:
            return count
    return min(len(stamps), len(messages))


def _stamp(message: Message) -> Message | str:
    """`message` as it is now: a copy if it is made of strings alone, else as text, in which 1 is not True."""
    for value in message.values():
        if type(value) is not str:
            return repr(message)
    return dict(message)


def _call(call: Any) -> list[Any]:
    function = call.get("function") or {}
    arguments = function.get("arguments", "")
    if isinstance(arguments, str):
        with contextlib.suppress(ValueError, RecursionError):  # broken as the agent wrote it: compared as text
            arguments = json.loads(arguments)
    return [call.get("id", ""), function.get("name", ""), json.dumps(arguments, sort_keys=True, default=str)]
