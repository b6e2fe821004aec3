"""What all worlds of a process share, and what a world has changed of it.

Promise: `restore` puts back all that is watched here, except for chance.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import signal
import socket
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

_MODULES = ("builtins", "json", "math", "os", "random", "re", "socket", "subprocess", "time")
_STREAMS = ("stdin", "stdout", "stderr")
_VARIABLE = "the environment variable "
_HANDLER = "the handler of "


class _Part(NamedTuple):
    """read: what it is called → what it is. put: the same, one at a time. grave: who changes it disturbs others. tells:
    whether what it is may be said."""

    read: Callable[[], dict[str, Any]]
    put: Callable[[str, Any], None]
    grave: bool = True
    tells: bool = True


def _one(name: str, read: Callable[[], Any], put: Callable[[Any], Any], grave: bool = True) -> _Part:
    return _Part(lambda: {name: read()}, lambda _, value: put(value), grave)


def _folder() -> str:
    try:
        return os.getcwd()
    except OSError:
        return "a folder that is gone"


def _umask() -> str:
    mask = os.umask(0o077)
    os.umask(mask)
    return f"{mask:03o}"


def _handlers() -> dict[str, Any]:
    return {_HANDLER + number.name: signal.getsignal(number) for number in signal.Signals}


def _handle(name: str, handler: Any) -> None:
    signal.signal(signal.Signals[name.removeprefix(_HANDLER)], handler)


def _functions() -> dict[str, Any]:
    """Of the standard library, those that most worlds use."""
    return {
        f"{module}.{name}": value
        for module in _MODULES
        for name, value in vars(sys.modules[module]).items()
        if callable(value) and name[0] != "_"
    }


def _replace(name: str, function: Any) -> None:
    module, _, attribute = name.partition(".")
    if function is None:
        delattr(sys.modules[module], attribute)
    else:
        setattr(sys.modules[module], attribute, function)


def _set_variable(name: str, value: str | None) -> None:
    if value is None:
        os.environ.pop(name.removeprefix(_VARIABLE), None)
    else:
        os.environ[name.removeprefix(_VARIABLE)] = value


_PARTS = (
    _one("the working folder", _folder, os.chdir),
    _one("the umask", _umask, lambda mask: os.umask(int(mask, 8))),
    _one("the time limit of all sockets", socket.getdefaulttimeout, socket.setdefaulttimeout),
    _one(
        "the garbage collector",
        lambda: "on" if gc.isenabled() else "off",
        lambda state: gc.enable() if state == "on" else gc.disable(),
    ),
    _Part(
        lambda: {f"sys.{name}": getattr(sys, name) for name in _STREAMS},
        lambda name, stream: setattr(sys, name.removeprefix("sys."), stream),
        tells=False,
    ),
    _Part(_handlers, _handle, tells=False),
    _Part(_functions, _replace, tells=False),
    _one("the recursion limit", sys.getrecursionlimit, sys.setrecursionlimit, grave=False),
    _Part(
        lambda: {"sys.path": tuple(sys.path)}, lambda _, path: sys.path.__setitem__(slice(None), path), grave=False, tells=False
    ),
    _Part(
        lambda: {_VARIABLE + name: value for name, value in os.environ.items()}, _set_variable, grave=False, tells=False
    ),
)  # fmt: skip


def _numpy() -> Any:
    module = sys.modules.get("numpy.random")
    return None if module is None else repr(module.get_state())


def _torch() -> Any:
    module = sys.modules.get("torch")
    return None if module is None else module.get_rng_state().tolist()


_CHANCE: dict[str, Callable[[], Any]] = {
    "Python's global random": random.getstate,
    "numpy's global random": _numpy,
    "torch's global random": _torch,
}


class Process:
    """What all worlds of a process share, as it is when this is made."""

    def __init__(self) -> None:
        self._chance = {name: read() for name, read in _CHANCE.items()}
        self._parts = [(part, part.read()) for part in _PARTS]

    def drawn(self) -> list[str]:
        """Global generators that were used or seeded since."""
        return [name for name, read in _CHANCE.items() if self._chance[name] is not None and read() != self._chance[name]]

    def changed(self, grave: bool) -> list[str]:
        """What is another one now, of what disturbs others if it is, or of the rest."""
        told = []
        for part, was in self._parts:
            if part.grave == grave:
                now = part.read()
                told += [f"{name} (now {now.get(name)})" if part.tells else name for name in _different(was, now)]
        return told

    def restore(self) -> None:
        """Puts all of it back."""
        for part, was in self._parts:
            for name in _different(was, part.read()):
                with contextlib.suppress(OSError, TypeError, ValueError):  # gone, or only to be set by the main thread
                    part.put(name, was.get(name))


def _different(was: dict[str, Any], now: dict[str, Any]) -> list[str]:
    return sorted(name for name in was.keys() | now.keys() if was.get(name) != now.get(name))
