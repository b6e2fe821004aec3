"""Datasets of reasoning-gym as worlds of one answer: `reasoning_gym:NAME` for any NAME of its registry.

The agent reads a question and answers between <answer> and </answer>; what that is worth says the dataset's own `score_answer`.

Promises:
- a task is an entry of the dataset: training takes even indices, held-out tasks odd ones, and a question is of one split only
  (`belongs`), so that an entry which the generator makes twice is not in both;
- an answer without the marks, or one that the dataset cannot read, is invalid; a dataset that fails otherwise has broken;
- some datasets score by evaluating the answer as Python. They get it only if it is plain data or bounded arithmetic: nothing
  that an agent writes is run.
"""

from __future__ import annotations

import ast
import random
import re
import threading
from collections.abc import Iterator
from dataclasses import fields
from functools import lru_cache
from typing import Any, ClassVar

from troupe.envs.base import InvalidAction, Task, TextWorld, Turn, belongs, rng_of
from troupe.protocol.errors import ConfigError, EnvironmentFailed, TaskFailed, nearest

_DRAWS = 1_000
_READ = 20_000  # characters of a message that are looked at
_MARKED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_OURS = ("seed", "size")

DATA = frozenset({"binary_matrix", "n_queens", "spiral_matrix", "string_insertion"})
"""Datasets that give the answer to Python's `eval`, which takes it for a list."""
ARITHMETIC = frozenset({"countdown", "intermediate_integration", "polynomial_multiplication", "puzzle24", "simple_integration"})
"""Datasets that give the answer to SymPy's `parse_expr`, which evaluates it too."""
CODE = frozenset({"codeio"})
"""Datasets that run code of their own data files, which a language model wrote."""

_generating = threading.Lock()
"""One entry at a time: some datasets draw from numpy's global chance."""


def world(name: str) -> type[TextWorld]:
    """The world of the dataset `name`. Raises ConfigError: not installed, or no such dataset."""
    try:
        from reasoning_gym.factory import DATASETS
    except ImportError as error:
        raise ConfigError(
            f"'reasoning_gym:{name}' needs reasoning-gym ({error}): pip install 'troupe-rl[reasoning-gym]'"
        ) from error
    if name not in DATASETS:
        raise ConfigError(f"reasoning-gym has no dataset '{name}'.{nearest(name, DATASETS)} It has {len(DATASETS)}")
    attributes = {"name": f"reasoning_gym:{name}", "dataset": name, "__doc__": f"The dataset {name} of reasoning-gym."}
    return type("ReasoningGym", (ReasoningGym,), attributes)


class ReasoningGym(TextWorld):
    """Options: size: entries of the dataset. seed: of the dataset. trusted: may run code of its data (codeio only).

    All others are the dataset's own, as `reasoning_gym.create_dataset` takes them.
    """

    dataset: ClassVar[str] = ""
    max_turns: ClassVar[int] = 3
    system: ClassVar[str] = (
        "You answer questions. Think first if you like, then write the answer, and nothing else, "
        "between <answer> and </answer>. If the question shows an example, the answer has its format."
    )

    def __init__(self, size: int = 10_000, seed: int = 0, trusted: bool = False, **options: Any) -> None:
        if not 2 <= size <= 10_000_000:
            raise ValueError(f"size is {size}; it is 2 to 10000000")
        if self.dataset in CODE and not trusted:
            raise ValueError("this dataset runs code that a language model wrote; trusted = true says that it may")
        self._size = size
        self._data = _made(self.dataset, seed, size, tuple(sorted((key, _frozen(value)) for key, value in options.items())))
        self._entry: dict[str, Any] = {}

    def reset(self, task: Task) -> str:
        for _ in range(_DRAWS):
            entry = self._drawn(self.rng, task.split)
            if belongs(entry["question"], task.split) and self._readable(entry["answer"]):
                self._entry = entry
                return str(entry["question"])
        raise TaskFailed(f"no question of split '{task.split}' in {_DRAWS} draws: the dataset is too small for its options")

    def step(self, text: str) -> Turn:
        marked = _MARKED.findall(text[-_READ:])
        if not marked:
            raise InvalidAction("write the answer between <answer> and </answer>")
        answer = marked[-1].strip()
        if not self._readable(answer):
            raise InvalidAction("the answer cannot be read: it has to be plain numbers, lists or arithmetic")
        score = self._score(answer)
        return Turn(f"score {score:g}", score, done=True, success=score >= 1.0)

    def state_key(self) -> str:
        return str(self._entry.get("question", ""))

    def play(self, rng: random.Random, noise: float) -> str | None:
        """Gives the entry's own answer; at random, that of another. None where the dataset knows no answer."""
        entry = self._drawn(rng, "train") if rng.random() < noise else self._entry
        return None if entry["answer"] is None else f"<answer>{entry['answer']}</answer>"

    @classmethod
    def corpus(cls) -> Iterator[str]:
        yield cls.system
        yield "score 0.01 <answer></answer> write the answer between <answer> and </answer>"
        for index in range(256):
            made, task = cls(), cls.task("train", index)
            made.rng = rng_of(task)
            yield made.reset(task)
            yield made.play(made.rng, noise=0.0) or ""

    def _drawn(self, rng: random.Random, split: str) -> dict[str, Any]:
        index = 2 * rng.randrange(self._size // 2) + (split != "train")
        with _generating:
            found: dict[str, Any] = self._data[index]
        return found

    def _readable(self, answer: str | None) -> bool:
        if answer is None:
            return True
        return (self.dataset not in DATA or _is_data(answer)) and (self.dataset not in ARITHMETIC or _is_arithmetic(answer))

    def _score(self, answer: str) -> float:
        try:
            return float(self._data.score_answer(answer, self._entry))
        except Exception as error:  # whose fault is it? The dataset's, if it cannot score its own answer either
            try:
                self._data.score_answer(self._entry["answer"], self._entry)
            except Exception as again:
                raise EnvironmentFailed(f"{self.name} cannot score its own answer: {again!r}") from error
            raise InvalidAction("the answer cannot be read") from error


@lru_cache(maxsize=16)
def _made(name: str, seed: int, size: int, options: tuple[tuple[str, Any], ...]) -> Any:
    """The dataset, once a process. Raises ValueError for options that it does not take."""
    from reasoning_gym.factory import DATASETS, create_dataset

    known = [each.name for each in fields(DATASETS[name][1]) if each.name not in _OURS]
    for key, _ in options:
        if key not in known:
            raise ValueError(f"no option '{key}'.{nearest(key, known)} Known: {', '.join((*_OURS, *known))}")
    try:
        with _generating:
            return create_dataset(name, seed=seed, size=size, **{key: _thawed(value) for key, value in options})
    except AssertionError as error:
        raise ValueError(f"{error}" or "its options do not fit together") from error


def _frozen(value: Any) -> Any:
    """Hashable."""
    if isinstance(value, dict):
        return ("dict", tuple(sorted((key, _frozen(each)) for key, each in value.items())))
    return ("list", tuple(_frozen(each) for each in value)) if isinstance(value, list | tuple) else ("", value)


def _thawed(value: Any) -> Any:
    kind, held = value
    if kind == "dict":
        return {key: _thawed(each) for key, each in held}
    return [_thawed(each) for each in held] if kind == "list" else held


# -- what may be evaluated -------------------------------------------------------------------------------------------

_NAME = re.compile(r"[A-Za-z][A-Za-z0-9]{0,9}")
_FUNCTIONS = frozenset({"sin", "cos", "tan", "exp", "log", "ln", "sqrt", "asin", "acos", "atan", "sinh", "cosh", "tanh", "Abs"})
_OPERATORS = (ast.Add, ast.Sub, ast.Mult, ast.Div)
_SIGNS = (ast.UAdd, ast.USub)
_LONGEST = 1_000  # characters of arithmetic
_LARGEST = 32  # of an exponent


def _is_data(text: str) -> bool:
    """Whether `eval` would do nothing with it but make numbers, texts and lists (or refuse to read it)."""
    try:
        tree = ast.parse(text.strip(), mode="eval")
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return True
    allowed = (ast.Expression, ast.Constant, ast.Name, ast.Load, ast.List, ast.Tuple, ast.UnaryOp, *_SIGNS)
    return all(isinstance(node, allowed) for node in ast.walk(tree))


def _is_arithmetic(text: str) -> bool:
    """Whether it is an expression of numbers, names and elementary functions that is quickly computed."""
    if len(text) > _LONGEST or not text.isascii():
        return False
    try:
        return _bounded(ast.parse(text.strip(), mode="eval").body, powers=True)
    except (SyntaxError, ValueError, MemoryError, RecursionError):
        return False


def _bounded(node: ast.expr, powers: bool) -> bool:
    match node:
        case ast.Constant(value=bool()):
            return False
        case ast.Constant(value=int() | float()):
            return True
        case ast.Name(id=name):
            return _NAME.fullmatch(name) is not None
        case ast.UnaryOp(op=op, operand=operand):
            return isinstance(op, _SIGNS) and _bounded(operand, powers)
        case ast.BinOp(left=left, op=ast.Pow(), right=right):
            exponent = right.operand if isinstance(right, ast.UnaryOp) and isinstance(right.op, _SIGNS) else right
            small = (
                isinstance(exponent, ast.Constant) and isinstance(exponent.value, int | float) and exponent.value <= _LARGEST
            )
            return powers and (small or _is_ratio(exponent)) and _bounded(left, powers=False)
        case ast.BinOp(left=left, op=op, right=right):
            return isinstance(op, _OPERATORS) and _bounded(left, powers) and _bounded(right, powers)
        case ast.Call(func=ast.Name(id=name), args=[argument], keywords=[]):
            return name in _FUNCTIONS and _bounded(argument, powers)
    return False


def _is_ratio(node: ast.expr) -> bool:
    """1/2, as in x**(1/2)."""
    match node:
        case ast.BinOp(left=ast.Constant(value=int(a)), op=ast.Div(), right=ast.Constant(value=int(b))):
            return a <= _LARGEST and b <= _LARGEST
    return False
