"""Two arms with names: the calm one pays a little for sure, the bold one much and seldom. The names tell which is which.

RAGEN's bandit (arXiv:2504.20073, section 3.1): nothing but the meaning of two words says how an arm pays, so only who
reads them can choose. The better arm is the one that pays more on average, which need not be the one that pays more often.

Promises:
- a pair of names, one calm and one bold, is of one split: one pair in five, by its digest, is held out. Each of its words
  may be met in training beside another;
- luck belongs to the task, the pull and the words that were said: who says the same in the same turn of the same task is paid
  the same, who muses otherwise has luck of his own. So a group that speaks with one voice wins together or loses together;
- success is to have pulled the better arm in more than half of the pulls, whatever luck says; an answer whose last word is
  no arm is invalid and pulls nothing;
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
    names: names of each nature, 3 to 6. price: what each idle word costs, 0 to 1; a part of its own.
    """

    name: ClassVar[str] = "bandit"
    max_turns: ClassVar[int] = 10
    inline: ClassVar[bool] = True

    def __init__(
        self,
        sure: float = 0.1,
        win: float = 1.0,
        chance: float = 0.25,
        turns: int = 1,
        muse: float = 0.5,
        names: int = 6,
        price: float = 0.0,
    ) -> None:
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
        if not 3 <= names <= len(CALM):
            raise ValueError(f"names is {names}; it is 3 to {len(CALM)}")
        if not 0.0 <= price <= 1.0:
            raise ValueError(f"price is {price}; it is 0 to 1")
        self.sure, self.win, self.chance, self.turns = sure, win, chance, turns
        self.muse, self.names, self.price = muse, names, price
        self.calm, self.bold = CALM[0], BOLD[0]
        self.arms = [self.calm, self.bold]
        self.dice = 0.0
        self.pulled: list[str] = []

    # -- the world ---------------------------------------------------------------------------------------------------

    def reset(self, task: Task) -> str:
        for _ in range(_DRAWS):
            self.calm, self.bold = self.rng.choice(CALM[: self.names]), self.rng.choice(BOLD[: self.names])
            if belongs(self.pair, task.split):
                break
        else:
            raise TaskFailed(f"no pair of names is of split '{task.split}'")
        self.arms = self.rng.sample([self.calm, self.bold], 2)
        self.dice = self.rng.random()
        self.pulled = []
        return self._offer

    def step(self, text: str) -> Turn:
        words = [word.lower() for word in _WORD.findall(text)]
        arm = words[-1] if words else ""
        if arm not in self.arms:
            raise InvalidAction(f"name one of {self._offer}, last")
        luck = random.Random(f"{self.dice} {len(self.pulled)} {' '.join(words)}").random()
        paid = self.sure if arm == self.calm else self.win * (luck < self.chance)
        idle = -self.price * (len(words) - 1)
        self.pulled.append(arm)
        told = f"{arm} paid {paid:g}"
        parts = {"pull": paid, "idle": idle} if self.price else {}
        if len(self.pulled) < self.turns:
            return Turn(f"{told}; {self._offer}", paid + idle, parts=parts)
        success = 2 * self.pulled.count(self.better) > self.turns
        return Turn(told, paid + idle, done=True, success=success, parts=parts)

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
        return "".join(f" {word}" for word in (*musings, arm))

    @classmethod
    def corpus(cls) -> Iterator[str]:
        yield "".join(f" {word}" for word in (*CALM, *BOLD, *MUSINGS, "or", "name", "one", "of", "last", "paid"))
        yield "".join(f" {digit}" for digit in range(10)) + ".;"
