"""Numbers that a verifier is made with: one that makes no sense is named when the verifier is made, not in every episode."""

from __future__ import annotations

from typing import Any

from troupe.envs.base import finite
from troupe.protocol.errors import ConfigError, EnvironmentFailed


def number(name: str, value: Any) -> float:
    """`value`, which is finite. name: of the verifier and what it is given. Raises ConfigError."""
    try:
        return finite(name, value)
    except EnvironmentFailed:
        raise ConfigError(f"{name} is {value!r}; it is a finite number") from None


def seconds(name: str, value: Any) -> float:
    """`value`, which is finite and above 0. Raises ConfigError."""
    if number(name, value) <= 0:
        raise ConfigError(f"{name} is {value!r}; it is a number of seconds above 0")
    return float(value)
