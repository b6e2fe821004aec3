"""Worlds by name.

A name is one of: a built-in world ("frozen_lake"), an entry point of the group `troupe.envs` of an installed package,
"module:Class", "path/to/file.py:Class", or "prefix:rest" for a world of another project ("gymnasium:Blackjack-v1"), where
`PREFIXES` knows what comes before the first colon. Built-in names win over entry points; a prefix is the whole word before
the colon, so files and modules in packages keep their names ("./gymnasium.py:Mine", "mine.gymnasium:Mine").

Promises: whatever is wrong with a name or with what it leads to is one ConfigError of one line that says what to do. A
file is loaded once a process: the same name gives the same class.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import cache, lru_cache
from importlib import import_module
from importlib.metadata import entry_points
from pathlib import Path
from types import ModuleType
from typing import Any

from troupe.envs.base import TextWorld
from troupe.envs.tools import ToolWorld
from troupe.protocol.errors import ConfigError, nearest
from troupe.protocol.importing import module_at

GROUP = "troupe.envs"
BUILT_IN = {
    "bandit": "troupe.envs.bandit:Bandit",
    "calculator": "troupe.envs.calculator:Calculator",
    "code": "troupe.envs.code:Code",
    "desk": "troupe.envs.desk.world:Desk",
    "echo": "troupe.envs.echo:Echo",
    "frozen_lake": "troupe.envs.frozen_lake:FrozenLake",
    "guess": "troupe.envs.guess:Guess",
    "math_code": "troupe.envs.math_code:MathCode",
    "miniwob": "troupe.envs.adapters.miniwob:MiniWob",
    "math_python": "troupe.envs.math_python:MathPython",
    "search": "troupe.envs.search:Search",
    "shop": "troupe.envs.shop:Shop",
    "sokoban": "troupe.envs.sokoban:Sokoban",
    "sql": "troupe.envs.sql:Sql",
    "stockroom": "troupe.envs.stockroom:Stockroom",
    "swe": "troupe.envs.swe:Swe",
    "swe_patch": "troupe.envs.swe_patch:SwePatch",
    "textworld": "troupe.envs.adapters.textworld:Quests",
    "tool_calls": "troupe.envs.tool_calls:ToolCalls",
}
PREFIXES = {
    "gymnasium": "troupe.envs.adapters.gymnasium:world",
    "open_spiel": "troupe.envs.adapters.open_spiel:world",
    "reasoning_gym": "troupe.envs.adapters.reasoning_gym:world",
    "skyrl_gym": "troupe.envs.adapters.skyrl_gym:world",
    "textarena": "troupe.envs.adapters.textarena:world",
    "verifiers": "troupe.envs.adapters.verifiers:world",
    "openenv": "troupe.envs.adapters.openenv:world",
}
"""What comes before a colon → the function that makes a world class of what follows it, or raises ConfigError."""


def names() -> list[str]:
    """Names that `find` knows without a path or a module: built-in worlds and entry points."""
    return sorted({*BUILT_IN, *(point.name for point in entry_points(group=GROUP))})


def find(name: str) -> type[TextWorld]:
    """The world class that `name` stands for. Raises ConfigError."""
    target = BUILT_IN.get(name) or next((p.value for p in entry_points(group=GROUP) if p.name == name), name)
    prefix, colon, rest = target.partition(":")
    if colon and prefix in PREFIXES:
        return _foreign(prefix, rest)
    place, colon, attribute = target.rpartition(":")
    if not colon:
        if target.endswith(".py"):
            raise ConfigError(f"environment '{name}' names no class{_suggest(name, _load(name, target))}")
        raise ConfigError(
            f"No environment '{name}'.{nearest(name, names())} Known: {', '.join(names())}; "
            f"or give module:Class, path/file.py:Class, or a name after {', '.join(f'{p}:' for p in sorted(PREFIXES))}"
        )
    module = _load(name, place)
    try:
        found: Any = module
        for part in attribute.split("."):
            found = getattr(found, part)
    except AttributeError:
        raise ConfigError(f"environment '{name}': {place} has no '{attribute}'{_suggest(place, module, attribute)}") from None
    if not inspect.isclass(found):
        raise ConfigError(f"environment '{name}' is a {type(found).__name__}, not a class{_suggest(place, module)}")
    if not issubclass(found, TextWorld):
        raise ConfigError(f"environment '{name}' is not a world: derive it from troupe.envs.TextWorld")
    world: type[TextWorld] = found
    missing = [method for method in ("reset", "step") if getattr(world, method) is getattr(TextWorld, method)]
    if issubclass(world, ToolWorld) and world.step is ToolWorld.step and world.verify is ToolWorld.verify:
        missing.append("verify")
    if missing:
        raise ConfigError(f"environment '{name}' is not a whole world: define {' and '.join(missing)}")
    return world


def make(world: type[TextWorld], options: Mapping[str, Any]) -> TextWorld:
    """An instance with `options` (the recipe's `[env.options]`). Raises ConfigError for options it does not take."""
    name = world.name or world.__name__
    known, any_other = _takes(world.__init__)
    if not any_other:
        for option in options:
            if option not in known:
                hint = nearest(option, known) or f" Known: {', '.join(known)}."
                raise ConfigError(f"{name} has no option '{option}'.{hint}")
    try:
        return world(**options)
    except (ConfigError, TypeError, ValueError) as error:
        raise ConfigError(f"{name}: {_line(error)}") from error
    except Exception as error:  # user code: it may raise anything
        raise ConfigError(f"{name} cannot be made: {type(error).__name__}: {_line(error)}") from error


@lru_cache(256)
def _takes(init: Callable[..., None]) -> tuple[list[str], bool]:
    """The options that a world's `__init__` names, and whether it takes any other."""
    parameters = inspect.signature(init).parameters.values()
    known = [p.name for p in list(parameters)[1:] if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)]
    return known, any(p.kind is p.VAR_KEYWORD for p in parameters)


@cache
def _foreign(prefix: str, rest: str) -> type[TextWorld]:
    """The world class that `rest` stands for among those of `prefix`. Raises ConfigError."""
    place, _, maker = PREFIXES[prefix].partition(":")
    made: type[TextWorld] = getattr(import_module(place), maker)(rest)
    return made


def _load(name: str, place: str) -> ModuleType:
    """The module at `place`. Raises ConfigError for whatever goes wrong in it."""
    try:
        return module_at(place)
    except FileNotFoundError as error:
        path = Path(place)
        beside = path.parent.glob("*.py") if path.parent.is_dir() and not path.is_file() else ()
        raise ConfigError(f"environment '{name}': {error}.{nearest(path.name, [p.name for p in beside])}") from error
    except (Exception, SystemExit) as error:  # user code: it may raise anything
        raise ConfigError(f"environment '{name}' cannot be imported: {type(error).__name__}: {_line(error)}") from error


def _suggest(place: str, module: ModuleType, attribute: str = "") -> str:
    """What the module does have: the nearest world, or all of them."""
    worlds = [
        name
        for name, value in vars(module).items()
        if inspect.isclass(value) and issubclass(value, TextWorld) and value.__module__ == module.__name__
    ]
    if not worlds:
        return ": it defines no class derived from TextWorld"
    close = nearest(attribute, worlds)
    return f".{close}" if close else f": name one of its worlds, {place}:{worlds[0]}"


def _line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or ["no message"])[0]
