"""Problems with numbers and a real Python to solve them with: a tool that runs programs in a sandbox.

Problems and their splits are those of `math_code`, whose interpreter is a small one of its own. The reward is 1 if the answer
between <answer> and </answer> is the right one, as the chosen verifier judges, else 0.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import ClassVar

from troupe.envs import problems
from troupe.envs.base import Task, ToolCall, rng_of
from troupe.envs.sandboxed import PythonWorld
from troupe.envs.tools import Rewards
from troupe.envs.verifiers import Composition, Exact, Symbolic, Verifier, of
from troupe.envs.verifiers.text import inside
from troupe.protocol.errors import ConfigError

VERIFIERS = ("exact", "symbolic")
_READ = 8_000  # characters of an answer that are looked at


class MathPython(PythonWorld):
    """Options:

    turns: that an episode may take, 1 to 8, the last one for the answer; 1: nothing is run. largest: number that a range ends
    with, 10 to 200. verifier: "exact" compares the digits, without commas; "symbolic" takes whatever equals the answer.
    sandbox, trusted, sandboxes, run_s: see `SandboxedWorld`.
    """

    name: ClassVar[str] = "math_python"
    max_turns: ClassVar[int] = 8
    system: ClassVar[str] = (
        "You solve problems with a number as the answer. You may run Python with the tool run_python, and read what it prints. "
        "When you know the answer, reply with it in the form <answer>5</answer>."
    )

    def __init__(
        self,
        turns: int = 4,
        largest: int = 40,
        verifier: str = "exact",
        sandbox: str = "auto",
        trusted: bool = False,
        sandboxes: int = 16,
        run_s: float = 5.0,
    ) -> None:
        super().__init__(turns, sandbox=sandbox, trusted=trusted, sandboxes=sandboxes, run_s=run_s)
        if not 10 <= largest <= 200:
            raise ConfigError(f"largest is {largest}; it is 10 to 200")
        if verifier not in VERIFIERS:
            raise ConfigError(f"verifier is '{verifier}'; it is one of {', '.join(VERIFIERS)}")
        self.largest, self.verifier = largest, verifier
        self._judge("0")  # complains now if it is not installed

    async def reset(self, task: Task) -> str:
        self.printed = []
        self.problem = problems.draw(self.rng, task.split, self.largest)
        self.graded = Composition(of(said, self._judge(str(self.problem.value))))
        return self.problem.question

    async def verify(self) -> Rewards:
        return await self.graded(self)

    def state_key(self) -> str:
        return "\n".join((self.problem.question, *self.printed))

    def play(self, rng: random.Random, noise: float) -> str | ToolCall:
        """Runs the right program and answers what it printed. When noisy, it guesses, or gets a number of the program wrong."""
        noisy = rng.random() < noise
        if self.printed and self.printed[-1].lstrip("-").isdecimal():
            return f"<answer>{self.printed[-1]}</answer>"
        if self.turns == 1 or len(self.printed) == self.turns - 1 or (noisy and rng.random() < 0.3):
            return f"<answer>{rng.randint(1, 10 * self.largest)}</answer>"
        code = problems.misread(rng, self.problem.program) if noisy else self.problem.program
        return ToolCall("run_python", {"code": code})

    @classmethod
    def corpus(cls) -> Iterator[str]:
        yield cls.system
        yield from (json.dumps(found.spec) for found in cls._tools.values())
        for index in range(64):
            problem = problems.draw(rng_of(cls.task("train", index)), "train", 40)
            yield problem.question
            yield json.dumps({"name": "run_python", "arguments": {"code": problem.program}})
            yield f"<answer>{problem.value}</answer>"

    def _judge(self, value: str) -> Verifier:
        return Symbolic(value) if self.verifier == "symbolic" else Exact(value, normalise=False)


def said(world: MathPython) -> str:
    """The answer, without commas."""
    return inside("answer", world.answer[:_READ]).replace(",", "")
