"""Mend a bug: an issue, a small Python module with one wrong line, and search/replace edits as the answer.

Nothing is run: the answer is compared with the patch that puts the line right, as SWE-RL does (see `patches`).

Promises: one module in five, by its digest, is held out; what an issue says of its module is true; what cannot be read or
applied is graded −1, not refused.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import ClassVar, NamedTuple

from troupe.envs.base import Task, TextWorld, Turn, belongs, rng_of
from troupe.envs.patches import Malformed, patched, similarity
from troupe.protocol.errors import TaskFailed

_READ = 2_000  # characters of an answer that are looked at; difflib takes their square
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
    """names: what it may be called. lines: with {f}, its name, {a}, its argument, {x}, a variable. bugs: of its lines."""

    names: tuple[str, ...]
    lines: tuple[str, ...]
    bugs: tuple[_Bug, ...]


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
    ),
    _Function(
        ("average", "mean", "middle"),
        ("def {f}({a}):", "    {x} = sum({a})", "    return {x} / len({a})"),
        (
            _Bug(2, "    return {x} * len({a})", "{f}([2, 4])", "12", "3.0"),
            _Bug(2, "    return {x} / 2", "{f}([3, 3, 3])", "4.5", "3.0"),
            _Bug(1, "    {x} = max({a})", "{f}([2, 4])", "2.0", "3.0"),
        ),
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
    ),
    _Function(
        ("factorial", "product_up_to", "times_all"),
        ("def {f}({a}):", "    {x} = 1", "    for k in range(1, {a} + 1):", "        {x} *= k", "    return {x}"),
        (
            _Bug(1, "    {x} = 0", "{f}(4)", "0", "24"),
            _Bug(2, "    for k in range(1, {a}):", "{f}(4)", "6", "24"),
            _Bug(3, "        {x} += k", "{f}(4)", "11", "24"),
        ),
    ),
    _Function(
        ("clamp", "at_most", "cut_off"),
        ("def {f}({a}, limit):", "    if {a} > limit:", "        return limit", "    return {a}"),
        (
            _Bug(1, "    if {a} < limit:", "{f}(9, 5)", "9", "5"),
            _Bug(2, "        return {a}", "{f}(9, 5)", "9", "5"),
            _Bug(3, "    return limit", "{f}(3, 5)", "5", "3"),
        ),
    ),
)
_ARGUMENTS = ("values", "data", "given", "source")
_VARIABLES = ("result", "found", "out", "current")


class SwePatch(TextWorld):
    """Options: functions: of the module, 1 to 4; one of them has the bug."""

    name: ClassVar[str] = "swe_patch"
    max_turns: ClassVar[int] = 1
    system: ClassVar[str] = (
        "You mend a bug in a Python file. Answer with the edit and nothing else, in this form, "
        "where the searched lines are lines of the file:\n"
        "<solution>\n```python\n### path/of/file.py\n<<<<<<< SEARCH\n    wrong line\n=======\n    right line\n"
        ">>>>>>> REPLACE\n```\n</solution>"
    )

    def __init__(self, functions: int = 2) -> None:
        if not 1 <= functions <= 4:
            raise ValueError(f"functions is {functions}; it is 1 to 4")
        self.functions = functions

    def reset(self, task: Task) -> str:
        for _ in range(_DRAWS):
            issue = self._draw()
            if belongs(self.before, task.split):
                return f"Issue: {issue}\n\nFile:\n### {self.path}\n{self.before}"
        raise TaskFailed(f"no module of split '{task.split}' in {_DRAWS} draws")

    def _draw(self) -> str:
        """Draws a module, right and wrong. Returns the issue."""
        self.path = self.rng.choice(_PATHS)
        chosen = self.rng.sample(_FUNCTIONS, self.functions)
        bug = self.rng.choice(chosen[0].bugs)
        names: list[dict[str, str]] = [
            {"f": self.rng.choice(kind.names), "a": self.rng.choice(_ARGUMENTS), "x": self.rng.choice(_VARIABLES)}
            for kind in chosen
        ]
        right = [[line.format(**names[i]) for line in kind.lines] for i, kind in enumerate(chosen)]
        wrong = [list(lines) for lines in right]
        wrong[0][bug.line] = bug.wrong.format(**names[0])
        order = self.rng.sample(range(len(chosen)), len(chosen))
        self.before, self.after = ("\n\n\n".join("\n".join(text[i]) for i in order) + "\n" for text in (wrong, right))
        self.edit = (wrong[0], bug.line, right[0][bug.line])
        return f"{bug.call.format(**names[0])} gives {bug.seen}, but it should be {bug.right}."

    def step(self, text: str) -> Turn:
        files = {self.path: self.before}
        try:
            after = patched(text[:_READ], files)
        except Malformed as reason:
            return Turn(f"Not applied: {reason}.", -1.0, True, False, {"malformed": -1.0})
        near = similarity(files, after, {self.path: self.after})
        mended = after[self.path] == self.after
        return Turn("Merged." if mended else "Applied, but not what was needed.", near, True, mended, {"similarity": near})

    # -- its scripted player -----------------------------------------------------------------------------------------

    def play(self, rng: random.Random, noise: float) -> str:
        """The right edit; when it is noisy, an edit that puts some line of the function into the place of another."""
        lines, at, right = self.edit
        if rng.random() < noise:
            at, right = rng.randrange(1, len(lines)), rng.choice([*lines[1:], right])
        first = at
        while first > 0 and self.before.count("\n".join(("", *lines[first : at + 1], ""))) > 1:
            first -= 1  # more lines, until it is one place
        return edit(self.path, lines[first : at + 1], [*lines[first:at], right])

    @classmethod
    def corpus(cls) -> Iterator[str]:
        yield cls.system
        yield from ("Merged.", "Applied, but not what was needed.")
        for index in range(96):
            world, task = cls(), cls.task("train", index)
            world.rng = rng_of(task)
            yield world.reset(task)
            yield world.play(world.rng, noise=0.0)


def edit(path: str, search: list[str], replace: list[str]) -> str:
    """The answer with this one edit."""
    lines = ("<solution>", "```python", f"### {path}", "<<<<<<< SEARCH", *search, "=======", *replace, ">>>>>>> REPLACE", "```")
    return "\n".join((*lines, "</solution>"))
