"""Gymnasium's spaces as text: how an observation is printed, and how a message is read as an action.

Promises:
- what cannot be printed or read is one ConfigError when the world is made, which names the space and a way out;
- the same observation prints the same text; numbers keep four digits;
- a message counts as an action only if it names exactly one: names first, then numbers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from troupe.envs.adapters import pictures
from troupe.envs.tools import short
from troupe.protocol.errors import ConfigError, InvalidAction

LARGEST = 256
"""Numbers of one array that are printed."""
_TOLD = 40  # names of actions that a message lists
_NUMBER = re.compile(r"(?<![\w.])-?[0-9]{1,9}(?!\w|\.[0-9])")


def printer(space: Any, where: str) -> Callable[[Any], str]:
    """What prints observations of `space`. Raises ConfigError for a space that it cannot print."""
    from gymnasium import spaces

    if isinstance(space, spaces.Text):
        return str
    if isinstance(space, spaces.Discrete):
        return lambda seen: str(int(seen))
    if isinstance(space, spaces.Dict):
        parts = {key: printer(part, where) for key, part in space.spaces.items()}
        return lambda seen: "\n".join(f"{key}: {show(seen[key])}" for key, show in parts.items())
    if isinstance(space, spaces.Tuple):
        shows = [printer(part, where) for part in space.spaces]
        between = " " if all(isinstance(part, spaces.Discrete) for part in space.spaces) else "\n"
        return lambda seen: between.join(show(part) for show, part in zip(shows, seen, strict=True))
    if isinstance(space, spaces.Box | spaces.MultiDiscrete | spaces.MultiBinary):
        shape = tuple(space.shape)
        if pictures.is_frame(shape, space.dtype):
            return pictures.drawn
        if len(shape) <= 2 and np.prod(shape) <= LARGEST:
            return _array
        raise ConfigError(f"{where}: observations of shape {shape} are too large to print: {LARGEST} numbers in at most 2 axes")
    raise ConfigError(f"{where}: observations of {short(str(space))} cannot be printed: use a gymnasium.ObservationWrapper")


def recurs(space: Any) -> bool:
    """Is an observation of `space` a state that may come again, because it has no part that is continuous or text?"""
    from gymnasium import spaces

    if isinstance(space, spaces.Dict | spaces.Tuple):
        parts = space.spaces.values() if isinstance(space, spaces.Dict) else space.spaces
        return all(map(recurs, parts))
    return isinstance(space, spaces.Discrete | spaces.MultiDiscrete | spaces.MultiBinary)


def mentioned(message: str, names: Mapping[str, int]) -> set[int]:
    """The values of those `names`, in lower case, that `message` holds as whole words, in whatever case."""
    longest = sorted(names, key=len, reverse=True)
    pattern = r"(?<!\w)(?:" + "|".join(map(re.escape, longest)) + r")(?!\w)"
    return {names[found.lower()] for found in re.findall(pattern, message, re.IGNORECASE) if found.lower() in names}


class Named:
    """Actions of a Discrete space. names: one for each, in the space's order; none: its numbers are the names."""

    def __init__(self, space: Any, names: Sequence[str], where: str) -> None:
        first, n = int(space.start), int(space.n)
        numbers = [str(first + i) for i in range(n)]
        self.names = [str(name) for name in names] or numbers
        if len(self.names) != n:
            raise ConfigError(f"{where}: {len(self.names)} names for {n} actions: give one for each, in order")
        self._at = {name.lower(): first + i for i, name in enumerate(self.names)}
        if len(self._at) != n or not all(name.strip() for name in self.names):
            raise ConfigError(f"{where}: names of actions are different from each other, whatever their case, and not empty")
        self._numbers = dict(zip(numbers, range(first, first + n), strict=True))

    @property
    def told(self) -> str:
        """What the agent may say."""
        if len(self.names) > _TOLD:
            return f"{self.names[0]}, {self.names[1]}, … {self.names[-1]} ({len(self.names)} actions)"
        return ", ".join(self.names)

    def read(self, message: str) -> int:
        """The action that `message` names. Raises InvalidAction if it is none, or more than one."""
        said = mentioned(message, self._at)
        said = said or {self._numbers[found] for found in _NUMBER.findall(message) if found in self._numbers}
        if len(said) != 1:
            raise InvalidAction(f"name one of: {self.told}")
        return said.pop()

    def name(self, action: Any) -> str:
        """How `action`, a number of the space or a name, is said."""
        return action if isinstance(action, str) else self.names[int(action) - min(self._at.values())]


class Written:
    """Actions of a Text space: the message itself, without space around it."""

    names: Sequence[str] = ()

    def __init__(self, space: Any) -> None:
        self._space = space
        self.told = f"text of {space.min_length} to {space.max_length} characters"

    def read(self, message: str) -> str:
        """Raises InvalidAction for text that the space does not contain."""
        said = message.strip()
        if not self._space.contains(said):
            raise InvalidAction(f"say {self.told}, of {short(''.join(self._space.character_list), 100)}")
        return said

    def name(self, action: Any) -> str:
        """How `action` is said."""
        return str(action)


def reader(space: Any, names: Sequence[str], where: str) -> Named | Written:
    """What reads messages as actions of `space`. Raises ConfigError for a space that is neither Discrete nor Text."""
    from gymnasium import spaces

    if isinstance(space, spaces.Discrete):
        return Named(space, names, where)
    if isinstance(space, spaces.Text):
        if names:
            raise ConfigError(f"{where}: its actions are text, so they have no names")
        return Written(space)
    raise ConfigError(f"{where}: actions of {short(str(space))} are no Discrete and no Text: use a gymnasium.ActionWrapper")


def _array(seen: Any) -> str:
    rows = np.atleast_2d(np.asarray(seen))
    return "\n".join(" ".join(_number(x) for x in row) for row in rows)


def _number(x: Any) -> str:
    return f"{float(x) + 0.0:.4g}" if isinstance(x, np.floating) else str(int(x))
