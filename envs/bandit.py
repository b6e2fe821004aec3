"""Two arms with names: the calm one pays a little for sure, the bold one much and seldom. The names tell which is which.

RAGEN's bandit (arXiv:2504.20073, section 3.1): nothing but the meaning of two words says how an arm pays, so only who
reads them can choose. The better arm is the one that pays more on average, which need not be the one that pays more often.

Promises:
- a pair of names, one calm and one bold, is of one split: one pair in five, by its digest, is held out. Each of its words
  may be met in training beside another;
- luck belongs to the task and the pull: whoever pulls the bold arm in the same turn of the same task is paid the same. So
  the members of a group win together or lose together;
- success is to have pulled the better arm in more than half of the pulls; an answer that names no arm, or both, is
  invalid and pulls nothing;
- every word of the player has one leading space: a tokenizer trained on `corpus` reads one token a word.
"""

from __future__ import annotations

import random
import re
from collections.abc import Iterator
from typing import ClassVar

from troupe.envs.base import InvalidAction, Task, TextWorld, Turn, belongs
from troupe.protocol.errors import TaskFailed

CALM = ("phoenix", "teacher", "librarian", "engineer", "turtle", "anchor")
BOLD = ("dragon", "trader", "gambler", "pirate", "tiger", "rocket")
MUSINGS = ("hope", "care", "luck", "fear", "calm", "nerve", "sense", "heart")
_WORD = re.compile(r"[A-Za-z]+")
_DRAWS = 1_000
_LONGEST = 40


class Bandit(TextWorld):
    """Options:

    sure: what the calm arm pays at each pull. win, chance: what the bold arm pays when it pays, and how probably it does.
    turns: pulls in an episode, 1 to `max_turns`.
    muse: how probably the scripted player thinks one more idle word before it names an arm, 0 to 0.95.
    """

    name: ClassVar[str] = "bandit"
    max_turns: ClassVar[int] = 10
    inline: ClassVar[bool] = True

    def __init__(self, sure: float = 0.1, win: float = 1.0, chance: float = 0.25, turns: int = 1, muse: float = 0.5) -> None:
        if not 0.0 < chance <= 1.0:
            raise ValueError(f"chance is {chance}; it is a probability above 0, at most 1")
        if not 0.0 <= sure < win < 1e6:
            raise ValueError(f"sure is {sure} and win is {win}; win is the larger, and both are 0 to a million")
        if chance * win == sure:
            raise ValueError(f"chance * win is {sure}, and so is sure: no arm is the better one")
        if not 1 <= turns <= self.max_turns:
            raise ValueError(f"turns is {turns}; it is 1 to {self.max_turns}")
        if not 0.0 <= muse <= 0.95:
            raise ValueError(f"muse is {muse}; it is a probability from 0 to 0.95")
        self.sure, self.win, self.chance, self.turns, self.muse = sure, win, chance, turns, muse
        self.calm, self.bold = CALM[0], BOLD[0]
        self.arms = [self.calm, self.bold]
        self.pays: list[bool] = []
        self.pulled: list[str] = []

    # -- the world ---------------------------------------------------------------------------------------------------

    def reset(self, task: Task) -> str:
        for _ in range(_DRAWS):
            self.calm, self.bold = self.rng.choice(CALM), self.rng.choice(BOLD)
            if belongs(self.pair, task.split):
                break
        else:
            raise TaskFailed(f"no pair of names is of split '{task.split}'")
        self.arms = self.rng.sample([self.calm, self.bold], 2)
        self.pays = [self.rng.random() < self.chance for _ in range(self.turns)]
        self.pulled = []
        return self._offer

    def step(self, text: str) -> Turn:
        named = {word.lower() for word in _WORD.findall(text)} & set(self.arms)
        if len(named) != 1:
            raise InvalidAction(f"name one of {self._offer}")
        (arm,) = named
        reward = self.sure if arm == self.calm else self.win * self.pays[len(self.pulled)]
        self.pulled.append(arm)
        told = f"{arm} paid {reward:g}"
        if len(self.pulled) < self.turns:
            return Turn(f"{told}; {self._offer}", reward)
        return Turn(told, reward, done=True, success=2 * self.pulled.count(self.better) > self.turns)

    def state_key(self) -> str:
        return f"{self._offer}, {len(self.pulled)} pulled"

    @property
    def actions(self) -> list[str]:
        """What can be said, for a player of numbers."""
        return self.arms

    def encode(self) -> list[float]:
        """Of either arm which of all names it has, one-hot; and the share of the pulls that is used up."""
        return [*(float(name == arm) for arm in self.arms for name in CALM + BOLD), len(self.pulled) / self.turns]

    @property
    def pair(self) -> str:
        """The names without their order: what a split is decided by."""
        return f"{self.calm} {self.bold}"

    @property
    def better(self) -> str:
        """The arm that pays more on average."""
        return self.bold if self.chance * self.win > self.sure else self.calm

    @property
    def _offer(self) -> str:
        return " or ".join(self.arms)

    # -- its scripted player -----------------------------------------------------------------------------------------

    def play(self, rng: random.Random, noise: float) -> str:
        arm = rng.choice(self.arms) if rng.random() < noise else self.better
        musings: list[str] = []
        while len(musings) < _LONGEST and rng.random() < self.muse:
            musings.append(rng.choice(MUSINGS))
        return f"<think>{''.join(f' {word}' for word in musings)}</think> {arm}"

    @classmethod
    def corpus(cls) -> Iterator[str]:
        yield "".join(f" {word}" for word in (*CALM, *BOLD, *MUSINGS, "or", "name", "one", "of", "paid"))
        yield "".join(f" {digit}" for digit in range(10)) + ".;"
