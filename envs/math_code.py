"""Small problems that are tedious by hand and easy for a program: the agent may write Python and read what it prints.

A message runs a program or answers, whichever comes first in it; what is not closed goes to the end of the message:

    <code>
    s = 0
    for i in range(3, 17 + 1):
        s += i * i
    print(s)
    </code>

is answered with `<interpreter>`, its output (or what is wrong with it) and `</interpreter>`, and `<answer>1780</answer>` ends
the episode. What the program may be is said in `small_python`: a bounded subset of Python without imports, not a sandbox.

Problems and their splits are those of `problems`. The reward is 1 for exactly the right number, else 0.
"""

from __future__ import annotations

import random
import re
import textwrap
from collections.abc import Iterator
from fractions import Fraction
from typing import ClassVar

from troupe.envs import problems, small_python
from troupe.envs.base import InvalidAction, Task, TextWorld, Turn, rng_of

_READ = 4_000  # characters of a message that are looked at
_CODE = re.compile(r"<code>(.*?)(?:</code>|\Z)", re.DOTALL)
_FENCED = re.compile(r"\s*```(?:python)? *\n(.*?)```\s*", re.DOTALL)
_ANSWER = re.compile(r"<answer>(.*?)(?:</answer>|\Z)", re.DOTALL)
_NUMBER = re.compile(r"[-+]?[0-9]{1,60}(?:\.[0-9]{1,60}|/0*[1-9][0-9]{0,59})?")


class MathCode(TextWorld):
    """Options: largest: of the numbers that a range ends with, 10 to 200."""

    name: ClassVar[str] = "math_code"
    max_turns: ClassVar[int] = 4
    system: ClassVar[str] = (
        "You solve problems with a number as the answer. You may run Python: write\n"
        "<code>\nx = 2 + 3\nprint(x)\n</code>\n"
        "and read what it prints. When you know the answer, write\n"
        "<answer>5</answer>"
    )

    def __init__(self, largest: int = 40) -> None:
        if not 10 <= largest <= 200:
            raise ValueError(f"largest is {largest}; it is 10 to 200")
        self.largest = largest

    def reset(self, task: Task) -> str:
        self.question, self.program, self.value = problems.draw(self.rng, task.split, self.largest)
        self.printed: list[str] = []
        return self.question

    def step(self, text: str) -> Turn:
        said = text[:_READ]
        code, answer = _CODE.search(said), _ANSWER.search(said)
        if code and (not answer or code.start() < answer.start()):
            try:
                output = small_python.run(_program(code[1]))
            except ValueError as error:
                output = f"Error: {error}"
            self.printed.append(output)
            return Turn(f"<interpreter>\n{output}\n</interpreter>")
        if answer:
            number = answer[1].strip().replace(",", "")
            right = _NUMBER.fullmatch(number) is not None and Fraction(number) == self.value
            return Turn("Right." if right else f"Wrong. It is {self.value}.", float(right), True, right)
        raise InvalidAction("Write a program between <code> and </code>, or a number between <answer> and </answer>.")

    def state_key(self) -> str:
        return "\n".join((self.question, *self.printed))

    # -- its scripted player -----------------------------------------------------------------------------------------

    def play(self, rng: random.Random, noise: float) -> str:
        """Runs the right program and answers what it printed. When noisy, it guesses, or gets a number of the program wrong."""
        noisy = rng.random() < noise
        if noisy and rng.random() < 0.3:
            return f"<answer>{rng.randint(1, 10 * self.largest)}</answer>"
        if self.printed and _NUMBER.fullmatch(self.printed[-1]):
            return f"<answer>{self.printed[-1]}</answer>"
        program = self.program
        if noisy:
            program = problems.misread(rng, program)
        return f"<code>\n{program}\n</code>"

    @classmethod
    def corpus(cls) -> Iterator[str]:
        yield cls.system
        yield from ("<interpreter>\nError: line 1: 'x' is not defined\n</interpreter>", "Right.", "Wrong. It is 5.")
        for index in range(32):
            world, task = cls(), cls.task("train", index)
            world.rng = rng_of(task)
            yield world.reset(task)
            yield world.play(world.rng, noise=0.0)


def _program(code: str) -> str:
    """What stands between the tags, without a fence around it."""
    fenced = _FENCED.fullmatch(code)
    return textwrap.dedent(fenced[1] if fenced else code).strip()
