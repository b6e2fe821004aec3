"""Small Python modules with one wrong line, what comes of it, and how the line should read. Shared by worlds.

Promises: one module in five, by the digest of its wrong text or of its issue, is held out; what an issue says of its module is
true.
"""

from __future__ import annotations

import random
from typing import Literal, NamedTuple

from troupe.envs.base import belongs
from troupe.protocol.errors import TaskFailed

_DRAWS = 1_000
_PATHS = ("shop/prices.py", "lib/numbers.py", "app/lists.py", "core/stats.py")


class _Bug(NamedTuple):
    """line: which one is wrong. wrong: how it reads then. call, seen, right: an example of what comes of it."""

    line: int
    wrong: str
    call: str
    seen: str
    right: str


class _Function(NamedTuple):
    """names: what it may be called. lines: with {f}, its name, {a}, its argument, {x}, a variable. bugs: of its lines.

    cases: arguments that tell it from all its bugs."""

    names: tuple[str, ...]
    lines: tuple[str, ...]
    bugs: tuple[_Bug, ...]
    cases: tuple[str, ...]


_FUNCTIONS = (
    _Function(
        ("total", "add_up", "sum_of"),
        ("def {f}({a}):", "    {x} = 0", "    for item in {a}:", "        {x} += item", "    return {x}"),
        (
            _Bug(1, "    {x} = 1", "{f}([2, 3])", "6", "5"),
            _Bug(3, "        {x} -= item", "{f}([2, 3])", "-5", "5"),
            _Bug(3, "        {x} = item", "{f}([2, 3])", "3", "5"),
            _Bug(4, "        return {x}", "{f}([2, 3])", "2", "5"),
        ),
        ("[2, 3]", "[]", "[-1, 1, 5]", "[7]"),
    ),
    _Function(
        ("largest", "biggest", "top"),
        (
            "def {f}({a}):",
            "    {x} = {a}[0]",
            "    for item in {a}:",
            "        if item > {x}:",
            "            {x} = item",
            "    return {x}",
        ),
        (
            _Bug(3, "        if item < {x}:", "{f}([4, 9, 1])", "1", "9"),
            _Bug(1, "    {x} = 0", "{f}([-3, -2])", "0", "-2"),
            _Bug(5, "    return item", "{f}([4, 9, 1])", "1", "9"),
        ),
        ("[4, 9, 1]", "[-3, -2]", "[5]", "[8, 2, 8]"),
    ),
    _Function(
        ("average", "mean", "middle"),
        ("def {f}({a}):", "    {x} = sum({a})", "    return {x} / len({a})"),
        (
            _Bug(2, "    return {x} * len({a})", "{f}([2, 4])", "12", "3.0"),
            _Bug(2, "    return {x} / 2", "{f}([3, 3, 3])", "4.5", "3.0"),
            _Bug(1, "    {x} = max({a})", "{f}([2, 4])", "2.0", "3.0"),
        ),
        ("[2, 4]", "[3, 3, 3]", "[1]", "[1, 2, 6]"),
    ),
    _Function(
        ("count_even", "evens", "number_of_even"),
        (
            "def {f}({a}):",
            "    {x} = 0",
            "    for item in {a}:",
            "        if item % 2 == 0:",
            "            {x} += 1",
            "    return {x}",
        ),
        (
            _Bug(3, "        if item % 2 == 1:", "{f}([2, 4, 5])", "1", "2"),
            _Bug(3, "        if item / 2 == 0:", "{f}([2, 4, 5])", "0", "2"),
            _Bug(4, "            {x} += item", "{f}([2, 4, 5])", "6", "2"),
        ),
        ("[2, 4, 5]", "[]", "[1, 3]", "[0, -2, 7]"),
    ),
    _Function(
        ("factorial", "product_up_to", "times_all"),
        ("def {f}({a}):", "    {x} = 1", "    for k in range(1, {a} + 1):", "        {x} *= k", "    return {x}"),
        (
            _Bug(1, "    {x} = 0", "{f}(4)", "0", "24"),
            _Bug(2, "    for k in range(1, {a}):", "{f}(4)", "6", "24"),
            _Bug(3, "        {x} += k", "{f}(4)", "11", "24"),
        ),
        ("4", "1", "0", "6"),
    ),
    _Function(
        ("clamp", "at_most", "cut_off"),
        ("def {f}({a}, limit):", "    if {a} > limit:", "        return limit", "    return {a}"),
        (
            _Bug(1, "    if {a} < limit:", "{f}(9, 5)", "9", "5"),
            _Bug(2, "        return {a}", "{f}(9, 5)", "9", "5"),
            _Bug(3, "    return limit", "{f}(3, 5)", "5", "3"),
        ),
        ("9, 5", "3, 5", "5, 5", "-1, 0"),
    ),
)
_ARGUMENTS = ("values", "data", "given", "source")
_VARIABLES = ("result", "found", "out", "current")


class Module(NamedTuple):
    """path: of the file. before, after: its text, wrong and right. bug: the lines of the wrong function, which of them is
    wrong, and how it should read. call, seen, right: an example of what comes of it.

    calls: of its functions, by their names: more of what they can be asked, one call at least that shows the bug."""

    path: str
    before: str
    after: str
    bug: tuple[list[str], int, str]
    call: str
    seen: str
    right: str
    calls: dict[str, list[str]]

    @property
    def issue(self) -> str:
        """What is wrong, by the example."""
        return f"{self.call} gives {self.seen}, but it should be {self.right}."

    def edit(self, at: int, line: str) -> tuple[list[str], list[str]]:
        """Lines that are in the wrong text once, the last of them line `at` of its wrong function; and those with `line`."""
        lines, first = self.bug[0], at
        while first > 0 and self.before.count("\n".join(("", *lines[first : at + 1], ""))) > 1:
            first -= 1  # more lines, until it is one place
        return lines[first : at + 1], [*lines[first:at], line]

    def chosen(self, rng: random.Random, noise: float) -> tuple[list[str], list[str]]:
        """The right edit; with the probability `noise` one that puts some line of the function into the place of another."""
        lines, at, right = self.bug
        if rng.random() < noise:
            at, right = rng.randrange(1, len(lines)), rng.choice([*lines[1:], right])
        return self.edit(at, right)


def draw(rng: random.Random, split: str, functions: int, key: Literal["before", "issue"] = "before") -> Module:
    """A module of `split` with that many functions, of which one is wrong. key: by what it is of a split.

    Raises TaskFailed for an unknown split."""
    for _ in range(_DRAWS):
        module = _draw(rng, functions)
        if belongs(getattr(module, key), split):
            return module
    raise TaskFailed(f"no module of split '{split}' in {_DRAWS} draws")


def _draw(rng: random.Random, functions: int) -> Module:
    path = rng.choice(_PATHS)
    chosen = rng.sample(_FUNCTIONS, functions)
    bug = rng.choice(chosen[0].bugs)
    names: list[dict[str, str]] = [
        {"f": rng.choice(kind.names), "a": rng.choice(_ARGUMENTS), "x": rng.choice(_VARIABLES)} for kind in chosen
    ]
    right = [[line.format(**names[i]) for line in kind.lines] for i, kind in enumerate(chosen)]
    wrong = [list(lines) for lines in right]
    wrong[0][bug.line] = bug.wrong.format(**names[0])
    order = rng.sample(range(len(chosen)), len(chosen))
    before, after = ("\n\n\n".join("\n".join(text[i]) for i in order) + "\n" for text in (wrong, right))
    calls = {name["f"]: [f"{name['f']}({case})" for case in kind.cases] for name, kind in zip(names, chosen, strict=True)}
    edit = (wrong[0], bug.line, right[0][bug.line])
    return Module(path, before, after, edit, bug.call.format(**names[0]), bug.seen, bug.right, calls)
