"""Small problems that are tedious by hand and easy for a program: the agent may write Python and read what it prints.

A message runs a program or answers, whichever comes first in it; what is not closed goes to the end of the message:

    <code>
    s = 0
    for i in range(3, 17 + 1):
        s += i * i
    print(s)
    </code>

is answered with `<interpreter>`, its output (or what is wrong with it) and `</interpreter>`, and `<answer>1780</answer>` ends
the episode. What the program may be is said in `small_python`: a bounded subset of Python without imports, not a sandbox.

Promises: one problem in five, by the digest of its text, is held out; the reward is 1 for exactly the right number, else 0.
"""

from __future__ import annotations

import math
import random
import re
import textwrap
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import ClassVar, NamedTuple

from troupe.envs import small_python
from troupe.envs.base import InvalidAction, Task, TextWorld, Turn, belongs, rng_of
from troupe.protocol.errors import TaskFailed

_READ = 4_000  # characters of a message that are looked at
_DRAWS = 1_000
_CODE = re.compile(r"<code>(.*?)(?:</code>|\Z)", re.DOTALL)
_FENCED = re.compile(r"\s*```(?:python)? *\n(.*?)```\s*", re.DOTALL)
_ANSWER = re.compile(r"<answer>(.*?)(?:</answer>|\Z)", re.DOTALL)
_NUMBER = re.compile(r"[-+]?[0-9]{1,60}(?:\.[0-9]{1,60}|/0*[1-9][0-9]{0,59})?")


class _Kind(NamedTuple):
    """question, program: with numbers in braces. solve: the answer, computed otherwise than by the program."""

    question: str
    program: str
    solve: Callable[[dict[str, int]], int]


_KINDS = (
    _Kind(
        "What is the sum of i * i + {k} for i from {a} to {b}?",
        "s = 0\nfor i in range({a}, {b} + 1):\n    s += i * i + {k}\nprint(s)",
        lambda n: sum(i * i for i in range(n["a"], n["b"] + 1)) + n["k"] * (n["b"] - n["a"] + 1),
    ),
    _Kind(
        "How many whole numbers from {a} to {b} leave the remainder {r} when they are divided by {m}?",
        "n = 0\nfor i in range({a}, {b} + 1):\n    if i % {m} == {r}:\n        n += 1\nprint(n)",
        lambda n: (n["b"] - n["r"]) // n["m"] - (n["a"] - 1 - n["r"]) // n["m"],
    ),
    _Kind(
        "Start with {a}. Multiply by {k} and add {r}, {t} times. What is the remainder when the result is divided by {p}?",
        "x = {a}\nfor i in range({t}):\n    x = x * {k} + {r}\nprint(x % {p})",
        lambda n: (n["a"] * n["k"] ** n["t"] + n["r"] * ((n["k"] ** n["t"] - 1) // (n["k"] - 1))) % n["p"],
    ),
    _Kind(
        "Ada saves {a} coins in the first week, and in each week {k} more than in the week before. "
        "How many coins has she saved after {t} weeks?",
        "s = 0\nw = {a}\nfor i in range({t}):\n    s += w\n    w += {k}\nprint(s)",
        lambda n: n["t"] * n["a"] + n["k"] * math.comb(n["t"], 2),
    ),
)


class MathCode(TextWorld):
    """Options: largest: of the numbers that a range ends with, 10 to 200."""

    name: ClassVar[str] = "math_code"
    max_turns: ClassVar[int] = 4
    system: ClassVar[str] = (
        "You solve problems with a number as the answer. You may run Python: write\n"
        "<code>\nx = 2 + 3\nprint(x)\n</code>\n"
        "and read what it prints. When you know the answer, write\n"
        "<answer>5</answer>"
    )

    def __init__(self, largest: int = 40) -> None:
        if not 10 <= largest <= 200:
            raise ValueError(f"largest is {largest}; it is 10 to 200")
        self.largest = largest

    def reset(self, task: Task) -> str:
        for _ in range(_DRAWS):
            kind = self.rng.choice(_KINDS)
            numbers = self._draw()
            question = kind.question.format(**numbers)
            if belongs(question, task.split):
                self.question, self.program = question, kind.program.format(**numbers)
                self.value = kind.solve(numbers)
                self.printed: list[str] = []
                return question
        raise TaskFailed(f"no problem of split '{task.split}' in {_DRAWS} draws")

    def _draw(self) -> dict[str, int]:
        draw = self.rng.randint
        m = draw(3, 9)
        return {
            "a": draw(2, 9),
            "b": draw(10, self.largest),
            "k": draw(2, 9),
            "m": m,
            "r": draw(1, m - 1),
            "t": draw(3, 9),
            "p": draw(11, 97),
        }

    def step(self, text: str) -> Turn:
        said = text[:_READ]
        code, answer = _CODE.search(said), _ANSWER.search(said)
        if code and (not answer or code.start() < answer.start()):
            try:
                output = small_python.run(_program(code[1]))
            except ValueError as error:
                output = f"Error: {error}"
            self.printed.append(output)
            return Turn(f"<interpreter>\n{output}\n</interpreter>")
        if answer:
            number = answer[1].strip().replace(",", "")
            right = _NUMBER.fullmatch(number) is not None and Fraction(number) == self.value
            return Turn("Right." if right else f"Wrong. It is {self.value}.", float(right), True, right)
        raise InvalidAction("Write a program between <code> and </code>, or a number between <answer> and </answer>.")

    def state_key(self) -> str:
        return "\n".join((self.question, *self.printed))

    # -- its scripted player -----------------------------------------------------------------------------------------

    def play(self, rng: random.Random, noise: float) -> str:
        """Runs the right program and answers what it printed. When noisy, it guesses, or gets a number of the program wrong."""
        noisy = rng.random() < noise
        if noisy and rng.random() < 0.3:
            return f"<answer>{rng.randint(1, 10 * self.largest)}</answer>"
        if self.printed and _NUMBER.fullmatch(self.printed[-1]):
            return f"<answer>{self.printed[-1]}</answer>"
        program = self.program
        if noisy:
            place = rng.choice(list(re.finditer(r"\d+", program)))
            program = f"{program[: place.start()]}{rng.randint(1, 99)}{program[place.end() :]}"
        return f"<code>\n{program}\n</code>"

    @classmethod
    def corpus(cls) -> Iterator[str]:
        yield cls.system
        yield from ("<interpreter>\nError: line 1: 'x' is not defined\n</interpreter>", "Right.", "Wrong. It is 5.")
        for index in range(32):
            world, task = cls(), cls.task("train", index)
            world.rng = rng_of(task)
            yield world.reset(task)
            yield world.play(world.rng, noise=0.0)


def _program(code: str) -> str:
    """What stands between the tags, without a fence around it."""
    fenced = _FENCED.fullmatch(code)
    return textwrap.dedent(fenced[1] if fenced else code).strip()
