"""Worlds as strangers write them, with one defect each: they return nonsense, or break at what an agent may say."""

import ast
import random

from tests.envs.strangers.good import Base, Desk
from troupe.envs import Turn, tool


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
