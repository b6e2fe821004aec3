"""Problems that are tedious by hand and easy for a program, with such a program and the answer. Shared by worlds.

Promises: one problem in five, by the digest of its text, is held out; the answer is computed otherwise than by the program.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Callable
from typing import NamedTuple

from troupe.envs.base import belongs
from troupe.protocol.errors import TaskFailed

_DRAWS = 1_000


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


class Problem(NamedTuple):
    """question: text. program: Python that prints the answer. value: the answer."""

    question: str
    program: str
    value: int


def draw(rng: random.Random, split: str, largest: int) -> Problem:
    """A problem of `split`. largest: number that a range ends with, at least 10. Raises TaskFailed for another split."""
    for _ in range(_DRAWS):
        kind = rng.choice(_KINDS)
        numbers = _numbers(rng, largest)
        question = kind.question.format(**numbers)
        if belongs(question, split):
            return Problem(question, kind.program.format(**numbers), kind.solve(numbers))
    raise TaskFailed(f"no problem of split '{split}' in {_DRAWS} draws")


def misread(rng: random.Random, program: str) -> str:
    """`program` with one of its numbers wrong, perhaps."""
    place = rng.choice(list(re.finditer(r"\d+", program)))
    return f"{program[: place.start()]}{rng.randint(1, 99)}{program[place.end() :]}"


def _numbers(rng: random.Random, largest: int) -> dict[str, int]:
    m = rng.randint(3, 9)
    return {
        "a": rng.randint(2, 9),
        "b": rng.randint(10, largest),
        "k": rng.randint(2, 9),
        "m": m,
        "r": rng.randint(1, m - 1),
        "t": rng.randint(3, 9),
        "p": rng.randint(11, 97),
    }
