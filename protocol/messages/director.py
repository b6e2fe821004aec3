"""What is said to the director (`actors/director.py`), by the command line and the launcher."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from troupe.protocol.messages.common import CONFIG


@dataclass(slots=True)
class Scale:
    """Wanted numbers of children; None leaves a kind as it is."""

    __pydantic_config__ = CONFIG
    env_actors: int | None = None
    generators: int | None = None


@dataclass(slots=True)
class GetStatus:
    """Ask the director how the run is doing. `since`: index of the first event wanted."""

    __pydantic_config__ = CONFIG
    since: int = 0


@dataclass(slots=True)
class RunStatus:
    """What the terminal shows.

    metrics: the last line of metrics.jsonl. history: the success rate of each step. health: "ok", or what holds now.
    """

    __pydantic_config__ = CONFIG
    phase: str
    step: int
    steps: int
    version: int
    progress: float
    metrics: dict[str, Any]
    history: list[float]
    actors: dict[str, str]
    events: list[str]
    events_total: int
    finished: bool = False
    health: str = "ok"
    error: str = ""


@dataclass(slots=True)
class Stop:
    """Stop at the next safe point and leave a resumable run folder. `reason` goes to the journal."""

    __pydantic_config__ = CONFIG
    reason: str = ""
