"""The process in which `symbolic` compares: a line of JSON with `expected` and `answer` in, its verdict out.

A verdict is true or false, null if nothing mathematical is in `expected`, or a text that says what went wrong. Run as a script,
so that it imports nothing of Troupe's. It ends with its standard input.

math-verify finds the mathematics in a text, and compares. It is given what it would not find, or would find a piece of only,
between $ and $: what stands in the last box, LaTeX without marks, tuples and equations.
"""

import json
import logging
import re
import resource
import sys
from itertools import pairwise
from typing import Any

_MEMORY = 2 << 30  # bytes of address space
_ROUNDED = 0.01  # two sides of an equation may differ by so much of the larger one

_MARKED = re.compile(r"(\$\$.{1,2000}?\$\$|\$[^$\n]{1,2000}\$|\\\[.{1,500}?\\\]|\\\(.{1,500}?\\\))", re.DOTALL)
_LETTER = r"(?<![A-Za-z\\])[A-Za-z](?![A-Za-z])"
_ONE = rf"[^()\[\]A-Za-z\\$]|\\[A-Za-z]++|{_LETTER}"
_INSIDE = rf"(?:{_ONE}|\((?:{_ONE}){{0,200}}+\)){{0,200}}+"
_BRACES = r"\{(?:[^{}$]|\{(?:[^{}$]|\{[^{}$]{0,200}+\}){0,200}+\}){0,200}+\}"
_ATOM = rf"(?:\d++(?:\.\d++)?+|\.\d++|\\[A-Za-z]++|{_BRACES}|\\\{{{_INSIDE}\\\}}|\({_INSIDE}\)|\[{_INSIDE}\]|{_LETTER}|[!%'])"
_BETWEEN = r"\s*(?:[-+*/^_=<>×·÷]|\\(?:cdot|times|div|pm|cup|cap|leq?|geq?|neq?)(?![A-Za-z])|\\text\{[^{}$]{0,200}\})\s*"
_RUN = re.compile(rf"[-+]?{_ATOM}++(?:(?:{_BETWEEN})++{_ATOM}++)*+")
_A_WHOLE = re.compile(r"\\|=|^\{|[(\[][^()\[\]]*,")  # in a run: math-verify would miss it, or take a piece of it
_BRACE = re.compile(r"\\boxed\s{0,9}\{|(?<!\\)[{}]")
_EQUALS = re.compile(r"(?<![<>!\\])=")


def compare(expected: str, answer: str) -> bool | str | None:
    from math_verify import verify

    try:
        right = _read(expected)
        if not right:
            return None
        said = _read(answer)
        return bool(verify(right, said, timeout_seconds=None)) and (_is_equation(right) or not _is_false(said))
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:500]


def _read(text: str) -> list[Any]:
    """What math-verify makes of a text: the expression, and how it was written."""
    from math_verify import parse

    return list(parse(marked(text), parsing_timeout=None))


def marked(text: str) -> str:
    """The text, with marks around what is mathematics as a whole; only the last box, if it has one."""
    if (box := _last_box(text)) is not None:
        return f"\\boxed{{{box.strip()}}}"
    bare = text.strip().rstrip(".")
    if _RUN.fullmatch(bare) and (re.search("[A-Za-z!]", bare) or _A_WHOLE.search(bare)):
        return f"${bare}$"
    pieces = _MARKED.split(text)
    pieces[::2] = [_RUN.sub(lambda run: f" ${run[0]}$ " if _A_WHOLE.search(run[0]) else run[0], one) for one in pieces[::2]]
    return "".join(pieces)


def _last_box(text: str) -> str | None:
    """What stands in the last \\boxed{…} that is closed."""
    opened: list[tuple[bool, int]] = []  # braces: whether it is a box's, and where its content begins
    last = (-1, -1)
    for brace in _BRACE.finditer(text):
        if brace[0] != "}":
            opened.append((brace[0] != "{", brace.end()))
        elif opened and (found := opened.pop())[0]:
            last = max(last, (found[1], brace.start()))
    return text[slice(*last)] if last[0] >= 0 else None


def _is_equation(read: list[Any]) -> bool:
    return isinstance(read[-1], str) and _EQUALS.search(read[-1]) is not None


def _is_false(read: list[Any]) -> bool:
    """Whether it is an equation of numbers that are not equal. What has names in it is not judged."""
    if not _is_equation(read) or "," in read[-1]:
        return False
    sides = [_read(f"${side}$") for side in _EQUALS.split(read[-1])]
    numbers = [complex(side[0]) for side in sides if side and getattr(side[0], "is_number", False)]
    return any(abs(one - other) > _ROUNDED * max(abs(one), abs(other)) for one, other in pairwise(numbers))


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    logging.disable()
    out, sys.stdout = sys.stdout, sys.stderr  # nothing else may write between the verdicts
    import math_verify  # noqa: F401

    print("ready", file=out, flush=True)
    for line in sys.stdin:
        print(json.dumps(compare(**json.loads(line))), file=out, flush=True)


if __name__ == "__main__":
    main()
