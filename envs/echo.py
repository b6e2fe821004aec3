"""Says back what it hears. A world for tests and benchmarks: it can be slow, break and hang on demand.

Promises: the return of an episode depends on the task's seed alone; `fail` breaks the same steps of the same task each
time (a task that always fails), `flaky` breaks any step by real chance (a machine that sometimes fails).
"""

from __future__ import annotations

import asyncio
import random
from collections.abc import Awaitable
from typing import ClassVar

from troupe.envs.base import Task, TextWorld, Turn


class Echo(TextWorld):
    """Options:

    turns: of an episode. sleep: seconds that a step takes. fail, flaky: chance of a step to raise RuntimeError, drawn
    by the task's seed and by the system. hang: `step` never returns.
    """

    name: ClassVar[str] = "echo"
    max_turns: ClassVar[int] = 1_000
    inline: ClassVar[bool] = True

    def __init__(self, turns: int = 1, sleep: float = 0.0, fail: float = 0.0, flaky: float = 0.0, hang: bool = False) -> None:
        if not 1 <= turns <= self.max_turns:
            raise ValueError(f"turns is {turns}; it is 1 to {self.max_turns}")
        self.turns, self.sleep, self.fail, self.flaky, self.hang = turns, sleep, fail, flaky, hang

    def reset(self, task: Task) -> str:
        self.turn = 0
        self.reward = round(self.rng.random(), 3)
        return f"echo {task.split} {task.seed}"

    def step(self, text: str) -> Turn | Awaitable[Turn]:
        return self._slowly(text) if self.hang or self.sleep else self.answer(text)

    async def _slowly(self, text: str) -> Turn:
        if self.hang:
            await asyncio.Event().wait()
        await asyncio.sleep(self.sleep)
        return self.answer(text)

    def answer(self, text: str) -> Turn:
        """The next turn, at once."""
        self.turn += 1
        if self.rng.random() < self.fail:
            raise RuntimeError(f"step {self.turn} fails by the task's seed")
        if self.flaky and random.SystemRandom().random() < self.flaky:
            raise RuntimeError(f"step {self.turn} fails by chance")
        done = self.turn == self.turns
        return Turn(
            text[:200],
            reward=self.reward if done else 0.0,
            done=done,
            success=self.reward >= 0.5 if done else None,
        )

    def state_key(self) -> str:
        return str(self.turn)

    def play(self, rng: random.Random, noise: float) -> str:
        return f"turn {self.turn}"
