"""Worlds as strangers write them: what they keep by task meets who plays that task meanwhile, or has played it before."""

import functools
import itertools
import shutil
import tempfile
from pathlib import Path

from tests.envs.strangers.good import Base
from troupe.envs import InvalidAction, Turn


class Player(Base):
    """The good one that the others are made of: it has a scripted player, and tells which turn it is."""

    def reset(self, task):
        self.task_id = task.id
        return super().reset(task)

    def play(self, rng, noise):
        return self.word if rng.random() >= noise else "nothing"


class CountsByTask(Player):
    turns = {}  # noqa: RUF012 - the defect

    def reset(self, task):
        self.turns[task.id] = 0
        return super().reset(task)

    def step(self, text):
        turn = super().step(text)
        self.turns[self.task_id] += 1
        turn.text = f"turn {self.turns[self.task_id]}"
        return turn


class RemembersByTask(Player):
    """Nobody sees it who says the same as the others."""

    said = {}  # noqa: RUF012 - the defect

    def reset(self, task):
        self.said[task.id] = "nothing"
        return super().reset(task)

    def step(self, text):
        turn = super().step(text)
        turn.text = f"before you said {self.said[self.task_id]}"
        self.said[self.task_id] = text
        return turn


class FileByTask(Player):
    def reset(self, task):
        self.file = Path(tempfile.gettempdir(), f"{task.split}-{task.seed}.txt")
        self.file.write_text("")
        return super().reset(task)

    def step(self, text):
        turn = super().step(text)
        self.file.write_text(self.file.read_text() + "x")
        turn.text = f"turn {len(self.file.read_text())}"
        return turn

    def close(self):
        if hasattr(self, "file"):
            self.file.unlink(missing_ok=True)


class FolderByTask(Player):
    """Only the end of one of them is seen by the other."""

    def reset(self, task):
        self.folder = Path(tempfile.gettempdir(), f"{task.split}-{task.seed}")
        self.folder.mkdir(exist_ok=True)
        (self.folder / "note").write_text("find it")
        return super().reset(task)

    def step(self, text):
        turn = super().step(text)
        turn.text += (self.folder / "note").read_text()
        return turn

    def close(self):
        if hasattr(self, "folder"):
            shutil.rmtree(self.folder, ignore_errors=True)


class VerdictByTask(Player):
    """The first answer to a task is graded, and all others are told its grade."""

    grades = {}  # noqa: RUF012 - the defect

    def step(self, text):
        grade = self.grades.setdefault(self.task_id, float(text == self.word))
        return Turn("graded", reward=grade, done=True)


class VerdictByQuestion(Player):
    grades = {}  # noqa: RUF012 - the defect

    def step(self, text):
        grade = self.grades.setdefault(self.word, float(text == self.word))
        return Turn("graded", reward=grade, done=True)


class HelpsWhoWasWrong(Player):
    """What a wrong answer leaves behind makes the next episode of that task another one."""

    wrong = set()  # noqa: RUF012 - the defect

    def reset(self, task):
        opening = super().reset(task)
        self.hint = task.id in self.wrong
        return opening

    def step(self, text):
        if text != self.word:
            self.wrong.add(self.task_id)
        return Turn("you were told before" if self.hint and text == self.word else "graded", reward=0.0, done=True)


class KeyedByWorld(Player):
    """Good: everybody has an entry of their own."""

    numbers, turns = itertools.count(), {}

    def __init__(self):
        self.number = next(self.numbers)

    def reset(self, task):
        self.turns[self.number] = 0
        return super().reset(task)

    def step(self, text):
        turn = super().step(text)
        self.turns[self.number] += 1
        turn.text = f"turn {self.turns[self.number]}"
        return turn

    def close(self):
        self.turns.pop(self.number, None)


class CachedByAnswer(Player):
    """Good: what is remembered depends on all that it was made of."""

    def step(self, text):
        if len(text) > 1000:
            raise InvalidAction("one word")
        return Turn("graded", reward=graded_for(self.word, text), done=True)


@functools.lru_cache(1000)
def graded_for(word, answer):
    return float(word == answer)
