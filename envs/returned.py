"""What a world's call has brought back is looked at: nothing that is no answer becomes one.

Promises: a Turn that passes has a text that can be encoded, finite numbers and plain truths; whatever else came back is
refused by EnvironmentFailed, which says what it is. where: names the world, its method and the task, once somebody asks.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from contextlib import suppress
from typing import Any, TypeGuard

from troupe.envs.base import Turn, finite
from troupe.envs.tools import short
from troupe.protocol.errors import EnvironmentFailed

_LONGEST_TEXT = 4_000
"""Characters of what an error says."""


def turn_from(found: Any, where: Callable[[], str]) -> Turn:
    """The Turn that a world gave, or the one of the text that it gave. Raises EnvironmentFailed."""
    if _sound(found):
        found.text = encodable(found.text)
        return found
    if isinstance(found, str):
        return Turn(encodable(found))
    if not isinstance(found, Turn):
        raise EnvironmentFailed(f"{where()} returned {type(found).__name__}, not a Turn or a str")
    return _mended(found, where())


def encodable(text: str) -> str:
    """Without lone surrogates, which JSON can smuggle in and no tokenizer takes: an agent could break its episode so."""
    return text if text.isascii() else text.encode("utf-8", "replace").decode()


def told(error: BaseException) -> str:
    """What an exception says, if it can, at most a few lines of it."""
    try:
        return encodable(str(error))[:_LONGEST_TEXT]
    except Exception as again:
        return f"(and cannot say what: {type(again).__name__})"


def _sound(turn: Any) -> TypeGuard[Turn]:
    """Whether all of it is exactly what a Turn promises, as it mostly is: then there is nothing to convert or to refuse."""
    return (
        type(turn) is Turn
        and type(turn.text) is str
        and type(turn.reward) is float
        and math.isfinite(turn.reward)
        and type(turn.parts) is dict
        and not turn.parts
        and type(turn.done) is bool
        and type(turn.truncated) is bool
        and (turn.success is None or type(turn.success) is bool)
    )


def _mended(turn: Turn, where: str) -> Turn:
    """With what is as good as the types that a Turn promises made those. Raises EnvironmentFailed for all else."""
    if not isinstance(turn.text, str):
        raise EnvironmentFailed(f"{where}: Turn.text is {type(turn.text).__name__}, not str")
    if not isinstance(turn.parts, dict):
        raise EnvironmentFailed(f"{where}: Turn.parts is {type(turn.parts).__name__}, not dict")
    turn.text = encodable(turn.text)
    turn.reward = finite(f"{where}: Turn.reward", turn.reward)
    turn.parts = {encodable(str(name)): finite(f"{where}: Turn.parts[{name!r}]", value) for name, value in turn.parts.items()}
    turn.done = _truth(f"{where}: Turn.done", turn.done)
    turn.truncated = _truth(f"{where}: Turn.truncated", turn.truncated)
    turn.success = None if turn.success is None else _truth(f"{where}: Turn.success", turn.success)
    return turn


def _truth(name: str, value: Any) -> bool:
    """Whatever is as good as a bool: numpy's, 0 or 1. A text such as "False" is not."""
    with suppress(Exception):  # == of an array is no answer
        if value in (True, False):
            return bool(value)
    raise EnvironmentFailed(f"{name} is {short(repr(value))}, not True or False")
