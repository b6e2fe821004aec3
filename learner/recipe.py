"""The part of a recipe that the learner alone needs: [learner], [model] and the seed.

Promises: a recipe, a run's `config.toml` and no file at all are read alike; what other sections say is left alone, but
an override that would change nothing here is refused.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from troupe.learner.config import LearnerConfig, ModelConfig
from troupe.protocol import toml
from troupe.protocol.errors import ConfigError, nearest


class _Policy(ModelConfig):
    """[model], whose other keys are of rollouts."""

    model_config = ConfigDict(extra="ignore")
    path: str = ""


class Recipe(BaseModel):
    """What a `Trainer` is made from."""

    seed: int = Field(0, ge=0)
    learner: LearnerConfig = Field(default_factory=LearnerConfig)
    model: _Policy = Field(default_factory=_Policy)


def read(path: str | Path | None, overrides: list[str]) -> tuple[Recipe, dict[str, Any]]:
    """The recipe in `path` (none: all defaults) with `overrides` ("learner.lr=1e-4") applied, and all that the file says.

    Raises ConfigError.
    """
    for change in overrides:
        key = change.partition("=")[0].strip()
        known = ["seed", *(f"learner.{name}" for name in LearnerConfig.model_fields)]
        known += [f"model.{name}" for name in ModelConfig.model_fields]
        if ".".join(key.split(".")[:2]) not in known:
            raise ConfigError(f"--set '{change}': the learner alone has no key '{key}'.{nearest(key, known)}")
    if path is None:
        data: dict[str, Any] = {}
        text = ""
        for change in overrides:
            toml.override(data, change)
    elif not Path(path).is_file():
        raise ConfigError(f"no recipe '{path}': name a TOML file, for example a run's config.toml")
    else:
        data, text = toml.parse(path, overrides)
    return toml.validate(Recipe, data, str(path or "the command line"), text, overrides), data
