"""What is said to the dispatcher (`actors/dispatcher.py`): where episodes may run, which groups may start, what to evaluate."""

from __future__ import annotations

from dataclasses import dataclass, field

from troupe.protocol.messages.common import CONFIG, Limits, Sampling
from troupe.protocol.trajectory import Task


@dataclass(slots=True)
class Pools:
    """The environment pools that take episodes: actor name → slots; and those that take no more but finish what they run."""

    __pydantic_config__ = CONFIG
    slots: dict[str, int]
    draining: list[str] = field(default_factory=list)


@dataclass(slots=True)
class PoolsHeard:
    """Answer to `Pools`. left: episodes on their way to each draining pool, or in it, by its name."""

    __pydantic_config__ = CONFIG
    left: dict[str, int]


@dataclass(slots=True)
class Announce:
    """Every generator has proved that it holds `version`. Steps up to `version` are finished."""

    __pydantic_config__ = CONFIG
    version: int


@dataclass(slots=True)
class Evaluate:
    """Run `tasks` × `trials` with the policy's current weights; never trained on (law 8)."""

    __pydantic_config__ = CONFIG
    name: str
    version: int
    tasks: list[Task]
    trials: int
    sampling: Sampling
    limits: Limits
    seed: int


@dataclass(slots=True)
class Evaluated:
    """Scores in the order of tasks × trials. Broken episodes are not trials: they are counted in `failed`."""

    __pydantic_config__ = CONFIG
    name: str
    version: int
    successes: list[bool]
    rewards: list[float]
    turns: float
    failed: int
    sampling: Sampling
    task_ids: list[str] = field(default_factory=list)


@dataclass(slots=True)
class DispatcherStatus:
    """Counts since the run began (restored after a restart, but for `retried`). `tokens`: sampled, evaluations included.

    dropped_groups: that a failure, a filter, their age or over-sampling kept from training; filtered_groups: of these, by
    the filter; stale_groups: because a token was older than the staleness budget allows (not restored).
    quarantined: task id → what it failed with. waiting: episodes that wait for a slot; used: slots that are taken, of
    `slots` in all pools that take episodes. moved: attempts that a draining pool gave up and another ran. granted: slots that
    were given so far in this life of the dispatcher, which began at `born`, after waiting `queued_s` seconds in all.
    """

    __pydantic_config__ = CONFIG
    version: int
    in_flight: int
    completed: int
    failed: int
    retried: int
    dropped_groups: int
    cancelled: int = 0
    filtered_groups: int = 0
    tokens: int = 0
    quarantined: dict[str, str] = field(default_factory=dict)
    events: list[str] = field(default_factory=list)
    waiting: int = 0
    used: int = 0
    slots: int = 0
    moved: int = 0
    stale_groups: int = 0
    granted: int = 0
    queued_s: float = 0.0
    born: float = 0.0
