"""Worlds as strangers write them, with one defect each: what they do depends on more than their task and what they are told."""

import itertools
import os
import random
import tempfile
import time

from tests.envs.strangers.good import WORDS, Base, Newcomer
from troupe.envs import InvalidAction, Task, Turn
from troupe.envs.base import belongs


class Unseeded(Base):
    def reset(self, task):
        return f"{super().reset(task)} {random.random()}"


class Clocked(Base):
    def step(self, text):
        super().step(text)
        return Turn(f"at {time.perf_counter_ns()}")


class ByTheMinute(Base):
    def step(self, text):
        super().step(text)
        return Turn("ok", reward=time.localtime().tm_min % 2)


class ByTheSecond(Base):
    def step(self, text):
        super().step(text)
        return Turn("ok", reward=int(time.time()) % 2)


class ReseedsTheGlobal(Base):
    def reset(self, task):
        random.seed(task.seed)
        return super().reset(task)

    def step(self, text):
        super().step(text)
        return f"you rolled {random.randint(1, 1_000_000)}"


class ReseedsAndIgnores(Base):
    def reset(self, task):
        random.seed(task.seed)
        return super().reset(task)


class SetOrder(Base):
    def reset(self, task):
        return super().reset(task) + " " + " ".join({*WORDS})


class HashOfText(Base):
    def step(self, text):
        super().step(text)
        return f"code {hash(text)}"


class OfTheProcess(Base):
    def reset(self, task):
        return f"{super().reset(task)} {os.getpid()}"


class TaskByHash(Base):
    @classmethod
    def task(cls, split, index):
        return Task(f"{split}/{index}", "w", split, index, {"key": hash(f"{split}{index}")})


class CountsOn(Base):
    def __init__(self):
        self.count = itertools.count()

    def step(self, text):
        super().step(text)
        return f"step {next(self.count)}"


class CountsOnForAll(Base):
    count = itertools.count()

    def step(self, text):
        super().step(text)
        return f"step {next(self.count)}"


class MutableDefault(Base):
    def __init__(self, said=[]):  # noqa: B006 - the defect
        self.said = said

    def step(self, text):
        super().step(text)
        self.said.append(text)
        return f"you said {len(self.said)} words"


class SecretOfTheClass(Base):
    def reset(self, task):
        opening = super().reset(task)
        type(self).secret = self.word
        return opening

    def step(self, text):
        return Turn(f"it was {type(self).secret}", reward=float(text == type(self).secret), done=True)


class ClearsAtTheEndOnly(Base):
    said = ()

    def step(self, text):
        turn = super().step(text)
        self.said = (*self.said, text)
        turn.text += f": {' '.join(self.said)}"
        turn.done = len(self.said) == 2
        if turn.done:
            self.said = ()
        return turn


class ChangesFolder(Base):
    def reset(self, task):
        os.chdir(tempfile.gettempdir())
        return super().reset(task)


class ChangesEnvironment(Base):
    def reset(self, task):
        os.environ["STRANGERS_SEED"] = str(task.seed)
        return super().reset(task)


class EatsItsOptions(Base):
    def __init__(self, words=()):
        self.more = words

    def reset(self, task):
        if self.more:
            self.more.pop()
        return super().reset(task)


class TakesAnyOption(Base):
    def __init__(self, **options):
        self.size = options.get("size", 4)


class SplitBySeed(Base):
    """Its player can say the word that the opening does not."""

    def reset(self, task):
        self.word, self.guesses = random.Random(task.seed).choice(WORDS), 0
        return f"task {task.seed}"

    def play(self, rng, noise):
        return self.word


class Riddle(Base):
    """A sound one: it opens with one of few letters, splits by content, and nothing but its word is rewarded."""

    words = tuple(a + b + c for a in "bcd" for b in "aeiou" for c in "lmnprst")

    def reset(self, task):
        self.word = self.rng.choice([word for word in self.words if belongs(word, task.split)])
        return f"Guess my word. It begins with {self.word[0]}."

    def step(self, text):
        if len(text) != 3:
            raise InvalidAction("three letters")
        return Turn("no" if text != self.word else "yes", reward=float(text == self.word), done=text == self.word)


class RiddleThatTells(Riddle):
    def state(self):
        return {"word": self.word}


class RiddleThatTellsNothing(Riddle):
    def state(self):
        return {"turn": 1}


class TellingOfHalf(Newcomer):
    """Sound: another secret, of which `state` tells but one digit."""

    def reset(self, task):
        opening = super().reset(task)
        self.secret = next(n for n in iter(lambda: self.rng.randint(1, 100), None) if belongs(str(n), task.split))
        return opening

    def step(self, text):
        turn = super().step(text)
        turn.text += f" {self.secret}"
        return turn

    def state(self):
        return {"even": self.secret % 2 == 0}


class SameQuestions(Base):
    """The commonest of all: a list of questions, and no thought of splits."""

    def reset(self, task):
        self.word, self.guesses = self.rng.choice(WORDS), 0
        return f"Say the word {self.word}."


class OneTask(Base):
    def reset(self, task):
        self.word, self.guesses = "amber", 0
        return "Say the word."


class TellingTheSame(Newcomer):
    def state(self):
        return {"secret": self.secret}


class OneId(Base):
    @classmethod
    def task(cls, split, index):
        return Task("task", "w", split, index)


class NoTask(Base):
    @classmethod
    def task(cls, split, index):
        return {"split": split, "seed": index}


class FewTasks(Base):
    @classmethod
    def task(cls, split, index):
        return Task(f"{split}/{index}", "w", split, [7, 8, 9][index])


def made(answer):
    """A class that is made by a function, and held by another name than its own."""

    class World(Base):
        def step(self, text):
            super().step(text)
            return answer(text)

    return World


MadeByHash = made(lambda text: f"code {hash(text)}")
MadeSound = made(lambda text: f"you said {text}")


class Box:
    Inside = made(lambda text: f"code {hash(text)}")
