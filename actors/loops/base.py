"""How an agent and a world take turns: a loop sees messages, never tokens.

Promises of a loop:
- it records one `Step` for each action, in order, and says why the episode stopped;
- it never swallows an error of the world: `EpisodeError` and `TimedOut` leave it as they are.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Protocol

from troupe.actors.recorder import Reply
from troupe.envs.base import Task, TextWorld
from troupe.envs.drive import Driver
from troupe.protocol.messages import Limits
from troupe.protocol.trajectory import Step, StopReason


@dataclass(slots=True)
class Outcome:
    """What an episode came to, filled in while it goes on, so that a broken episode still shows how far it got."""

    stop: StopReason = "failed"
    steps: list[Step] = field(default_factory=list)
    success: bool | None = None

    @property
    def reward(self) -> float:
        """Return: the sum of the steps' rewards."""
        return float(sum(step.reward for step in self.steps))


class Agent(Protocol):
    """What a loop may do with the policy. `recorder.Recorder` is the real one."""

    @property
    def length(self) -> int:
        """Tokens so far."""

    def observe(self, role: str, text: str, step: int = -1) -> None:
        """Tell the agent something."""

    async def act(self, step: int) -> Reply:
        """Let the agent speak."""


Loop = Callable[[Driver, type[TextWorld], Task, Agent, Limits, Outcome], Awaitable[None]]
"""A loop runs one episode and writes what it came to into the outcome that it is given."""
