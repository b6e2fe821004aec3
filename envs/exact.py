"""Exact arithmetic in bounded time and memory: rational numbers that never grow beyond 512 bits.

Raises ValueError of one line for what is too big, and ZeroDivisionError.
"""

from __future__ import annotations

import ast
import operator
from collections.abc import Callable
from fractions import Fraction

_BITS = 512  # of a numerator or denominator
_BINARY: dict[type[ast.operator], Callable[[Fraction, Fraction], Fraction | int]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}


def binary(op: ast.operator, left: Fraction, right: Fraction) -> Fraction | None:
    """`left` op `right` for + - * / // % **; None for an operator that is no arithmetic."""
    if isinstance(op, ast.Pow):
        return bounded(_power(left, right))
    return bounded(Fraction(_BINARY[type(op)](left, right))) if type(op) in _BINARY else None


def number(constant: int | float) -> Fraction:
    """A number as it was written: 0.1 is one tenth."""
    return bounded(Fraction(repr(constant)))


def bounded(value: Fraction) -> Fraction:
    """`value`, unless it is too big."""
    if max(value.numerator.bit_length(), value.denominator.bit_length()) > _BITS:
        raise ValueError("the result is too big")
    return value


def show(value: Fraction) -> str:
    """As people write it: whole if it is, else to six significant digits."""
    return str(value.numerator) if value.denominator == 1 else f"{float(value):.6g}"


def _power(base: Fraction, exponent: Fraction) -> Fraction:
    if exponent.denominator != 1 or abs(exponent) > _BITS:
        raise ValueError(f"a power is a whole number from -{_BITS} to {_BITS}")
    return Fraction(base ** int(exponent))
