"""A bounded subset of Python: what it knows means what it means in Python, what it does not is told in one line."""

import contextlib
import io

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from troupe.envs.small_python import run


@pytest.mark.parametrize(
    "program",
    [
        "print(2 + 3 * 4 - 7 // 2 % 3, -7 // 2, -7 % 3, 2 ** 10, +5, -(-5))",
        "x = 3\nx *= x\nx -= 1\nx //= 3\nprint(x)",
        "for i in range(3):\n    for j in range(i, 3):\n        print(i, j)\nprint(i)",
        "for i in range(9, 0, -4):\n    print(i)",
        "for i in range(0):\n    print(i)",
        "x = 10\nwhile x > 3 and not x == 5:\n    x -= 1\nprint(x)",
        "x = 2\nif x < 2:\n    print('less')\nelif x == 2:\n    print('same', x)\nelse:\n    pass",
        "print(1 < 2 < 3, 1 < 3 < 2, True, 1 == 1.0, 0.5 != 0.25)",
        "print(0 or 3, 0 and 3, 2 or 3, 2 and 3, not 0)",
        "print(abs(-3), min(3, 1, 2), max(3, 1, 2))",
        "x = 1\ny = x\nprint(x + y)",
        "print()",
        "x = 1",
    ],
)
def test_it_computes_what_python_computes(program):
    expected = io.StringIO()
    with contextlib.redirect_stdout(expected):
        exec(program, {})
    assert run(program) == expected.getvalue().removesuffix("\n")


def test_numbers_are_exact_rationals():
    assert run("print(1/3 + 1/3 + 1/3, 0.1 + 0.2 == 0.3, 1/3)") == "1 True 0.333333"


@pytest.mark.parametrize(
    ("program", "error"),
    [
        ("import os", "line 1: 'import os' is not in this Python"),
        ("x = 1\nx.real", "line 2: 'x.real' is not in this Python"),
        ("x = __import__('os')", "line 1: .* is not in this Python"),
        ("print(print)", "line 1: 'print' is not defined"),
        ("x = [1]", "is not in this Python"),
        ("x = 'a'", "is not in this Python"),
        ("print(*range(3))", "is not in this Python"),
        ("print(1, end='')", "is not in this Python"),
        ("x, y = 1, 2", "is not in this Python"),
        ("print(1 if 1 else 2)", "is not in this Python"),
        ("print(2 | 1)", "is not in this Python"),
        ("print(1 in 2)", "is not in this Python"),
        ("def f():\n    pass", "is not in this Python"),
        ("for i in x:\n    pass", "is not in this Python"),
        ("print(y)", "line 1: 'y' is not defined"),
        ("y += 1", "line 1: 'y' is not defined"),
        ("x = 1\n\nprint(x / 0)", "line 3: division by zero"),
        ("x = 1 +", "line 1: this is not Python"),
        ("\x00", "this is not Python"),
        ("(" * 900, "this is not Python"),
        ("x = " + "1 + " * 400 + "1", "nested too deeply"),
        ("x = " + "-" * 900 + "1", "nested too deeply"),
        ("if 1:\n" + "".join(" " * i + "if 1:\n" for i in range(1, 50)) + " " * 50 + "x = 1", "nested too deeply"),
        ("range(3)", "is not in this Python"),
        ("for i in range(0.5):\n    pass", "whole numbers"),
        ("for i in range(1, 2, 0):\n    pass", "must not be zero"),
        ("abs(1)", "is not in this Python"),
        ("print(abs(1, 2))", "abs takes one number"),
        ("print(min(1))", "min takes two numbers or more"),
        ("while 1:\n    pass", "more than 3000 steps"),
        ("for i in range(1600):\n    x = i", "more than 3000 steps"),
        ("for i in range(10**100):\n    pass", "more than 3000 steps"),
        ("x = 2\nfor i in range(60):\n    x = x * x", "line 3: the result is too big"),
        ("x = 9 ** 9 ** 9", "a power is a whole number"),
        ("x = 2 ** 0.5", "a power is a whole number"),
        ("print(1e999)", "line 1: "),
        ("for i in range(2000):\n    print(i)", "too much is printed"),
        ("x" * 3000, "at most 2000 characters"),
    ],
)
def test_what_it_does_not_know_or_will_not_do_is_told_in_one_line(program, error):
    with pytest.raises(ValueError, match=error) as told:
        run(program)
    assert "\n" not in str(told.value) and len(str(told.value)) < 120


@settings(max_examples=200, deadline=None)
@given(st.text(alphabet="x=+-*/%()<>1 9.\n:'[]{}ifprantgeowhl", max_size=120))
def test_whatever_is_written_it_prints_or_tells(program):
    with contextlib.suppress(ValueError):
        assert len(run(program)) <= 1000
