"""Does a program pass its tests? It runs in a sandbox, which is asked for values; they are compared outside of it.

What a test expects never enters the sandbox. A program can see which calls are made and can say what it likes, print "passed",
exit, or patch whatever runs it: to pass it has to say the right values, which only doing the task gives.

Promises:
- a program that crashes, loops, exits, floods its output or takes all memory fails the tests that it does not answer;
- each test runs in a process of its own, in files written anew, in a sandbox that nobody has used before;
- a sandbox that fails, or in which Python does not start, breaks the episode (law 6); a program cannot bring that about.
"""

from __future__ import annotations

import ast
import inspect
import json
import math
import warnings
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from troupe.envs import sandbox
from troupe.envs.sandbox import Sandbox, SandboxSettings
from troupe.envs.verifiers import tests_child
from troupe.envs.verifiers.bounds import seconds
from troupe.protocol.errors import ConfigError, EnvironmentFailed

_MOST = 48 * 1024  # characters of all expected values together: they have to fit into a sandbox's output
_COMMAND = ("python3", "-I", "-S", "-c", inspect.getsource(tests_child))

Program = str | Mapping[str, str]
"""Text of one module, or of several files by their paths."""


class Case(NamedTuple):
    """A Python expression, and the data that it should give: numbers, text, None, and lists, tuples, sets and dicts of them."""

    call: str
    expected: Any


class Lends(Protocol):
    """Whoever has sandboxes that nobody has used: a `Pool`, or `Shared`."""

    def lease(self) -> AbstractAsyncContextManager[Sandbox]: ...


@dataclass(frozen=True, slots=True)
class Report:
    """What came of a program. passed: by test. said: for each what it gave, as text; empty if nothing. killed_for: a limit."""

    passed: tuple[bool, ...]
    said: tuple[str, ...]
    killed_for: str

    @property
    def share(self) -> float:
        """Of tests that passed, 0 to 1."""
        return sum(self.passed) / len(self.passed)


class UnitTests:
    """1 if a program passes all tests, else 0. `share` is a verifier too: the share that it passes, of the same run.

    tests: what is called and what it should give. module: the file that a program of one text becomes. imports: run before
    each call; by default all names of `module`. each_s: seconds of CPU time of a test; after one that takes more, or five times
    as many on the clock, no other is asked. all_s: seconds on the clock for all of them.
    sandboxes: where sandboxes come from; None: one is opened for each program, with `SandboxSettings()`.

    A value is right as `same` compares. Raises ConfigError for tests whose expectation is no data or is too long.
    """

    def __init__(
        self,
        tests: Sequence[Case],
        *,
        module: str = "solution",
        imports: str = "",
        each_s: int = 1,
        all_s: float = 12.0,
        sandboxes: Lends | None = None,
    ) -> None:
        for test in tests:
            _check(test)
        if not tests or sum(len(repr(test.expected)) for test in tests) > _MOST:
            raise ConfigError(f"UnitTests: there is at least one test, and expected values have {_MOST} characters together")
        self.tests = tuple(tests)
        self.module, self.imports = module, imports or f"from {module} import *"
        seconds("UnitTests: each_s", each_s)
        self.each_s, self.all_s = each_s, seconds("UnitTests: all_s", all_s)
        self._sandboxes = sandboxes or _Opened()
        self._last: tuple[Program, Report] | None = None

    @classmethod
    def of_asserts(cls, source: str, **options: Any) -> UnitTests:
        """Of lines such as `assert double(2) == 4`: what is left of == is called, what is right of it is data.

        Raises ConfigError for anything else."""
        tests = []
        for line in ast.parse(source).body:
            match line:
                case ast.Assert(test=ast.Compare(left=left, ops=[ast.Eq()], comparators=[right])):
                    tests.append(Case(ast.unparse(left), ast.literal_eval(right)))
                case _:
                    raise ConfigError(f"UnitTests: {ast.unparse(line)[:80]!r} is not: assert CALL == DATA")
        return cls(tests, **options)

    async def __call__(self, program: Program) -> float:
        return float(all((await self.report(program)).passed))

    async def share(self, program: Program) -> float:
        """The share of tests that pass, 0 to 1."""
        return (await self.report(program)).share

    async def report(self, program: Program) -> Report:
        """What came of it; the last program is not run again. Raises EnvironmentFailed."""
        if self._last is None or self._last[0] != program:
            self._last = (program, await self._run(program))
        return self._last[1]

    async def _run(self, program: Program) -> Report:
        files = {f"{self.module}.py": program} if isinstance(program, str) else dict(program)
        calls = [test.call for test in self.tests]
        given = json.dumps({"files": files, "imports": self.imports, "calls": calls, "each_s": self.each_s})
        async with self._sandboxes.lease() as box:
            result = await box.run(_COMMAND, stdin=given, timeout_s=self.all_s)
        ready, *lines = result.stdout.decode(errors="replace").split("\n")
        if ready != tests_child.READY:
            why = " ".join(result.stderr.decode(errors="replace").split())[-200:] or result.killed_for
            raise EnvironmentFailed(f"UnitTests: Python did not start in the sandbox (exit code {result.exit_code}): {why}")
        said = [""] * len(calls)
        for line in lines:
            match _json(line):
                case [int(number), str(value)] if 0 <= number < len(calls):
                    said[number] = value
        passed = (same(_value(text), test.expected) for text, test in zip(said, self.tests, strict=True))
        return Report(tuple(passed), tuple(said), result.killed_for)


def same(value: Any, expected: Any) -> bool:
    """Equal as Python has it, with two exceptions: a bool is no number, and floats are compared to nine digits."""
    if type(value) is not type(expected):
        numbers = {type(value), type(expected)} == {int, float}
        return numbers and _close(value, expected)
    match expected:
        case float():
            return _close(value, expected)
        case list() | tuple():
            return len(value) == len(expected) and all(map(same, value, expected))
        case dict():
            return _paired(value, expected) and all(same(value[key], expected[key]) for key in expected)
        case set() | frozenset():
            return _paired(value, expected)
    return bool(value == expected)


# -- helpers ---------------------------------------------------------------------------------------------------------


class _Nothing:
    """What a call gave that gave nothing."""


class _Opened:
    @asynccontextmanager
    async def lease(self) -> AsyncIterator[Sandbox]:
        async with await sandbox.open(SandboxSettings()) as box:
            yield box


def _check(test: Case) -> None:
    written = repr(test.expected)
    if len(written.encode()) > tests_child.LONGEST or not same(_value(written), test.expected):
        raise ConfigError(f"UnitTests: {written[:80]} is not data of at most {tests_child.LONGEST} bytes")
    try:
        compile(test.call, "test", "eval")
    except (SyntaxError, ValueError) as error:
        raise ConfigError(f"UnitTests: {test.call[:80]!r} is no expression: {error}") from None


def _paired(ones: Iterable[Any], others: Iterable[Any]) -> bool:
    """Whether keys, or members of a set, are equal and of the same types: {True} equals {1}."""
    mine = {one: one for one in ones}
    theirs = {other: other for other in others}
    return mine.keys() == theirs.keys() and all(same(mine[key], key) for key in theirs)


def _close(one: float, other: float) -> bool:
    try:
        return math.isclose(one, other, rel_tol=1e-9, abs_tol=1e-12)
    except OverflowError:  # an int that no float can be
        return False


def _json(line: str) -> Any:
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _value(text: str) -> Any:
    """The data that `text` writes; something that equals nothing if it is none. It is untrusted."""
    try:
        with warnings.catch_warnings(action="ignore"):  # of what a text may have that looks like code
            return ast.literal_eval(text[: tests_child.LONGEST])
    except (ValueError, SyntaxError, TypeError, MemoryError, RecursionError):
        return _Nothing()
