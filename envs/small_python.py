"""A bounded subset of Python: enough to compute, nothing to do harm with. It is an interpreter of its own, not a sandbox.

Assignments to names (also +=), `for` over `range`, `while`, `if`, arithmetic, comparisons, and/or/not, `abs`, `min`, `max` and
`print`. There are no imports, functions, attributes, lists or strings (but for text to print). Numbers are exact rationals
(`exact`): 1/3 + 1/3 + 1/3 is 1.

Promises: `run` ends after at most 3,000 steps and writes at most 1,000 characters; anything that it does not know, or that
grows too big, is a ValueError of one line that names the line of the program.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable, Iterator
from fractions import Fraction
from typing import Any

from troupe.envs.exact import binary, number, show

_LENGTH = 2_000  # characters of a program
_STEPS = 3_000
_OUTPUT = 1_000
_DEPTH = 40  # of blocks and expressions in each other
_SHOWN = 40  # characters of the program that an error repeats

Value = Fraction | bool

_COMPARE: dict[type[ast.cmpop], Callable[[Any, Any], bool]] = {
    ast.Eq: operator.eq,
    ast.NotEq: operator.ne,
    ast.Lt: operator.lt,
    ast.LtE: operator.le,
    ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}
_FUNCTIONS: dict[str, Callable[..., Fraction]] = {"abs": abs, "min": min, "max": max}


def run(program: str) -> str:
    """What the program prints, without the last newline. Raises ValueError."""
    if len(program) > _LENGTH:
        raise ValueError(f"a program has at most {_LENGTH} characters")
    try:
        body = ast.parse(program).body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        line = getattr(error, "lineno", None) or 1
        raise ValueError(f"line {line}: this is not Python") from None
    machine = _Machine()
    try:
        machine.block(body, 0)
    except ZeroDivisionError:
        raise ValueError(f"line {machine.line}: division by zero") from None
    except ValueError as error:
        raise ValueError(f"line {machine.line}: {error}") from None
    return "\n".join(machine.output)


class _Machine:
    def __init__(self) -> None:
        self.names: dict[str, Value] = {}
        self.output: list[str] = []
        self.line = 1
        self.steps = 0

    def block(self, body: list[ast.stmt], depth: int) -> None:
        for statement in body:
            self.line = statement.lineno
            self._step(depth)
            self._statement(statement, depth + 1)

    def _statement(self, statement: ast.stmt, depth: int) -> None:
        match statement:
            case ast.Assign(targets=[ast.Name(id=name)], value=value):
                self.names[name] = self._value(value, depth)
            case ast.AugAssign(target=ast.Name(id=name) as target, op=op, value=value):
                combined = ast.BinOp(ast.Name(target.id), op, value)
                self.names[name] = self._value(combined, depth)
            case ast.If(test=test, body=body, orelse=orelse):
                self.block(body if self._value(test, depth) else orelse, depth)
            case ast.While(test=test, body=body, orelse=[]):
                while self._value(test, depth):
                    self.block(body, depth)
            case ast.For(target=ast.Name(id=name), iter=ast.Call(func=ast.Name(id="range"), args=args, keywords=[]), orelse=[]):
                for i in self._range([self._value(arg, depth) for arg in args]):
                    self.names[name] = Fraction(i)
                    self.block(statement.body, depth)
            case ast.Expr(value=ast.Call(func=ast.Name(id="print"), args=args, keywords=[])):
                self._print(" ".join(self._text(arg, depth) for arg in args))
            case ast.Pass():
                pass
            case _:
                raise ValueError(f"'{_shown(statement)}' is not in this Python")

    def _range(self, bounds: list[Value]) -> Iterator[int]:
        if not 1 <= len(bounds) <= 3 or any(Fraction(bound).denominator != 1 for bound in bounds):
            raise ValueError("range takes one to three whole numbers")
        return iter(range(*map(int, bounds)))

    def _text(self, node: ast.expr, depth: int) -> str:
        if isinstance(node, ast.Constant) and isinstance(node.value, str):
            return node.value
        value = self._value(node, depth)
        return str(value) if isinstance(value, bool) else show(value)

    def _print(self, text: str) -> None:
        self.output.append(text)
        if sum(map(len, self.output)) + len(self.output) > _OUTPUT:
            raise ValueError("too much is printed")

    def _value(self, node: ast.expr, depth: int) -> Value:
        self._step(depth)
        below = depth + 1
        match node:
            case ast.Constant(value=bool() as truth):
                return truth
            case ast.Constant(value=int() | float() as constant):
                return number(constant)
            case ast.Name(id=name):
                if name not in self.names:
                    raise ValueError(f"'{name[:_SHOWN]}' is not defined")
                return self.names[name]
            case ast.UnaryOp(op=ast.Not(), operand=operand):
                return not self._value(operand, below)
            case ast.UnaryOp(op=ast.USub() | ast.UAdd() as op, operand=operand):
                signed = Fraction(self._value(operand, below))
                return -signed if isinstance(op, ast.USub) else signed
            case ast.BinOp(left=left, op=op, right=right):
                made = binary(op, Fraction(self._value(left, below)), Fraction(self._value(right, below)))
                if made is not None:
                    return made
            case ast.BoolOp(op=op, values=values):
                result = self._value(values[0], below)
                for other in values[1:]:
                    if bool(result) == isinstance(op, ast.Or):
                        break
                    result = self._value(other, below)
                return result
            case ast.Compare(left=left, ops=ops, comparators=comparators) if all(type(op) in _COMPARE for op in ops):
                compared = [self._value(each, below) for each in (left, *comparators)]
                pairs = zip(ops, compared, compared[1:], strict=False)
                return all(_COMPARE[type(op)](one, other) for op, one, other in pairs)
            case ast.Call(func=ast.Name(id=name), args=args, keywords=[]) if name in _FUNCTIONS:
                if len(args) != 1 if name == "abs" else len(args) < 2:
                    raise ValueError(f"{name} takes {'one number' if name == 'abs' else 'two numbers or more'}")
                return Fraction(_FUNCTIONS[name](*(Fraction(self._value(arg, below)) for arg in args)))
        raise ValueError(f"'{_shown(node)}' is not in this Python")

    def _step(self, depth: int) -> None:
        self.steps += 1
        if self.steps > _STEPS:
            raise ValueError(f"it takes more than {_STEPS} steps")
        if depth > _DEPTH:
            raise ValueError("it is nested too deeply")


def _shown(node: ast.AST) -> str:
    """The beginning of a piece of the program, on one line. A deep one is not written out."""
    try:
        line = " ".join(ast.unparse(node).split())
    except RecursionError:
        line = "this"
    return line if len(line) <= _SHOWN else line[:_SHOWN] + "…"
