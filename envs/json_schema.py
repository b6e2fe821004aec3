"""Is a value what a JSON schema asks for? For the tools and the actions of servers that are not ours."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from troupe.envs.tools import Tool, short, untitled
from troupe.protocol.errors import BadArguments


def validator(schema: Any) -> Any:
    """A validator of `schema`, which fetches nothing for a `$ref`. Raises ValueError for what is no schema."""
    from jsonschema.validators import validator_for
    from referencing import Registry

    kind = validator_for(schema)
    try:
        kind.check_schema(schema)
    except Exception as error:  # jsonschema's own, and whatever a strange schema makes of it
        raise ValueError(f"{type(error).__name__}: {short(str(error), 300)}") from None
    return kind(schema, registry=Registry())


def complaint(checked_by: Any, value: Any, part: str) -> str:
    """What is most wrong with `value`, in one line; empty if nothing is. part: what its parts are called, as "argument"."""
    from jsonschema.exceptions import best_match

    error = best_match(checked_by.iter_errors(value))
    if error is None:
        return ""
    place = ".".join(map(str, error.absolute_path))
    return (f"{part} '{short(place)}': " if place else "") + short(error.message, 200)


def tool(name: str, about: str, schema: dict[str, Any], run: Callable[..., Any]) -> Tool:
    """A tool whose arguments are what `schema` asks for. Raises ValueError for what is no schema."""
    told = {"type": "object", "properties": {}, **untitled(schema)}
    return Tool(name, " ".join(about.split()), told, run, partial(_checked, name, validator(schema)))


def _checked(name: str, checked_by: Any, arguments: dict[str, Any]) -> dict[str, Any]:
    if why := complaint(checked_by, arguments, "argument"):
        raise BadArguments(f"{name}: {why}")
    return arguments
