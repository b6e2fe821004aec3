"""Small generated tasks for environments of skyrl-gym, as the rows that its own data preparation makes."""

from __future__ import annotations

import json
import random
from collections.abc import Callable
from typing import Any

_PEOPLE = ("Ada", "Ben", "Cleo", "Dan", "Eve", "Finn", "Gus", "Ida")
_THINGS = ("apples", "books", "coins", "eggs", "nails", "pears", "shells", "stamps")
_SUMS: tuple[tuple[str, Callable[[int, int, int], int]], ...] = (
    ("{who} has {a} {things} and buys {b} more each day for {c} days. How many {things} then?", lambda a, b, c: a + b * c),
    ("{who} packs {c} boxes with {a} {things} each and gives {b} away. How many {things} are left?", lambda a, b, c: a * c - b),
    ("{who} finds {a} {things}, then {b}, and then {c} times as many as both times together. How many {things} in all?",
     lambda a, b, c: (a + b) * (c + 1)),
)  # fmt: skip
_FORMS: tuple[tuple[str, str, Callable[[int, int, int], int]], ...] = (
    ("their sum plus {k}", "a + b + {k}", lambda a, b, k: a + b + k),
    ("their product plus {k}", "a * b + {k}", lambda a, b, k: a * b + k),
    ("{k} times the larger one", "{k} * max(a, b)", lambda a, b, k: k * max(a, b)),
    ("{k} times their difference, which is not negative", "{k} * abs(a - b)", lambda a, b, k: k * abs(a - b)),
)


def arithmetic(rng: random.Random) -> dict[str, Any]:
    """A word problem, as gsm8k and gsm8k_multi_turn want it."""
    text, solve = rng.choice(_SUMS)
    a, b, c = rng.randint(5, 20), rng.randint(2, 5), rng.randint(2, 6)
    question = text.format(who=rng.choice(_PEOPLE), things=rng.choice(_THINGS), a=a, b=b, c=c)
    asked = f'{question} Let\'s think step by step and output the final answer after "####".'
    return {
        "prompt": [{"role": "user", "content": asked}],
        "reward_spec": {"method": "rule", "ground_truth": str(solve(a, b, c))},
        "extra_info": {"max_turns": 3},
    }


def program(rng: random.Random) -> dict[str, Any]:
    """A program of two numbers, with three tests of its output, as lcb wants it; `solution` is one that passes."""
    text, form, solve = rng.choice(_FORMS)
    k = rng.randint(2, 99)
    pairs = [(rng.randint(0, 99), rng.randint(0, 99)) for _ in range(3)]
    tests = [{"input": f"{a} {b}\n", "output": f"{solve(a, b, k)}\n", "testtype": "stdin"} for a, b in pairs]
    question = f"Write a Python program. It reads two whole numbers from one line and prints {text.format(k=k)}."
    return {
        "prompt": [{"role": "user", "content": f"{question} Put it between ```python and ```."}],
        "reward_spec": {"method": "rule", "ground_truth": json.dumps(tests)},
        "solution": f"a, b = map(int, input().split())\nprint({form.format(k=k)})",
    }


GENERATED: dict[str, Callable[[random.Random], dict[str, Any]]] = {
    "gsm8k": arithmetic,
    "gsm8k_multi_turn": arithmetic,
    "lcb": program,
}
"""By environment. A search needs documents, so there are none for it."""
