"""The agent's message as an action that a server's schema asks for.

An action of one field is that field: a string is the message itself; a number, a yes or no, or one of a list is read from the
message. Any other action is asked for as JSON. What cannot be read is InvalidAction, and says how to answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NamedTuple

from troupe.envs import json_schema
from troupe.envs.tools import untitled
from troupe.protocol.errors import InvalidAction

_READ = 4_000  # characters of a message in which a number or a word is looked for
_DIGITS = 18
_NUMBERS = {"integer": re.compile(r"-?[0-9]+"), "number": re.compile(r"-?(?:[0-9]+\.?[0-9]*|\.[0-9]+)(?:[eE][-+]?[0-9]{1,3})?")}
_WORDS = {"yes": True, "no": False, "true": True, "false": False}


class Form(NamedTuple):
    """How a message becomes an action. ask: what the agent is told of it; empty if any text will do."""

    ask: str
    read: Callable[[str], dict[str, Any]]


def has_tools(schema: dict[str, Any]) -> bool:
    """Whether an action is a call of a tool."""
    return {"tool_name", "arguments"} <= set(schema.get("properties", {}))


def fields(schema: dict[str, Any]) -> dict[str, Any]:
    """The fields of an action, without what every action has."""
    return {name: field for name, field in schema.get("properties", {}).items() if name != "metadata"}


def form(schema: dict[str, Any]) -> Form:
    """How to fill in the action that `schema` describes. Raises ValueError for what is no schema."""
    found = fields(schema)
    needed = [name for name in schema.get("required", ()) if name in found] or list(found)
    if len(needed) == 1:
        name = needed[0]
        field = _plain(found[name], schema)
        if "enum" in field:
            return _one_of(name, {str(value): value for value in field["enum"]})
        match field.get("type"):
            case "string":
                return Form("", lambda text: {name: text})
            case "boolean":
                return _one_of(name, _WORDS)
            case "integer" | "number" as kind:
                return _number(name, kind, field)
    return _json(schema)


def _one_of(name: str, known: dict[str, Any]) -> Form:
    told = f"Reply with one of: {', '.join(known)}."
    values = {word.lower(): value for word, value in known.items()}
    any_of = re.compile(r"(?<!\w)(?:" + "|".join(re.escape(w) for w in sorted(values, key=len, reverse=True)) + r")(?!\w)")

    def read(text: str) -> dict[str, Any]:
        said = text[:_READ].strip().lower()
        found = [said] if said in values else list(dict.fromkeys(any_of.findall(said)))
        if len(found) != 1:
            raise InvalidAction(told)
        return {name: values[found[0]]}

    return Form(told, read)


def _number(name: str, kind: str, field: dict[str, Any]) -> Form:
    checked_by = json_schema.validator(field)
    low, high = field.get("minimum"), field.get("maximum")
    bounds = f" from {low}" if low is not None else ""
    bounds += f" up to {high}" if high is not None else ""
    told = f"Reply with one {'whole ' if kind == 'integer' else ''}number{bounds}."

    def read(text: str) -> dict[str, Any]:
        found = _NUMBERS[kind].search(text[:_READ])
        if found is None or len(found[0]) > _DIGITS:
            raise InvalidAction(told)
        value = int(found[0]) if kind == "integer" else float(found[0])
        if json_schema.complaint(checked_by, value, "field"):
            raise InvalidAction(told)
        return {name: value}

    return Form(told, read)


def _json(schema: dict[str, Any]) -> Form:
    checked_by = json_schema.validator(schema)
    shown = {key: value for key, value in untitled(schema).items() if key in ("type", "required", "anyOf", "oneOf", "$defs")}
    shown["properties"] = untitled(fields(schema))
    told = f"Reply with one JSON object and nothing else. It has to fit this schema: {json.dumps(shown, ensure_ascii=False)}"

    def read(text: str) -> dict[str, Any]:
        begin = text.find("{")
        try:
            if begin < 0:
                raise ValueError("there is no object in it")
            value, _ = json.JSONDecoder().raw_decode(text, begin)
        except (ValueError, RecursionError) as error:
            raise InvalidAction(f"this is no JSON ({str(error)[:80]}): reply with one JSON object") from None
        if why := json_schema.complaint(checked_by, value, "field"):
            raise InvalidAction(f"this JSON does not fit: {why}")
        done: dict[str, Any] = value
        return done

    return Form(told, read)


def _plain(field: dict[str, Any], root: dict[str, Any]) -> dict[str, Any]:
    """A field without references and without "or null"."""
    for _ in range(8):
        options = [one for one in field.get("anyOf", field.get("allOf", ())) if one.get("type") != "null"]
        if "$ref" in field:
            field = root.get("$defs", {}).get(field["$ref"].rpartition("/")[2], {})
        elif "const" in field:
            return {"enum": [field["const"]]}
        elif len(options) == 1:
            field = options[0]
    return field
