"""Arithmetic with a calculator at hand: the agent should call the tool rather than trust its head.

It writes `calc: 12*37` on a line to use the tool, and `answer: 444` to answer; the first such line of a message counts.

Promises: one expression in five, by its digest, is held out; the tool computes exactly, whatever it is given, in
bounded time and memory, and evaluates nothing but arithmetic.
"""

from __future__ import annotations

import ast
import random
import re
from collections.abc import Iterator
from fractions import Fraction
from typing import ClassVar

from troupe.envs.base import InvalidAction, Task, TextWorld, Turn, belongs
from troupe.envs.exact import binary, number, show
from troupe.protocol.errors import TaskFailed

_DRAWS = 1_000
_READ = 4_000  # characters of a message that are looked at
_LENGTH = 200  # characters of an expression
_ARITHMETIC = re.compile(r"[0-9+\-*/%(). ]+")
_ANSWER = re.compile(r"([-+]?[0-9]{1,60})(\.0*)?")


class Calculator(TextWorld):
    """Options: operands: numbers in the expression, 2 to 8. largest: of a number, 2 to 1000000."""

    name: ClassVar[str] = "calculator"
    max_turns: ClassVar[int] = 4
    inline: ClassVar[bool] = True
    system: ClassVar[str] = (
        "You answer arithmetic questions with a calculator. To use it, write one line like\n"
        "calc: 2+3\n"
        "and you will get the result. When you know the answer, write one line like\n"
        "answer: 5"
    )

    def __init__(self, operands: int = 2, largest: int = 99) -> None:
        if not 2 <= operands <= 8:
            raise ValueError(f"operands is {operands}; it is 2 to 8")
        if not 5 <= largest <= 1_000_000:
            raise ValueError(f"largest is {largest}; it is 5 to 1000000")
        self.operands, self.largest = operands, largest

    def reset(self, task: Task) -> str:
        self.expression = self._draw(task.split)
        self.value = evaluate(self.expression)
        self.seen = ""  # the tool's last result
        return f"What is {self.expression}?"

    def _draw(self, split: str) -> str:
        for _ in range(_DRAWS):
            first, *others = (str(self.rng.randint(2, self.largest)) for _ in range(self.operands))
            expression = first + "".join(self.rng.choice("+-*") + term for term in others)
            if belongs(expression, split):
                return expression
        raise TaskFailed(f"no expression of split '{split}' in {_DRAWS} draws: allow a larger number")

    def step(self, text: str) -> Turn:
        for line in text[:_READ].splitlines():
            head, colon, rest = line.partition(":")
            word, rest = head.strip().lower(), rest.strip()
            if colon and word == "calc":
                try:
                    self.seen = show(evaluate(rest))
                except ValueError as error:
                    raise InvalidAction(f"calc: {error}") from error
                return Turn(f"{rest} = {self.seen}")
            if colon and word == "answer":
                found = _ANSWER.fullmatch(rest.replace(",", ""))
                if found is None:
                    raise InvalidAction("Write the answer as a number, like\nanswer: 5")
                right = int(found[1]) == self.value
                verdict = "Right." if right else f"Wrong. {self.expression} = {show(self.value)}"
                return Turn(verdict, reward=float(right), done=True, success=right)
        raise InvalidAction("Write one line like\ncalc: 2+3\nor like\nanswer: 5")

    def state_key(self) -> str:
        return f"{self.expression} | {self.seen}"

    def play(self, rng: random.Random, noise: float) -> str:
        if rng.random() < noise:
            return f"answer: {rng.randint(2, self.largest)}"
        return f"answer: {self.seen}" if self.seen else f"calc: {self.expression}"

    @classmethod
    def corpus(cls) -> Iterator[str]:
        yield cls.system
        yield from ("What is 12*37?", "calc: 12*37", "12*37 = 444", "answer: 444", "answer: -5", "Right.")
        yield "Wrong. 2-7 = -5"


def evaluate(expression: str) -> Fraction:
    """The exact value. Numbers, + - * / // % ** and parentheses; anything else, or too big a result: ValueError."""
    if len(expression) > _LENGTH:
        raise ValueError(f"an expression has at most {_LENGTH} characters")
    if not _ARITHMETIC.fullmatch(expression):
        raise ValueError("an expression has numbers, + - * / // % ** and parentheses only")
    try:
        return _value(ast.parse(expression.strip(), mode="eval").body)
    except ZeroDivisionError:
        raise ValueError("division by zero") from None
    except (SyntaxError, MemoryError, RecursionError):  # the parser's own limits count as syntax
        raise ValueError(f"'{expression}' is not an expression") from None


def _value(node: ast.expr) -> Fraction:
    match node:
        case ast.Constant(value=int() | float() as constant):
            return number(constant)
        case ast.UnaryOp(op=ast.USub(), operand=operand):
            return -_value(operand)
        case ast.UnaryOp(op=ast.UAdd(), operand=operand):
            return _value(operand)
        case ast.BinOp(left=left, op=op, right=right) if (value := binary(op, _value(left), _value(right))) is not None:
            return value
    raise ValueError(f"'{ast.unparse(node)}' is not arithmetic")
