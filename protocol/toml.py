"""TOML as typed settings: overrides from the command line, and errors that say what to change.

Promise: an unknown key or a wrong type names the file, the line and the nearest valid key.
"""

from __future__ import annotations

import difflib
import re
import tomllib
from pathlib import Path
from typing import Any, TypeVar, get_args

import pydantic

from troupe.protocol.errors import ConfigError, nearest

M = TypeVar("M", bound=pydantic.BaseModel)


def parse(path: str | Path, overrides: list[str] | None = None) -> tuple[dict[str, Any], str]:
    """The file's content with `overrides` applied, and its text. Raises ConfigError for what is no TOML."""
    text = Path(path).read_text(encoding="utf-8", errors="replace")
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"{path}: not valid TOML: {error}") from error
    for change in overrides or []:
        override(data, change)
    return data, text


def override(data: dict[str, Any], given: str) -> None:
    """Sets one key: "section.key=value", value in TOML or a bare word; nothing after = puts it back to its default."""
    key, equals, value = given.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set '{given}': write it as section.key=value")
    *sections, last = [part.strip() for part in key.split(".")]
    here = data
    for section in sections:
        below = here.setdefault(section, {})
        if not isinstance(below, dict):
            raise ConfigError(f"--set '{given}': '{section}' is a value, not a section")
        here = below
    if value.strip():
        here[last] = value_of(value)
    else:
        here.pop(last, None)  # back to its default


def value_of(text: str) -> Any:
    """What a flag's value means: TOML, or a bare word."""
    try:
        return tomllib.loads(f"v = {text}")["v"]
    except tomllib.TOMLDecodeError:
        return text.strip()


def validate(kind: type[M], data: dict[str, Any], where: str, text: str = "", overrides: list[str] | None = None) -> M:
    """`data` as a `kind`. Raises ConfigError naming the first thing that is wrong."""
    try:
        return kind.model_validate(data)
    except pydantic.ValidationError as error:
        found = error.errors()
        first = next((one for one in found if one["type"] == "extra_forbidden"), found[0])  # a misspelt key explains the rest
        keys = [str(part) for part in first["loc"]]
        name = ".".join(keys)
        line = _line_of(text, keys)
        at = f"{where} line {line}" if line else where
        for change in overrides or []:
            key = change.partition("=")[0].strip()
            if name == key or name.startswith(f"{key}."):
                at = f"{where} with {change}"
        if first["type"] == "extra_forbidden":
            raise ConfigError(f"{at}: unknown key '{name}'.{_meant(name, _known_keys(kind))}") from error
        raise ConfigError(f"{at}: {_reason(name, first)}") from error


def _reason(name: str, found: Any) -> str:
    """What is wrong with the key `name`, in words for people."""
    given, told = found.get("input"), found["msg"].removeprefix("Value error, ")
    if found["type"] in ("model_type", "model_attributes_type"):
        return f"'{name}' = {given!r}: it is a section: write [{name}], and its keys below"
    if isinstance(given, dict):  # of a whole section
        return f"[{name}]: {told}" if name else told
    allowed = re.findall(r"'([^']*)'", found.get("ctx", {}).get("expected", ""))
    hint = nearest(str(given), allowed) if found["type"] == "literal_error" else ""
    return f"'{name}' = {given!r}: {told}{'.' + hint if hint else ''}"


def _known_keys(model: type[pydantic.BaseModel], prefix: str = "") -> list[str]:
    keys = []
    for name, field in model.model_fields.items():
        keys.append(prefix + name)
        for kind in (field.annotation, *get_args(field.annotation)):  # a section may be optional
            if isinstance(kind, type) and issubclass(kind, pydantic.BaseModel):
                keys += _known_keys(kind, f"{prefix}{name}.")
    return keys


def _meant(name: str, known: list[str]) -> str:
    """`" Did you mean 'x'?"` for the key that is likest: of that section, or called so in another."""
    section, _, last = name.rpartition(".")
    beside = [key.rpartition(".")[2] for key in known if key.rpartition(".")[0] == section]
    likest = [f"{section}.{key}".lstrip(".") for key in difflib.get_close_matches(last, beside, n=1, cutoff=0.7)]
    likest += [key for key in known if key.endswith(f".{last}")]
    likest += difflib.get_close_matches(name, [key for key in known if not name.startswith(f"{key}.")], n=1, cutoff=0.85)
    return f" Did you mean '{likest[0]}'?" if likest else ""


def _line_of(text: str, keys: list[str]) -> int:
    """Line (from 1) on which the dotted key is set, 0 if it is not in the file (an override, say)."""
    section: list[str] = []
    tables: dict[tuple[str, ...], int] = {}  # of each [[array]], the number of the latest
    for number, line in enumerate(text.splitlines(), 1):
        header = re.match(r"\s*(\[\[?)\s*([^\]]+?)\s*\]+", line)
        if header:
            name = tuple(part.strip().strip("\"'") for part in header[2].split("."))
            if header[1] == "[[":
                tables[name] = tables.get(name, -1) + 1
            section = []
            for depth, part in enumerate(name, 1):
                section += [part, str(tables[name[:depth]])] if name[:depth] in tables else [part]
            if keys in (section, list(name)):
                return number
            continue
        assignment = re.match(r"\s*([\w.\"'-]+)\s*=", line)
        if assignment:
            here = section + [part.strip("\"'") for part in assignment[1].split(".")]
            if here == keys or (len(here) < len(keys) and keys[: len(here)] == here):
                return number
    return 0
