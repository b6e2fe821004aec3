"""Registries of small functions that a user may replace: a registered name, `module:function` or `file.py:function`."""

from __future__ import annotations

from collections.abc import Callable
from typing import Generic, TypeVar

from troupe.protocol.errors import ConfigError, nearest
from troupe.protocol.importing import module_at

Function = TypeVar("Function", bound=Callable[..., object])


class Registry(Generic[Function]):
    """Functions of one kind by name. `kind` is what error messages call them, for example "advantage"."""

    def __init__(self, kind: str) -> None:
        self.kind = kind
        self._known: dict[str, Function] = {}

    def add(self, name: str, function: Function) -> Function:
        """Registers `function`. A name is taken only once: the second function of a name raises ConfigError."""
        previous = self._known.setdefault(name, function)
        # the same file loaded again (a resumed run in one process) is not another function
        owner = f"{previous.__module__}.{previous.__qualname__}"
        if owner != f"{function.__module__}.{function.__qualname__}":
            raise ConfigError(f"{self.kind} '{name}' is registered already, by {owner}: give yours another name")
        self._known[name] = function
        return function

    def find(self, name: str) -> Function:
        """The function of that name. Raises ConfigError with the nearest known name, or why the file cannot be used."""
        if name in self._known:
            return self._known[name]
        if ":" not in name:
            known = ", ".join(sorted(self._known))
            raise ConfigError(f"unknown {self.kind} '{name}'.{nearest(name, self._known)} Known: {known}")
        where, _, attribute = name.rpartition(":")
        try:
            module = module_at(where)
        except Exception as error:  # anything may go wrong in a user's module; it is always the setting that is wrong
            reason = f"{type(error).__name__}: {error}"
            raise ConfigError(f"{self.kind} '{name}': {where} cannot be imported: {reason}") from error
        function = getattr(module, attribute, None)
        if not callable(function):
            functions = [key for key, value in vars(module).items() if callable(value)]
            hint = nearest(attribute, functions)
            raise ConfigError(f"{self.kind} '{name}': {where} has no function '{attribute}'.{hint}")
        return function  # type: ignore[no-any-return]
