"""Worlds as strangers write them: good ones, and bad ones with one defect each. `test_check.py` has them checked."""

import ast
import asyncio
import itertools
import os
import random
import re
import sqlite3
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path

from troupe.envs import Task, TextWorld, ToolWorld, Turn, tool
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


# -- good ones -------------------------------------------------------------------------------------------------------


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


# -- chance ----------------------------------------------------------------------------------------------------------


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


# -- what outlives an episode ----------------------------------------------------------------------------------------


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


# -- what it returns -------------------------------------------------------------------------------------------------


class Gym(Base):
    def step(self, text):
        return text, 1.0, False, False, {}


class Dict(Base):
    def reset(self, task):
        return {"observation": super().reset(task)}


class Bytes(Base):
    def step(self, text):
        return Turn(b"ok")


class Nothing(Base):
    def step(self, text):
        super().step(text)


class NotANumber(Base):
    def step(self, text):
        return Turn("ok", reward=float("nan"))


class Infinite(Base):
    def step(self, text):
        return Turn("ok", reward=float("inf"))


class RewardInWords(Base):
    def step(self, text):
        return Turn("ok", reward="1.0")


class BadPart(Base):
    def step(self, text):
        return Turn("ok", parts={"style": None})


class DoneInWords(Base):
    def step(self, text):
        return Turn("ok", done="False")


class SuccessInWords(Base):
    def step(self, text):
        return Turn("ok", done=True, success="no")


class Endless(Base):
    max_turns = 0


class SystemAsList(Base):
    system = ["You", "play"]  # noqa: RUF012 - the defect


class Long(Base):
    def step(self, text):
        super().step(text)
        return "log " * 100_000


class KeyThatDraws(Base):
    def state_key(self):
        return f"{self.word} {self.rng.random()}"


class StateThatActs(Base):
    def state(self):
        self.guesses += 1
        return {"guesses": "?"}


class StateOfObjects(Base):
    def state(self):
        return {"self": self}


# -- actions ---------------------------------------------------------------------------------------------------------


class Fragile(Base):
    def step(self, text):
        return Turn(str({"a": 1}[text] if "\x00" in text else 1))


class Evaluates(Base):
    def step(self, text):
        return f"= {ast.literal_eval(text)}" if text[:1] in "{[(" else super().step(text)


class Formats(Base):
    def step(self, text):
        return f"You said: {{}}, {text}".format(text)


class FragileTool(Desk):
    @tool
    def count(self, name: str) -> int:
        """Count something."""
        return {}[name] if "\x00" in name else 1


class HiddenTool(Desk):
    def tools(self):
        return [*super().tools(), {"name": "find", "description": "Find.", "parameters": {"type": "object"}}]


class Unreadable(Desk):
    def verify(self):
        return int(self.answer) == self.stock["lamp"]


class RestlessTool(Desk):
    @tool
    def count(self) -> float:
        """Count something."""
        return random.random()


# -- tasks -----------------------------------------------------------------------------------------------------------


class SplitBySeed(Base):
    def reset(self, task):
        super().reset(task)
        return f"task {task.seed}"


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


# -- the end ---------------------------------------------------------------------------------------------------------


class LeavesThread(Base):
    stop = threading.Event()

    def reset(self, task):
        threading.Thread(target=self.stop.wait, name="left-behind", daemon=True).start()
        return super().reset(task)


class LeavesProcess(Base):
    def reset(self, task):
        self.process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], start_new_session=True)
        return super().reset(task)


class LeavesFile(Base):
    kept = []  # noqa: RUF012 - the defect

    def reset(self, task):
        self.kept.append(open(__file__))  # noqa: SIM115 - the defect
        return super().reset(task)


class LeavesFolder(Base):
    def reset(self, task):
        Path(tempfile.mkdtemp(prefix="scratch-"), "log").write_text("")
        return super().reset(task)


class OneThreadForAll(Base):
    stop, thread = threading.Event(), None

    def reset(self, task):
        if type(self).thread is None:
            type(self).thread = threading.Thread(target=self.stop.wait, name="for-all", daemon=True)
            type(self).thread.start()
        return super().reset(task)


class ClosesNeverWell(Base):
    def close(self):
        raise OSError("device busy")


class ClosesOnce(Base):
    open = True

    def close(self):
        if not self.open:
            raise RuntimeError("closed already")
        self.open = False


class ClosesWhatItHasNot(Base):
    def reset(self, task):
        self.connection = sqlite3.connect(":memory:")
        return super().reset(task)

    def close(self):
        self.connection.close()


class ClosesAtTheEndOnly(Base):
    def close(self):
        assert getattr(self, "guesses", 4) == 4 or self.guesses == 0


# -- time ------------------------------------------------------------------------------------------------------------


class SlowInline(Base):
    inline = True
    max_turns = 1

    def step(self, text):
        time.sleep(0.02)
        return super().step(text)


class AwaitsInline(Base):
    inline = True
    max_turns = 1

    async def step(self, text):
        await asyncio.sleep(0.05)
        return super().step(text)


class BlocksInline(Base):
    inline = True
    max_turns = 1

    async def step(self, text):
        time.sleep(0.05)  # noqa: ASYNC251 - the defect
        return super().step(text)


class BlocksTheLoop(Base):
    max_turns = 1

    async def step(self, text):
        time.sleep(0.07)  # noqa: ASYNC251 - the defect
        return super().step(text)


class HangsInReset(Base):
    def reset(self, task):
        while True:
            pass


class HangsInStep(Base):
    calls = 0

    def step(self, text):
        type(self).calls += 1
        while True:
            pass


class HangsInClose(Base):
    calls = 0

    def close(self):
        type(self).calls += 1
        while True:
            time.sleep(0.01)


class DiesElsewhere(Base):
    def step(self, text):
        if "PYTHONHASHSEED" in os.environ:
            os._exit(3)
        return super().step(text)


class FailsElsewhere(Base):
    def step(self, text):
        if "PYTHONHASHSEED" in os.environ:
            raise KeyError(text)
        return super().step(text)


class HangsWhenMade(Base):
    def __init__(self):
        threading.Event().wait()


class HangsInline(Base):
    inline = True

    def step(self, text):
        threading.Event().wait()


class HangsInARegularExpression(Base):
    def step(self, text):
        return "ok" if re.match(r"(\w+)+$", text[:100]) else "no"


class EndsTheProcess(Base):
    def step(self, text):
        os._exit(3)
