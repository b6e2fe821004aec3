"""Mend a bug: an issue, a small Python module with one wrong line, and search/replace edits as the answer.

Nothing is run: the answer is compared with the patch that puts the line right, as SWE-RL does (see `patches`).

Modules and their splits are those of `bugs`. What cannot be read or applied is graded −1, not refused.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import ClassVar

from troupe.envs import bugs
from troupe.envs.base import Task, TextWorld, Turn, rng_of
from troupe.envs.patches import Malformed, patched, similarity

_READ = 2_000  # characters of an answer that are looked at; difflib takes their square


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
        self.module = bugs.draw(self.rng, task.split, self.functions)
        return f"Issue: {self.module.issue}\n\nFile:\n### {self.module.path}\n{self.module.before}"

    def step(self, text: str) -> Turn:
        path, right = self.module.path, self.module.after
        files = {path: self.module.before}
        try:
            after = patched(text[:_READ], files)
        except Malformed as reason:
            return Turn(f"Not applied: {reason}.", -1.0, True, False, {"malformed": -1.0})
        near = similarity(files, after, {path: right})
        mended = after[path] == right
        return Turn("Merged." if mended else "Applied, but not what was needed.", near, True, mended, {"similarity": near})

    # -- its scripted player -----------------------------------------------------------------------------------------

    def play(self, rng: random.Random, noise: float) -> str:
        """The right edit; when it is noisy, an edit that puts some line of the function into the place of another."""
        return edit(self.module.path, *self.module.chosen(rng, noise))

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
