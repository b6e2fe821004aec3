"""Is a state what it should be? Equality as JSON means it, with the paths at which two states differ.

Promises: numbers are compared by value (1 is 1.0), true is not 1, lists in order, objects without order.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

from pydantic_core import to_jsonable_python

from troupe.protocol.errors import ConfigError, EnvironmentFailed

_SHOWN = 60  # characters of a value that a difference repeats


class StateMatch:
    """1 if the state is `expected`, else 0; `partial=True`: the share of expected leaves that are right, 0 if any is too much.

    Both may hold whatever JSON can say, dataclasses, sets and dates included. ignore: paths, such as "orders.4711.at" or
    "log[0]", that are not looked at, in either. Raises ConfigError for an expected state that is no JSON, EnvironmentFailed
    for such a state.
    """

    inline = True

    def __init__(self, expected: Any, *, partial: bool = False, ignore: tuple[str, ...] = ()) -> None:
        try:
            self.expected = _leaves(expected)
        except ValueError as error:
            raise ConfigError(f"StateMatch: the expected state is no JSON: {error}") from None
        self.partial, self.ignore = partial, frozenset(ignore)

    def __call__(self, state: Any) -> float:
        wanted = [path for path in self.expected if not self._ignored(path)]
        wrong = self._wrong(_found(state))
        if not self.partial or not wrong:
            return float(not wrong)
        if any(path not in self.expected for path in wrong):
            return 0.0
        return 1 - len(wrong) / len(wanted)

    def differences(self, state: Any) -> list[str]:
        """One line for each path that is not as expected; empty if the state is right."""
        return list(_lines(self.expected, found := _found(state), self._wrong(found)))

    def _wrong(self, found: dict[str, Any]) -> list[str]:
        return [path for path in _unlike(self.expected, found) if not self._ignored(path)]

    def _ignored(self, path: str) -> bool:
        return any(path == one or _under(one, path) for one in self.ignore)


def differences(expected: Any, found: Any) -> list[str]:
    """`StateMatch(expected).differences(found)`."""
    return StateMatch(expected).differences(found)


def _lines(expected: dict[str, Any], found: dict[str, Any], paths: list[str]) -> Iterator[str]:
    for path in paths:
        name = path or "the state"
        if path not in found:
            yield f"{name}: missing, expected {_shown(expected[path])}"
        elif path not in expected:
            yield f"{name}: not expected, found {_shown(found[path])}"
        else:
            yield f"{name}: expected {_shown(expected[path])}, found {_shown(found[path])}"


def _unlike(expected: dict[str, Any], found: dict[str, Any]) -> list[str]:
    paths = dict.fromkeys((*expected, *found))
    unlike = [p for p in paths if p not in found or p not in expected or not _same(expected[p], found[p])]
    return [p for p in unlike if (p in expected and p in found) or not _emptied(p, {**found, **expected}[p], unlike)]


def _emptied(path: str, leaf: Any, unlike: list[str]) -> bool:
    """Whether an empty object or list differs only by what the other side has in it: that is told already."""
    return leaf in ({}, []) and any(_under(path, other) for other in unlike)


def _under(path: str, other: str) -> bool:
    return other != path and (not path or other.startswith((f"{path}.", f"{path}[")))


def _found(state: Any) -> dict[str, Any]:
    try:
        return _leaves(state)
    except ValueError as error:
        raise EnvironmentFailed(f"StateMatch: the state is no JSON: {error}") from None


def _leaves(value: Any) -> dict[str, Any]:
    """Path → leaf. An empty object or list is a leaf: without one, {} and [] would both be nothing. Raises ValueError."""
    found: dict[str, Any] = {}
    pending: list[tuple[str, Any]] = [("", to_jsonable_python(_ordered(value)))]
    while pending:
        path, one = pending.pop()
        inner: list[tuple[str, Any]] = []
        if isinstance(one, dict):
            inner = [(f"{path}.{_key(key)}" if path else _key(key), item) for key, item in one.items()]
        elif isinstance(one, list):
            inner = [(f"{path}[{i}]", item) for i, item in enumerate(one)]
        if inner:
            pending += reversed(inner)
        else:
            found[path] = one
    return found


def _key(key: Any) -> str:
    """A step of a path, with what means something in a path escaped: no other path reads the same."""
    return re.sub(r"([\\.\[])", r"\\\1", str(key))


def _ordered(value: Any) -> Any:
    """Sets as sorted lists: they have no order of their own, and lists are compared in order."""
    if isinstance(value, set | frozenset):
        return sorted((_ordered(one) for one in value), key=repr)
    if isinstance(value, dict):
        return {key: _ordered(one) for key, one in value.items()}
    return [_ordered(one) for one in value] if isinstance(value, list | tuple) else value


def _same(one: Any, other: Any) -> bool:
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)


def _shown(value: Any) -> str:
    text = repr(value)
    return text if len(text) <= _SHOWN else text[:_SHOWN] + "…"
