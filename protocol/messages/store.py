"""What is said to the store (`actors/store.py`): trajectories in, groups made durable, batches out."""

from __future__ import annotations

from dataclasses import dataclass, field

from troupe.protocol.messages.common import CONFIG, Blob
from troupe.protocol.trajectory import Kind, Trajectory


@dataclass(slots=True)
class Deposit:
    """The finished trajectory, once."""

    __pydantic_config__ = CONFIG
    trajectory: Trajectory


@dataclass(slots=True)
class Receipt:
    """`accepted` is False for a late write of a dead attempt or a second write; `reason` says which."""

    __pydantic_config__ = CONFIG
    accepted: bool
    reason: str = ""


@dataclass(slots=True)
class GetDeposit:
    """What this attempt has deposited, while its group is not committed. (A member that forks from it asks.)"""

    __pydantic_config__ = CONFIG
    episode: str
    attempt: int


@dataclass(slots=True)
class Deposited:
    """The trajectory; None if the store does not hold it (any more)."""

    __pydantic_config__ = CONFIG
    trajectory: Trajectory | None


@dataclass(slots=True)
class Fence:
    """Attempts below `attempt` of this episode are dead: refuse their writes from now on."""

    __pydantic_config__ = CONFIG
    episode: str
    attempt: int


@dataclass(slots=True)
class CommitGroup:
    """These deposited trajectories are a whole group: make them durable. `trains` is False for evaluations and for
    groups that a filter dropped: they are stored, never trained."""

    __pydantic_config__ = CONFIG
    group: int
    kind: Kind
    step: int
    episodes: list[str]
    trains: bool = True


@dataclass(slots=True)
class GetBatch:
    """The trajectories of training step `step`, once `groups` groups for it are committed. Waits at most `wait_s`."""

    __pydantic_config__ = CONFIG
    step: int
    groups: int
    wait_s: float = 60.0


@dataclass(slots=True)
class Batch:
    """A training batch. `trajectories` opens to a pyarrow.Table as in `protocol.arrow`, rows ordered by id. None: not
    there yet."""

    __pydantic_config__ = CONFIG
    step: int
    trajectories: Blob | None
    count: int = 0


@dataclass(slots=True)
class GetCommitted:
    """Which groups are durable? (A dispatcher that restarts asks.)"""

    __pydantic_config__ = CONFIG


@dataclass(slots=True)
class Committed:
    """Group numbers by training step, for the groups that train; and counts of everything stored.

    dropped: training groups that do not train. data_failures: task id → messages of its failures of kind "data".
    """

    __pydantic_config__ = CONFIG
    groups: dict[int, list[int]]
    dropped: list[int]
    completed: int
    failed: int
    cancelled: int = 0
    tokens: int = 0
    data_failures: dict[str, list[str]] = field(default_factory=dict)
