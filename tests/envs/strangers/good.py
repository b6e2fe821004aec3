"""Worlds as strangers write them: good ones. `test_check.py` has them checked."""

import asyncio
import sqlite3
import subprocess
import tempfile
import threading

from troupe.envs import TextWorld, ToolWorld, Turn, tool
from troupe.envs.base import belongs

WORDS = ("amber", "birch", "cedar", "dune", "ember", "fjord", "grove", "heath", "islet", "jetty", "knoll", "larch", "marsh")


class Base(TextWorld):
    """What most of them have in common: find the word, of which one in five is held out."""

    max_turns = 4

    def reset(self, task):
        self.word = next(word for word in iter(lambda: self.rng.choice(WORDS), None) if belongs(word, task.split))
        self.guesses = 0
        return f"Say the word {self.word}."

    def step(self, text):
        if not text.strip().isalpha():
            raise ValueError("say one word")
        self.guesses += 1
        return Turn(f"guess {self.guesses}", reward=float(text == self.word), done=text == self.word)


class Newcomer(TextWorld):
    """Ten lines, no player, a secret that no observation tells."""

    def reset(self, task):
        self.secret = self.rng.randint(1, 100)
        return "I am thinking of a number between 1 and 100. Guess."

    def step(self, text):
        guess = int(text)
        if guess == self.secret:
            return Turn("Yes!", reward=1.0, done=True)
        return Turn("higher" if guess < self.secret else "lower")


class Telling(Newcomer):
    """And one whose state tells the secret to those who check it."""

    def reset(self, task):
        opening = super().reset(task)
        self.secret = next(n for n in iter(lambda: self.rng.randint(1, 100), None) if belongs(str(n), task.split))
        return opening

    def state(self):
        return {"secret": self.secret, "seen": {"a": (1, 2)}}


class Desk(ToolWorld):
    """A newcomer's first tools."""

    def reset(self, task):
        self.stock = {"lamp": self.rng.randint(1, 9)}
        return f"How many lamps? {task.split}"

    @tool
    def count(self, name: str, most: int = 9) -> int:
        """Count something."""
        if name not in self.stock:
            raise ValueError("no such thing")
        return min(most, self.stock[name])

    def verify(self):
        return self.answer == str(self.stock["lamp"])


class Threaded(Base):
    """Async, with the loop's own threads for what blocks."""

    async def reset(self, task):
        return await asyncio.to_thread(super().reset, task)

    async def step(self, text):
        return await asyncio.to_thread(super().step, text)

    async def close(self):
        await asyncio.sleep(0)


class Tidy(Base):
    """Holds a process, a folder, a thread and a database, and lets go of all of them."""

    def __init__(self):
        self.held = None

    def reset(self, task):
        self.close()
        self.enough = threading.Event()
        thread = threading.Thread(target=self.enough.wait, daemon=True)
        thread.start()
        self.held = (
            subprocess.Popen(["cat"], stdin=subprocess.PIPE),
            tempfile.TemporaryDirectory(),
            sqlite3.connect(":memory:"),
        )
        return super().reset(task)

    def close(self):
        if self.held:
            process, folder, database = self.held
            process.stdin.close()
            process.wait()
            folder.cleanup()
            database.close()
            self.enough.set()
        self.held = None


class Halting(Base):
    """Attributes called as methods are elsewhere; sets that are sorted; chance that is the task's alone."""

    max_turns = 1000

    def reset(self, task):
        self.state = "begun"
        return super().reset(task) + " " + " ".join(sorted(set(WORDS)))
