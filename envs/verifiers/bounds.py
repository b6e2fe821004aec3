"""Numbers that a verifier is made with: one that makes no sense is named when the verifier is made, not in every episode."""

from __future__ import annotations

import math
from typing import Any

from troupe.protocol.errors import ConfigError


def number(name: str, value: Any) -> float:
    """`value`, which is finite. name: of the verifier and what it is given. Raises ConfigError."""
    try:
        found = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError):
        found = math.nan
    if not math.isfinite(found):
        raise ConfigError(f"{name} is {value!r}; it is a finite number")
    return found


def seconds(name: str, value: Any) -> float:
    """`value`, which is finite and above 0. Raises ConfigError."""
    if number(name, value) <= 0:
        raise ConfigError(f"{name} is {value!r}; it is a number of seconds above 0")
    return float(value)
