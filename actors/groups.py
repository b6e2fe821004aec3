"""A group of episodes on its way, and what fixes it: numbers and seeds by which it can be run again exactly.

A group for training is numbered `step * GROUPS_PER_STEP_LIMIT + ordinal`, one of an evaluation from `EVAL_GROUP` on.
"""

from __future__ import annotations

import asyncio
import hashlib
from dataclasses import dataclass
from typing import Literal

from troupe.protocol.messages import EpisodeDone, Limits, Sampling
from troupe.protocol.trajectory import Kind, Status, Task

GROUPS_PER_STEP_LIMIT = 10_000
EVAL_GROUP = 1_000_000_000_000
"""Group numbers of evaluations start here."""

INDICES_OF_A_SEED, _INDICES_OF_A_STEP = 10_000_000_000, 10_007
"""How far apart the tasks of runs, and of steps, lie. The latter is a prime, so that a world that takes `index % n` of n tasks
deals all of them evenly (unless n is a multiple of it)."""

Verdict = Literal["trains", "failed", "stale", "surplus", "filtered", "evaluation"]
"""What becomes of a group: it trains, or why it does not."""


@dataclass(slots=True)
class Member:
    """One episode of a group. place: in the line for permits. tries: attempt numbers used up.

    call: the attempt that runs now, in `pool`. done: how the episode ended; it is in the store then.
    """

    episode: str
    seed: int
    place: int
    tries: int = 0
    pool: str = ""
    call: asyncio.Task[EpisodeDone] | None = None
    done: EpisodeDone | None = None


@dataclass(slots=True)
class Group:
    """A group on its way. min_version: of the weights that may sample it. stopped: why it can no longer train, or an empty
    string."""

    number: int
    kind: Kind
    step: int
    task: Task
    sampling: Sampling
    limits: Limits
    members: list[Member]
    min_version: int
    stopped: Literal["", "failed", "surplus"] = ""

    def ended(self, status: Status) -> list[EpisodeDone]:
        """The members that ended so."""
        return [member.done for member in self.members if member.done is not None and member.done.status == status]


def task_index(seed: int, number: int) -> int:
    """Which task the group for training of that number plays, in a run with that seed."""
    step, ordinal = divmod(number, GROUPS_PER_STEP_LIMIT)
    return seed * INDICES_OF_A_SEED + step * _INDICES_OF_A_STEP + ordinal


def seed_of(*parts: int) -> int:
    """A 62-bit seed from several integers, the same on every machine."""
    return int.from_bytes(hashlib.blake2b(repr(parts).encode(), digest_size=8).digest(), "big") >> 2
