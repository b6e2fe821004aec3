"""Mend a bug in a small repository: look around with a shell, edit files, run the tests; then others decide.

One line of one module is wrong (`bugs`), and a visible test fails for it. When the agent has answered, its files are taken out
of its sandbox and asked, in a new one, for values that were never in either (`verifiers.unit_tests`).

Promises: one issue in five, by its digest, is held out, in whatever module; the outcome is 1 if all hidden tests of all
functions pass on the files as the agent left them, else 0; what becomes of the visible tests does not matter; the agent's
sandbox is its own for the episode and is then discarded.
"""

from __future__ import annotations

import asyncio
import json
import random
import re
from ast import literal_eval
from collections.abc import Iterator
from typing import Annotated, Any, ClassVar

from pydantic import Field

from troupe.envs import bugs
from troupe.envs.base import InvalidAction, Task, ToolCall, rng_of
from troupe.envs.sandbox import Sandbox
from troupe.envs.sandboxed import SandboxedWorld, cut, told
from troupe.envs.tools import Rewards, short, tool
from troupe.envs.verifiers import Case, Composition, UnitTests, of
from troupe.protocol.errors import ConfigError

_FILE = 64 * 1024  # bytes of a file that is viewed, edited or judged
_TREE = 256 * 1024  # bytes of all files that are judged
_TOLD = 4_000  # characters of an observation
_COMMAND = 16_000  # characters of a command or an edit
_RUN_TESTS = "python3 -m unittest"
_TIMED = re.compile(r"(?<=tests|.test) in \d+\.\d+s$", re.MULTILINE)  # what unittest says differently each time
_COLLECT = f"""
import json, os, stat
found, size = {{}}, 0
for folder, folders, names in os.walk("."):
    folders[:] = sorted(name for name in folders if name[0] != "." and name != "__pycache__")
    for name in sorted(names):
        path = os.path.relpath(os.path.join(folder, name))
        try:
            about = os.lstat(path)
            if stat.S_ISREG(about.st_mode) and about.st_size <= {_FILE} and size + about.st_size <= {_TREE}:
                with open(path, encoding="utf-8") as file:
                    found[path] = file.read()
                size += about.st_size
        except (OSError, ValueError):
            pass
print(json.dumps(found))
"""


class Swe(SandboxedWorld):
    """Options:

    modules: of the repository, 1 to 4, one of which is wrong. functions: of a module, 1 to 4. shaped: what passing all hidden
    tests is worth beside the outcome; passing some is worth a share of that. sandbox, trusted,
    sandboxes, run_s: see `SandboxedWorld`. An episode holds its sandbox until it ends: allow as many as `env.slots`.
    """

    name: ClassVar[str] = "swe"
    max_turns: ClassVar[int] = 12
    system: ClassVar[str] = (
        "You mend a bug in a Python repository, which is the current folder. Use the tools to look at files, edit them and run "
        f"the tests ({_RUN_TESTS}). When the bug is mended, say in one sentence what you did."
    )

    def __init__(
        self,
        modules: int = 2,
        functions: int = 2,
        shaped: float = 0.0,
        sandbox: str = "auto",
        trusted: bool = False,
        sandboxes: int = 32,
        run_s: float = 10.0,
    ) -> None:
        super().__init__(sandbox, trusted, sandboxes, run_s, output_bytes=2 * 2**20)
        for option, value in {"modules": modules, "functions": functions}.items():
            if not 1 <= value <= 4:
                raise ConfigError(f"{option} is {value}; it is 1 to 4")
        if not 0 <= shaped <= 100:
            raise ConfigError(f"shaped is {shaped}; it is 0 to 100")
        self.modules, self.functions, self.shaped = modules, functions, shaped
        self._box: Sandbox | None = None
        self._alone = asyncio.Lock()

    async def reset(self, task: Task) -> str:
        await self._leave()
        self.module, self.files, tests = _drawn(self.rng, task.split, self.modules, self.functions)
        self.did: list[tuple[str, str]] = []  # tools that ran, with what they told
        modules = [path for path in self.files if path.endswith(".py") and not path.startswith("tests/")]
        imports = "\n".join(f"import {_dotted(path)}" for path in modules)
        graded = UnitTests(tests, imports=imports, sandboxes=self.sandboxes)
        self.graded = Composition(
            of("tree", graded),
            {"tests": of("tree", graded.share)} if self.shaped else {},
            gate=None,
            weights={"tests": self.shaped} if self.shaped else {},
        )
        self.tree = self.files
        return f"Issue: {self.module.issue}\nA test of the repository fails for it."

    # -- tools ---------------------------------------------------------------------------------------------------------

    @tool
    async def shell(self, command: Annotated[str, Field(description="read by sh, in the repository's folder")]) -> str:
        """Run a command and read what it prints. Files are kept between commands; processes and variables are not."""
        _bounded(command)
        async with self._alone:
            result = await (await self._sandbox()).run(["sh", "-c", command.replace("\0", "")])
            return self._did("shell", _TIMED.sub("", told(result, _TOLD // 2)))

    @tool
    async def view(self, path: str, first: int = 1, last: int = 200) -> str:
        """Read lines of a file, numbered from 1."""
        async with self._alone:
            lines = (await self._read(path)).splitlines()
            shown = [f"{number:4} {line}" for number, line in enumerate(lines, 1) if first <= number <= last]
            return self._did("view", cut("\n".join(shown), _TOLD) or f"(none of its {len(lines)} lines)")

    @tool
    async def edit(self, path: str, old: str, new: str) -> str:
        """Replace a piece of text, which has to be in the file exactly once, by another."""
        _bounded(old + new)
        async with self._alone:
            text = await self._read(path)
            count = text.count(old) if old else 0
            if count != 1:
                raise InvalidAction(f"the old text has to be in the file exactly once, and is there {count} times")
            await (await self._sandbox()).write(path, text.replace(old, new).encode(errors="replace"))
            return self._did("edit", f"{short(path)} is changed.")

    # -- the verdict ---------------------------------------------------------------------------------------------------

    async def verify(self) -> Rewards:
        async with self._alone:
            if self._box is not None:
                self.tree = await _collected(self._box)
                await self._leave()  # before another is asked for: who holds one and waits for one may wait for itself
            return await self.graded(self)

    def state_key(self) -> str:
        return "\n".join((self.module.issue, *(f"{name}: {text}" for name, text in self.did)))

    async def close(self) -> None:
        self._box = None
        await super().close()

    # -- its scripted player -------------------------------------------------------------------------------------------

    def play(self, rng: random.Random, noise: float) -> str | ToolCall:
        """Runs the tests, views the module, edits the line, answers. When noisy, it skips a step or edits a line wrongly."""
        path, did = self.module.path, [name for name, _ in self.did]
        noisy = rng.random() < noise
        if "edit" in did or (noisy and rng.random() < 0.1):
            return "I mended the line that was wrong."
        if "shell" not in did and not (noisy and rng.random() < 0.5):
            return ToolCall("shell", {"command": _RUN_TESTS})
        if "view" not in did and not (noisy and rng.random() < 0.5):
            return ToolCall("view", {"path": path})
        old, new = ("\n".join((*lines, "")) for lines in self.module.chosen(rng, float(noisy)))
        before = "" if self.module.before.startswith(old) else "\n"  # or it might be the end of another line
        return ToolCall("edit", {"path": path, "old": before + old, "new": before + new})

    @classmethod
    def corpus(cls) -> Iterator[str]:
        yield cls.system
        yield from (json.dumps(found.spec) for found in cls._tools.values())
        yield "I mended the line that was wrong. F . (exit code 1) is changed. in the folder /work FAILED (failures=1) OK"
        for index in range(64):
            module, files, _ = _drawn(rng_of(cls.task("train", index)), "train", 1, 2)
            yield f"Issue: {module.issue}\nA test of the repository fails for it."
            yield from (json.dumps({"name": "edit", "arguments": {"path": p, "old": t, "new": ""}}) for p, t in files.items())

    # -- helpers -------------------------------------------------------------------------------------------------------

    async def _sandbox(self) -> Sandbox:
        """The episode's sandbox, with the repository in it."""
        if self._box is None:
            box = await self.sandboxes.take()
            for path, text in self.files.items():
                await box.write(path, text)
            self._box = box
        return self._box

    async def _leave(self) -> None:
        box, self._box = self._box, None
        if box is not None:
            await self.sandboxes.discard(box)

    async def _read(self, path: str) -> str:
        try:
            return (await (await self._sandbox()).read(path.replace("\0", ""), limit=_FILE)).decode()
        except UnicodeDecodeError:
            raise InvalidAction(f"{short(path)} is no text") from None

    def _did(self, name: str, text: str) -> str:
        self.did.append((name, text))
        return text


def _drawn(rng: random.Random, split: str, modules: int, functions: int) -> tuple[bugs.Module, dict[str, str], list[Case]]:
    """The wrong module, the repository's files, and the hidden tests of all its functions."""
    chosen = [bugs.draw(rng, split, functions, key="issue")]
    while len(chosen) < modules:
        other = bugs.draw(rng, split, functions)
        if other.path not in {module.path for module in chosen}:
            chosen.append(other)
    wrong = chosen[0]
    files = {"README.md": "Small functions. Their tests: " + _RUN_TESTS + "\n", "tests/__init__.py": ""}
    tests: list[Case] = []
    for module in sorted(chosen, key=lambda each: each.path):
        scope: dict[str, Any] = {}
        exec(module.after, scope)  # it is ours
        files[module.path] = module.before if module is wrong else module.after
        files[f"{module.path.partition('/')[0]}/__init__.py"] = ""
        checks = {name: (calls[0], repr(eval(calls[0], scope))) for name, calls in module.calls.items()}
        if module is wrong:
            checks[wrong.call.partition("(")[0]] = (wrong.call, wrong.right)
        name = module.path.rpartition("/")[2].removesuffix(".py")
        files[f"tests/test_{name}.py"] = _test_file(module.path, checks)
        asked = [call for calls in module.calls.values() for call in calls]
        tests += [Case(f"{_dotted(module.path)}.{call}", eval(call, scope)) for call in asked]
    tests.append(Case(f"{_dotted(wrong.path)}.{wrong.call}", literal_eval(wrong.right)))
    return wrong, files, tests


def _test_file(path: str, checks: dict[str, tuple[str, str]]) -> str:
    lines = ["import unittest", "", f"from {_dotted(path)} import {', '.join(sorted(checks))}", "", ""]
    lines.append("class Tests(unittest.TestCase):")
    for name, (call, value) in checks.items():
        lines += [f"    def test_{name}(self):", f"        self.assertEqual({call}, {value})", ""]
    return "\n".join(lines)


def _dotted(path: str) -> str:
    return path.removesuffix(".py").removesuffix("/__init__").replace("/", ".")


async def _collected(box: Sandbox) -> dict[str, str]:
    """The files of a sandbox, as text by path: regular ones that are not too big. Empty if they cannot be read at all."""
    result = await box.run(["python3", "-I", "-S", "-c", _COLLECT])
    try:
        found = json.loads(result.stdout)
    except (ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) and all(isinstance(text, str) for text in found.values()) else {}


def _bounded(text: str) -> None:
    if len(text) > _COMMAND:
        raise InvalidAction(f"that is longer than {_COMMAND} characters")
