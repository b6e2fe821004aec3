"""Write a Python function: a description and two examples; other examples, which the agent never sees, are what counts.

The agent may run programs before it answers with the function in a block of Python. Its program is run in a sandbox, and what
it gives is compared outside of it (`verifiers.unit_tests`).

Promises: one function in five, by the digest of its description, is held out; the outcome is 1 if all hidden tests pass, else
0; the part `tests` is the share that passes, times its weight.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterator
from typing import ClassVar

from troupe.envs import functions
from troupe.envs.base import Task, ToolCall, rng_of
from troupe.envs.sandboxed import PythonWorld
from troupe.envs.tools import Rewards
from troupe.envs.verifiers import Case, Composition, UnitTests, of
from troupe.protocol.errors import ConfigError

_SHOWN = 2  # examples that the agent is told
_READ = 8_000  # characters of an answer that are looked at
_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)


class Code(PythonWorld):
    """Options:

    turns: that an episode may take, 1 to 8, the last one for the answer; 1: no program is run before it. tests: hidden ones, 2
    to 20. shaped: what passing all tests is worth beside the outcome; passing some is worth a share of that.
    sandbox, trusted, sandboxes, run_s: see `SandboxedWorld`.
    """

    name: ClassVar[str] = "code"
    max_turns: ClassVar[int] = 8
    system: ClassVar[str] = (
        "You write Python functions. If you have the tool run_python, you may try programs first. "
        "Answer with the whole function and nothing else, in this form:\n```python\ndef double(x):\n    return 2 * x\n```"
    )

    def __init__(
        self,
        turns: int = 4,
        tests: int = 8,
        shaped: float = 0.2,
        sandbox: str = "auto",
        trusted: bool = False,
        sandboxes: int = 16,
        run_s: float = 5.0,
    ) -> None:
        super().__init__(turns, sandbox=sandbox, trusted=trusted, sandboxes=sandboxes, run_s=run_s)
        if not 2 <= tests <= 20:
            raise ConfigError(f"tests is {tests}; it is 2 to 20")
        if not 0 <= shaped <= 100:
            raise ConfigError(f"shaped is {shaped}; it is 0 to 100")
        self.count, self.shaped = tests, shaped

    async def reset(self, task: Task) -> str:
        self.printed = []
        self.split = task.split
        self.function = functions.draw(self.rng, task.split, _SHOWN + self.count)
        shown, hidden = _apart(self.function.examples)
        tests = UnitTests([Case(self.function.call(a), v) for a, v in hidden], sandboxes=self.sandboxes)
        self.graded = Composition(
            of(program, tests),
            {"tests": of(program, tests.share)} if self.shaped else {},
            gate=None,
            weights={"tests": self.shaped} if self.shaped else {},
        )
        return _asked(self.function, shown)

    async def verify(self) -> Rewards:
        return await self.graded(self)

    def state_key(self) -> str:
        return "\n".join((self.function.words, *self.printed))

    def play(self, rng: random.Random, noise: float) -> str | ToolCall:
        """Tries the right function on an example, then answers with it. When noisy, it does not try, or has some other one."""
        noisy = rng.random() < noise
        if self.turns > 1 and not self.printed and not (noisy and rng.random() < 0.3):
            (shown, _), *_ = _apart(self.function.examples)[0]
            return ToolCall("run_python", {"code": f"{self.function.source}\n\nprint({self.function.call(shown)})"})
        source = self.function.source
        if noisy:
            other = functions.draw(rng, self.split, _SHOWN)
            source = source.partition("\n")[0] + "\n" + other.source.partition("\n")[2]
        return f"```python\n{source}\n```"

    @classmethod
    def corpus(cls) -> Iterator[str]:
        yield cls.system
        yield from (json.dumps(found.spec) for found in cls._tools.values())
        for index in range(64):
            function = functions.draw(rng_of(cls.task("train", index)), "train", _SHOWN)
            yield _asked(function, function.examples)
            yield json.dumps({"name": "run_python", "arguments": {"code": f"{function.source}\n\nprint()"}})


def program(world: Code) -> str:
    """The program that an answer has: its last block, or all of it."""
    said = world.answer[:_READ]
    blocks = _BLOCK.findall(said)
    return blocks[-1] if blocks else said


def _apart(examples: list[tuple[object, object]]) -> tuple[list[tuple[object, object]], list[tuple[object, object]]]:
    """Those that the agent is told, and the others, with the empty one among them."""
    return examples[1 : 1 + _SHOWN], [examples[0], *examples[1 + _SHOWN :]]


def _asked(function: functions.Function, shown: list[tuple[object, object]]) -> str:
    return "\n".join((function.words, *(f"{function.call(a)} is {v!r}" for a, v in shown)))
