"""Find a number in a few guesses, told after each whether it is higher or lower.

Promises: one secret in five, by its digest, is held out; reward lies in 0..1 and is 1 for a hit; the named parts of the
reward sum to it. An answer without a number in range is invalid and does not count as a guess.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import ClassVar

from troupe.envs.base import InvalidAction, Task, TextWorld, Turn, belongs, rng_of
from troupe.protocol.errors import TaskFailed

_DRAWS = 1_000
_NUMBER = re.compile(r"-?[0-9]+")


class Guess(TextWorld):
    """Options:

    high: the secret is 1..high, at least 10. turns: guesses allowed, at most `max_turns`. hint: the feedback also names
    the range that is left, so that the last message is all that must be remembered.
    closeness: share of the reward (0 to 1) that is paid for how near the best guess came: partial credit.
    """

    name: ClassVar[str] = "guess"
    max_turns: ClassVar[int] = 10
    inline: ClassVar[bool] = True
    system: ClassVar[str] = (
        "You are playing a number guessing game. I have a secret whole number. "
        "Reply with one number and nothing else. I will tell you if the secret is higher or lower."
    )

    def __init__(self, high: int = 20, turns: int = 5, hint: bool = True, closeness: float = 0.0) -> None:
        if not 10 <= high <= 1_000_000:
            raise ValueError(f"high is {high}; it is 10 to 1000000")
        if not 1 <= turns <= self.max_turns:
            raise ValueError(f"turns is {turns}; it is 1 to {self.max_turns}")
        if not 0.0 <= closeness <= 1.0:
            raise ValueError(f"closeness is {closeness}; it is a share from 0 to 1")
        self.high, self.turns, self.hint, self.closeness = high, turns, hint, closeness

    def reset(self, task: Task) -> str:
        self.secret = self._draw(task.split)
        self.low, self.top = 1, self.high  # the range that the feedback leaves
        self.left = self.turns
        self.miss = self.high
        return f"The secret number is between 1 and {self.high}. You have {self.turns} guesses. Your guess?"

    def _draw(self, split: str) -> int:
        for _ in range(_DRAWS):
            secret = self.rng.randint(1, self.high)
            if belongs(f"{secret} of {self.high}", split):
                return secret
        raise TaskFailed(f"no number from 1 to {self.high} is of split '{split}': take another high")

    def step(self, text: str) -> Turn:
        found = _NUMBER.search(text)
        if found is None or len(found[0]) > 9 or not 1 <= (guess := int(found[0])) <= self.high:
            raise InvalidAction(f"Reply with one number between 1 and {self.high}.")
        self.left -= 1
        self.miss = min(self.miss, abs(guess - self.secret))
        if guess == self.secret:
            return self._end(f"Yes! The secret number is {guess}.", hit=True)
        if guess < self.secret:
            self.low = max(self.low, guess + 1)
        else:
            self.top = min(self.top, guess - 1)
        if self.left == 0:
            return self._end(f"No. The secret number was {self.secret}.", hit=False)
        direction = "higher" if guess < self.secret else "lower"
        range_left = f" It is between {self.low} and {self.top}." if self.hint else ""
        return Turn(f"The secret number is {direction} than {guess}.{range_left} Your guess?")

    def _end(self, text: str, *, hit: bool) -> Turn:
        parts = {"hit": (1.0 - self.closeness) * hit}
        if self.closeness:
            parts["closeness"] = self.closeness * (1.0 - self.miss / self.high)
        return Turn(text, reward=sum(parts.values()), done=True, success=hit, parts=parts)

    def state_key(self) -> str:
        return f"{self.low}-{self.top}, {self.left} left"

    @property
    def actions(self) -> list[str]:
        """What can be said, for a player of numbers."""
        return [str(number) for number in range(1, self.high + 1)]

    def encode(self) -> list[float]:
        """The range that the feedback leaves, and the guesses left, each as a share."""
        return [self.low / self.high, self.top / self.high, self.left / self.turns]

    def state(self) -> dict[str, int]:
        return {"secret": self.secret, "low": self.low, "high": self.top, "left": self.left}

    def play(self, rng: random.Random, noise: float) -> str:
        return str(rng.randint(1, self.high) if rng.random() < noise else (self.low + self.top) // 2)

    @classmethod
    def corpus(cls) -> Iterator[str]:
        yield cls.system
        for index in range(32):
            world, task = cls(), cls.task("train", index)
            world.rng = rng_of(task)
            yield world.reset(task)
            for _ in range(world.turns):
                message = world.play(world.rng, noise=0.5)
                turn = world.step(message)
                yield from (message, turn.text)
                if turn.done:
                    break
