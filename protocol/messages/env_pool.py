"""What is said to an environment pool (`actors/env_pool.py`): episodes to run, with whom, and worlds to try out."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from troupe.protocol.messages.common import CONFIG, Limits, Sampling
from troupe.protocol.trajectory import Int32, Kind, Status, StopReason, Task


@dataclass(slots=True)
class Sibling:
    """An attempt that has ended and is deposited: fork from it. `segment`: as in `RolloutSettings.tree_segment`."""

    __pydantic_config__ = CONFIG
    episode: str
    attempt: int
    segment: int = 0


@dataclass(slots=True)
class RunEpisode:
    """Run one attempt of one episode to its end and deposit the trajectory in the store.

    sibling: begin with a part of what it did, drawn from `seed`, if the store still has it and it is long enough.
    min_version: no older weights sample any of its tokens."""

    __pydantic_config__ = CONFIG
    episode: str
    attempt: int
    group: int
    member: int
    kind: Kind
    step: int
    task: Task
    sampling: Sampling
    limits: Limits
    seed: int
    sibling: Sibling | None = None
    min_version: int = -1


@dataclass(slots=True)
class EpisodeDone:
    """How an attempt ended; the trajectory itself is in the store if `stored`. `tokens`: sampled for it."""

    __pydantic_config__ = CONFIG
    episode: str
    attempt: int
    status: Status
    stop: StopReason
    stored: bool
    pool: str
    reward: float = 0.0
    success: bool | None = None
    turns: int = 0
    tokens: int = 0
    oldest_version: int = -1
    failure_kind: Literal["infrastructure", "data", ""] = ""
    failure: str = ""


@dataclass(slots=True)
class CancelEpisode:
    """Nobody needs this attempt any more."""

    __pydantic_config__ = CONFIG
    episode: str
    attempt: int


@dataclass(slots=True)
class Routes:
    """The generators that hold proved weights and take work, by actor name."""

    __pydantic_config__ = CONFIG
    generators: list[str]


@dataclass(slots=True)
class Demonstrate:
    """Let the world's scripted player play `tasks`, each within `episode_s` seconds; `noise` is the share of its moves that are
    random."""

    __pydantic_config__ = CONFIG
    tasks: list[Task]
    noise: float
    max_turns: int
    seed: int
    env_step_s: float = 30.0
    episode_s: float = 600.0


@dataclass(slots=True)
class Demonstrations:
    """Demonstrations as trajectories whose assistant tokens are the teacher's: `supervised` [n] says which they are.
    `broken`: why the last one that broke did, if any."""

    __pydantic_config__ = CONFIG
    tokens: list[Int32]
    supervised: list[Int32]
    success: float
    broken: str = ""


@dataclass(slots=True)
class Rehearse:
    """Play `task` without a model, as the world's scripted player does; without one, with tools and words picked at random."""

    __pydantic_config__ = CONFIG
    task: Task
    seed: int
    limits: Limits


@dataclass(slots=True)
class Rehearsed:
    """How it went: actions, those that the world did not accept, the return; what broke it, or an empty string."""

    __pydantic_config__ = CONFIG
    steps: int = 0
    refused: int = 0
    reward: float = 0.0
    failure: str = ""
