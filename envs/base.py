"""The contract between a world and everything that drives one.

A world is a resettable process: `reset(task)` gives the first observation, `step(text)` gives a `Turn`. Worlds are
plain classes, synchronous or `async`; they never see tokens.

Promises of a world:
- `(task.seed, task.split, task.data)` reproduces an episode exactly: all chance comes from `self.rng`, seeded from the
  task before `reset`;
- an action that it cannot read raises `InvalidAction` (or ValueError): the agent is told, the episode goes on;
- any other exception means that the *world* broke: the episode is retried or excluded, never rewarded.
"""

from __future__ import annotations

import hashlib
import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, ClassVar, NamedTuple

from troupe.protocol.errors import EnvironmentFailed, InvalidAction, TaskFailed
from troupe.protocol.trajectory import Task

__all__ = ["InvalidAction", "Task", "TextWorld", "ToolCall", "Turn", "action_of", "belongs", "rng_of"]

SPLITS = ("train", "heldout")


@dataclass(slots=True)
class Turn:
    """What came back from one action.

    text: the observation. reward: of this step. parts: named parts of the reward, if it has any. done: the episode is
    over by the world's own rules. success: the world's verdict when done (None: derived as `reward > 0`). truncated: it is
    over by a limit that the world has set itself, not by its rules; `done` has to say so as well.
    """

    text: str
    reward: float = 0.0
    done: bool = False
    success: bool | None = None
    parts: dict[str, float] = field(default_factory=dict)
    truncated: bool = False


class ToolCall(NamedTuple):
    """An action that is no message: the name of a tool, and its arguments."""

    name: str
    arguments: dict[str, Any]


class TextWorld:
    """Base of worlds whose actions are text. Subclasses define `reset` and `step`; the rest has sane defaults."""

    name: ClassVar[str] = ""
    """Registry name, for example "frozen_lake"."""

    system: ClassVar[str] = ""
    """System prompt that opens each episode; empty for none."""

    max_turns: ClassVar[int] = 8
    """Turns after which an episode is stopped (stop reason "max_turns")."""

    inline: ClassVar[bool] = False
    """Synchronous methods take microseconds and never block: they are called on the event loop itself, which saves a
    thread hand-over a turn but cannot be timed out. Leave it False for anything that does input or output."""

    recurring: bool = False
    """Different tasks may open alike: what their seeds tell apart is luck that comes later, and that is all a held-out one
    has of its own. The check then cannot tell the splits apart."""

    rng: random.Random
    """Seeded from the task before each `reset`."""

    def __init__(self, **options: Any) -> None:
        """`options` come from the recipe's `[env.options]`. Unknown ones raise TypeError."""
        if options:
            raise TypeError(f"{type(self).__name__} takes no options, got {', '.join(sorted(options))}")

    def _begin(self, task: Task) -> None:
        """Called by the driver before each `reset`."""
        self.rng = rng_of(task)

    # -- to be written by a world ------------------------------------------------------------------------------------

    def reset(self, task: Task) -> Any:
        """Starts the episode of `task`; returns the first observation (str)."""
        raise TypeError(f"{type(self).__name__} does not define reset(self, task)")

    def step(self, text: str) -> Any:
        """Applies the agent's action, its message without the think block; returns a `Turn`, or a str (no reward)."""
        raise TypeError(f"{type(self).__name__} does not define step(self, text)")

    # -- may be refined ----------------------------------------------------------------------------------------------

    def state_key(self) -> str:
        """The state that the next action is taken from, for anchor-state grouping; empty if states do not recur."""
        return ""

    def state(self) -> Any:
        """A snapshot of the episode for people and debuggers, what is hidden from the agent included: a dict of what JSON can
        say. May be asked at any time after `reset` and changes nothing. The agent never sees it."""
        key = self.state_key()
        return {"state_key": key} if key else {}

    def close(self) -> Any:
        """Releases what the world holds; may be `async`. May come before any `reset`, amid an episode, and twice."""

    def play(self, rng: random.Random, noise: float) -> str | ToolCall | None:
        """The scripted player's next message, think block included, or the tool that it calls; None if there is no player.

        noise: the share of its moves that are random, 0 to 1."""
        return None

    @classmethod
    def task(cls, split: str, index: int) -> Task:
        """Task number `index` of `split` ("train" or "heldout"). No task is in both."""
        return Task(id=f"{split}/{index}", env=cls.name or cls.__name__, split=split, seed=index)

    @classmethod
    def corpus(cls) -> Iterator[str]:
        """Texts that cover the world's vocabulary, for a tokenizer made by the recipe."""
        return iter(())


def finite(name: str, value: Any) -> float:
    """`value` as a float. NaN, infinity or no number at all is a broken world, not a reward (law 6): EnvironmentFailed."""
    try:
        number = math.nan if isinstance(value, str) else float(value)
    except (TypeError, ValueError, OverflowError):
        number = math.nan
    if not math.isfinite(number):
        raise EnvironmentFailed(f"{name} is {value!r}, not a finite number")
    return number


def rng_of(task: Task) -> random.Random:
    """The chance of an episode: depends on the task's split and seed only, not on the process or the machine."""
    return random.Random(f"{task.split}/{task.seed}")


def belongs(key: str, split: str) -> bool:
    """Whether what `key` describes is of `split`: one in five by its digest is held out, the others train.

    Because the digest is of the thing itself, no choice of seeds can bring a held-out thing into training.
    Raises TaskFailed for a split other than "train" and "heldout".
    """
    if split not in SPLITS:
        raise TaskFailed(f"unknown split '{split}': it is one of {', '.join(SPLITS)}")
    held_out = int.from_bytes(hashlib.blake2b(key.encode(), digest_size=8).digest(), "big") % 5 == 0
    return held_out == (split == "heldout")


def action_of(message: str) -> str:
    """The agent's message without its think block; empty after a block that was opened and never closed."""
    _, closed, after = message.rpartition("</think>")
    return after if closed else message.partition("<think>")[0]
