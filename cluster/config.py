"""Recipes: TOML in, typed configuration out, and errors that say what to change.

Promises:
- an unknown key or a wrong type names the file, the line and the nearest valid key;
- what a run really used is written back as `RUN/config.toml`, from which the same run can be started again.
"""

from __future__ import annotations

import copy
import difflib
import json
import re
from pathlib import Path
from typing import Any, get_args

import pydantic
import tomli_w

from troupe.actors.settings import RunConfig
from troupe.protocol import toml
from troupe.protocol.errors import ConfigError

_PRETRAINED: dict[str, Any] = {  # a model that speaks already: small steps of an adapter
    "steps": 50,
    "checkpoint_every": 10,
    "model": {"lora": {"rank": 16, "alpha": 32.0}},
    "learner": {"lr": 1e-4},
    "eval": {"tasks": 50},
}
_FROM_NOTHING: dict[str, Any] = {  # a small policy of our own: shown the game first, if anyone can show it
    "steps": 100,
    "learner": {"lr": 3e-4, "passes": 2},
}
_COLD_START: dict[str, Any] = {"steps": 120, "noise": 0.5}


def read(path: str, overrides: list[str] | None = None) -> RunConfig:
    """The recipe in `path` with `overrides` ("section.key=value", value in TOML or a bare word; nothing after = puts
    the key back to its default) applied."""
    file = Path(path)
    if not file.is_file():
        raise ConfigError(f"No recipe '{path}'.{_similar_file(file)}")
    data, text = toml.parse(path, overrides)
    config = toml.validate(RunConfig, data, path, text, overrides)
    if "name" not in data.get("env", {}):
        raise ConfigError(f'{path} names no world: write for example [env] and under it name = "frozen_lake"')
    if not config.name:
        config.name = file.stem
    return config


def write(config: RunConfig, path: Path) -> None:
    """The resolved recipe as TOML."""
    path.write_text(tomli_w.dumps(config.model_dump(mode="json", exclude_none=True)))


def _similar_file(file: Path) -> str:
    folder = file.parent if file.parent.is_dir() else Path("recipes")
    if not folder.is_dir():
        return ""
    names = [str(folder / f.name) for f in sorted(folder.glob("*.toml"))]
    close = difflib.get_close_matches(str(file), names, n=1, cutoff=0.4)
    if close:
        return f" Did you mean '{close[0]}'?"
    return f" There are: {', '.join(names)}." if names else ""


def from_flags(env: str, overrides: list[str]) -> RunConfig:
    """A recipe for the world `env` without a file: sane defaults, then `overrides`. Its name is the world's.

    With a model: GRPO on a LoRA adapter. Without: a small policy of our own, cold-started where the world has a
    scripted player. Raises ConfigError, also for a world that cannot be found.
    """
    from troupe.envs import registry
    from troupe.envs.base import TextWorld

    world = registry.find(env)
    overrides = [f"env.name={json.dumps(env)}", *overrides]
    wanted: dict[str, Any] = {}
    for override in overrides:
        toml.override(wanted, override)
    pretrained = isinstance(wanted.get("model"), dict) and bool(wanted["model"].get("path"))
    data = copy.deepcopy(_PRETRAINED if pretrained else _FROM_NOTHING)
    if not pretrained and world.play is not TextWorld.play:
        data["cold_start"] = dict(_COLD_START)
    named = world.name or re.sub(r"(?<=[a-z0-9])(?=[A-Z])", "_", world.__name__).lower()
    data["name"] = re.sub(r"[^\w.-]+", "_", named)  # a run's folder is called so
    for override in overrides:
        toml.override(data, override)
    return toml.validate(RunConfig, data, "the command line")


def explained(config: RunConfig) -> str:
    """The recipe as TOML that reads back the same, each key with what it means as a comment."""
    return "\n".join(_section(config, [])) + "\n"


def _section(model: pydantic.BaseModel, path: list[str], meaning: str = "", array: bool = False) -> list[str]:
    """A table: its meaning, its header (`array`: of one in an array of tables), its own keys, then the tables in it."""
    doc = (type(model).__doc__ or "").strip().partition("\n")[0]
    lines = [_comment(meaning or re.sub(r"^\[[^\]]*\]: *", "", doc))]
    header = f"[{'.'.join(path)}]"
    lines += [f"[{header}]" if array else header] if path else []
    rows: list[tuple[str, str]] = []
    tables: list[str] = []
    for name, field in type(model).model_fields.items():
        value = getattr(model, name)
        meaning = field.description or ""
        if isinstance(value, pydantic.BaseModel):
            tables += ["", *_section(value, [*path, name], meaning)]
        elif isinstance(value, dict):
            inside = tomli_w.dumps({"table": value}).partition("\n")[2].rstrip()
            inside = inside.replace("\n[table.", f"\n[{'.'.join([*path, name])}.")
            tables += ["", _comment(meaning), f"[{'.'.join([*path, name])}]", *([inside] if inside else [])]
        elif isinstance(value, list) and value and isinstance(value[0], pydantic.BaseModel):
            for item in value:
                tables += ["", *_section(item, [*path, name], meaning, array=True)]
        elif value is None and (kind := _section_of(field.annotation)) is not None:
            tables += ["", *_switched_off(kind, [*path, name], meaning)]
        elif value is None:
            rows.append((f"# {name} =", meaning))
        else:
            rows.append((_assignment(name, value), meaning))
    width = max((len(text) for text, _ in rows), default=0)
    lines += [f"{text:<{width}}  # {meaning}".rstrip(" #") if meaning else text for text, meaning in rows]
    return lines + tables


def _switched_off(kind: type[pydantic.BaseModel], path: list[str], meaning: str) -> list[str]:
    """A table that is not there, as comments: how it would be written."""
    lines = [_comment(f"{meaning} (not set)"), f"# [{'.'.join(path)}]"]
    for name, field in kind.model_fields.items():
        default = (
            "= …" if field.is_required() else _assignment(name, field.get_default(call_default_factory=True)).partition(" ")[2]
        )
        lines.append(f"# {name} {default}  # {field.description or ''}".rstrip(" #"))
    return lines


def _section_of(annotation: Any) -> type[pydantic.BaseModel] | None:
    """The section in `Section | None`."""
    kinds = (kind for kind in get_args(annotation) if isinstance(kind, type))
    return next((kind for kind in kinds if issubclass(kind, pydantic.BaseModel)), None)


def _comment(text: str) -> str:
    return f"# {text[:1].upper()}{text[1:].rstrip('.')}."


def _assignment(name: str, value: Any) -> str:
    """`name = value` on one line."""
    dumped = tomli_w.dumps({name: list(value) if isinstance(value, tuple) else value})
    return re.sub(r",? ?\]$", "]", " ".join(line.strip() for line in dumped.splitlines())).replace("= [ ", "= [", 1)
