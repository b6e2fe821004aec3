"""Worlds whose agents run programs: a base that has sandboxes, and the tool `run_python` that needs one for a moment.

Promises:
- all worlds of a process and a kind share their sandboxes, at most `sandboxes` at a time (`sandbox.shared`);
- every run of `run_python` gets a sandbox that nobody has used, which is then discarded: nothing is kept between runs, and an
  agent that thinks holds none;
- what is told of a run is bounded, and is the same for the same program: text hashes are not random.
"""

from __future__ import annotations

import textwrap
from typing import Annotated, Any, ClassVar, get_args

from pydantic import Field

from troupe.envs.base import InvalidAction
from troupe.envs.sandbox import Result, SandboxSettings
from troupe.envs.sandbox.settings import Backend
from troupe.envs.sandbox.shared import Shared
from troupe.envs.tools import ToolWorld, tool
from troupe.protocol.errors import ConfigError, nearest

BACKENDS = get_args(Backend)
_PROGRAM = 16_000  # characters of a program
_CLOCK_S = 12.0  # of a run: with `shared.WAIT_S` still less than a world's call may take
_TOLD = 2_000  # characters of an output that are told


class SandboxedWorld(ToolWorld):
    """Options of all of them:

    sandbox: where programs run: "auto" (docker, else bubblewrap), "docker", "bubblewrap" or "subprocess". trusted: allows
    "subprocess", which protects nothing. sandboxes: that all worlds of a process may hold together. run_s: seconds
    of CPU time that a run may take, 1 to 12; it may take 12 on the clock. limits: further `SandboxSettings`.
    """

    inline: ClassVar[bool] = True  # all that waits is `async`

    def __init__(self, sandbox: str, trusted: bool, sandboxes: int, run_s: float, **limits: Any) -> None:
        if sandbox not in BACKENDS:
            raise ConfigError(f"sandbox is '{sandbox}'; it is one of {', '.join(BACKENDS)}.{nearest(str(sandbox), BACKENDS)}")
        if not 1 <= run_s <= _CLOCK_S:
            raise ConfigError(f"run_s is {run_s}; it is 1 to {_CLOCK_S:g}")
        settings = SandboxSettings(backend=sandbox, trusted=trusted, cpu_s=run_s, wall_s=_CLOCK_S, **limits)
        self.sandboxes = Shared(settings, sandboxes)

    async def close(self) -> None:
        await self.sandboxes.close()


class PythonWorld(SandboxedWorld):
    """A world in which Python may be run. turns: that an episode may take, the last one for the answer; 1: nothing is run."""

    def __init__(self, turns: int, **options: Any) -> None:
        if not 1 <= turns <= self.max_turns:
            raise ConfigError(f"turns is {turns}; it is 1 to {self.max_turns}")
        super().__init__(**options)
        self.turns = turns
        self.printed: list[str] = []
        """What the agent was told of its runs in this episode."""

    def tools(self) -> list[dict[str, Any]]:
        return super().tools() if self.turns > 1 else []

    @tool
    async def run_python(self, code: Annotated[str, Field(description="a program that prints what you want to see")]) -> str:
        """Run a Python program and read what it prints. It has the standard library; nothing is kept between runs."""
        if len(self.printed) >= self.turns - 1:
            raise InvalidAction(f"you have run {self.turns - 1} programs, which is all you may: answer now")
        if len(code) > _PROGRAM:
            raise InvalidAction(f"the program is longer than {_PROGRAM} characters")
        self.printed.append("")  # it counts from its beginning: calls of one turn run at the same time
        at = len(self.printed) - 1
        async with self.sandboxes.lease() as box:
            await box.write("main.py", textwrap.dedent(code).encode(errors="replace"))
            said = told(await box.run(["env", "PYTHONHASHSEED=0", "python3", "-s", "main.py"]))
        self.printed[at] = said
        return said


def told(result: Result, most: int = _TOLD) -> str:
    """What an agent reads of a run: its output, what it complained about, and how it ended if it did not end well."""
    parts = [cut(data.decode(errors="replace").rstrip("\n"), most) for data in (result.stdout, result.stderr)]
    if result.killed_for:
        parts.append(f"(ended: it used too much {_MEANT.get(result.killed_for, result.killed_for)})")
    elif result.exit_code and not parts[1]:
        parts.append(f"(exit code {result.exit_code})")
    return "\n".join(part for part in parts if part) or "(no output)"


def cut(text: str, most: int) -> str:
    """`text`, without its middle if it is longer than `most` characters."""
    if len(text) <= most:
        return text
    head = most // 3
    return f"{text[:head]}\n… {len(text) - most} characters …\n{text[len(text) - (most - head) :]}"


_MEANT = {"wall": "time", "cpu": "time", "disk": "of the disk", "pids": "processes"}
