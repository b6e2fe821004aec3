"""The same episodes in other processes: with other hash seeds, and so orders of sets, other addresses, and another day.

`Others` starts the processes and compares; `main` is what runs in each. A process is asked by one JSON object on its
standard input and answers with one on its standard output; what a world prints goes to standard error.

They play the last episode first. One that comes out otherwise there is played once more in a process that plays the first one
first: if it comes out as here then, it is the order that makes the difference, and not the process.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict
from json import dumps, loads  # a world may replace those of the module
from pathlib import Path
from typing import Any

from troupe.envs import registry
from troupe.envs.base import TextWorld, ToolCall
from troupe.envs.check.clock import LATER_S, Clock, moved
from troupe.envs.check.episodes import Action, Episode, plain, play, replayed
from troupe.envs.drive import Driver
from troupe.protocol.errors import EpisodeError, NotReady, TimedOut, TroupeError

_START = "from troupe.envs.check.{} import main; main()"
_SLACK_S = 60.0


def name_of(world: type[TextWorld]) -> str:
    """A name under which another process finds the class; empty if there is none."""
    if world.name.partition(":")[0] in registry.PREFIXES:
        return world.name  # the class was made of it
    module = sys.modules.get(world.__module__)
    found: Any = module
    for part in world.__qualname__.split("."):
        found = getattr(found, part, None)
    qualname = world.__qualname__
    if found is not world:  # local to a function; or made by one, and held by another name
        qualname = next((name for name, value in vars(module).items() if value is world), "") if module else ""
    if not qualname:
        return ""
    try:
        file = Path(inspect.getfile(world)).resolve()
    except (OSError, TypeError):
        return ""
    place = world.__module__ if (file.parent / "__init__.py").exists() else str(file)
    return f"{place}:{qualname}"


def started(module: str, *, folder: str = "", hash_seed: int | None = None, quiet: bool = False) -> subprocess.Popen[bytes]:
    """A Python process that runs `main` of a module beside this one, and finds the modules that this one finds."""
    path = os.pathsep.join(entry or os.getcwd() for entry in sys.path)
    environment = {**os.environ, "PYTHONPATH": path}
    if folder:
        environment["TMPDIR"] = folder
    if hash_seed is not None:
        environment["PYTHONHASHSEED"] = str(hash_seed)
    return subprocess.Popen(
        [sys.executable, "-c", _START.format(module)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL if quiet else None,
        env=environment,
        start_new_session=True,  # so that a whole family can be ended, and Ctrl-C reaches only the one who asked
    )


def mute() -> int:
    """Standard output for answers alone: its number. What is printed from now on goes to standard error."""
    answers = os.dup(1)
    os.dup2(2, 1)
    return answers


class Others:
    """Other processes with the same world. folder: for temporary files. They live until `close`. name: by which they find it
    if the class itself does not tell."""

    def __init__(
        self, world: type[TextWorld], options: Mapping[str, Any], count: int, folder: str, timeout_s: float, name: str = ""
    ) -> None:
        self._name, self._options, self._timeout_s = name_of(world) or name, dict(options), timeout_s
        self._folder = folder
        self._processes: list[subprocess.Popen[bytes]] = []
        if self._name:
            for seed in range(1, count + 1):
                self._start(seed)

    def _start(self, hash_seed: int) -> None:
        self._processes.append(started("others", folder=self._folder, hash_seed=hash_seed, quiet=True))

    @property
    def missing(self) -> str:
        """Why there are none; empty if there are."""
        if self._processes:
            return ""
        return "not asked for" if self._name else "another process cannot find this class: define it in a file or a module"

    async def differ(self, played: list[Episode], seconds: float) -> tuple[str, str]:
        """How the episodes came out otherwise elsewhere, and how only in another order; each empty if they did not.

        seconds: that they took here. Raises EpisodeError if the world broke there, NotReady if a process could not say how
        they came out.
        """
        request = {
            "name": self._name,
            "options": self._options,
            "timeout_s": self._timeout_s,
            "episodes": [
                {
                    "split": e.task.split,
                    "index": e.index,
                    "turns": e.turns,
                    "began": e.began,
                    "actions": [_written(a) for a in e.actions],
                }
                for e in played
            ],
        }
        limit = _SLACK_S + self._timeout_s + 5 * seconds
        try:
            texts = [dumps(request | {"backwards": backwards}).encode() for backwards in (True, False)]
        except (TypeError, ValueError) as error:
            return f"what the player or the options say is no JSON: {error}", ""
        answers = await asyncio.gather(*(asyncio.to_thread(_asked, process, texts[0], limit) for process in self._processes))
        for hash_seed, answer in enumerate(answers, 1):
            if found := _compared(played, answer):
                self._start(hash_seed)
                other = _compared(played, await asyncio.to_thread(_asked, self._processes[-1], texts[1], limit))
                return (other, "") if other else ("", found)
        return "", ""

    def close(self) -> None:
        """Ends them."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait()
            for pipe in (process.stdin, process.stdout):
                if pipe is not None and not pipe.closed:
                    pipe.close()


def _asked(process: subprocess.Popen[bytes], text: bytes, limit: float) -> dict[str, Any]:
    try:
        answer, _ = process.communicate(text, timeout=limit)
        found: dict[str, Any] = loads(answer)
        return found
    except subprocess.TimeoutExpired:
        raise NotReady(f"the other process has not answered for {limit:.0f} s") from None
    except (ValueError, OSError):
        raise NotReady(f"the other process died with exit code {process.returncode}") from None


def _compared(played: list[Episode], answer: dict[str, Any]) -> str:
    if "broke" in answer:
        raise EpisodeError(answer["broke"])
    if "failed" in answer:
        raise NotReady(answer["failed"])
    if "differs" in answer:
        return str(answer["differs"])
    for episode, (task, seen) in zip(played, answer["episodes"], strict=True):
        if task != plain(asdict(episode.task)):
            return f"task {episode.task.id}: {_cut(plain(asdict(episode.task)))} here, {_cut(task)} there"
        found = difference(plain(episode.seen), seen)
        if found:
            return f"task {episode.task.id}, seed {episode.task.seed}: {found[0]} here, {found[1]} there"
    return ""


def difference(was: list[Any], now: list[Any]) -> tuple[str, str] | None:
    """The first place where two records differ, in few words; None if they are equal."""
    if was == now:
        return None
    for one, other in zip(was, now, strict=False):
        if one != other:
            return _apart(str(one), str(other))
    longer = "nothing more"
    return (_cut(was[len(now)]), longer) if len(was) > len(now) else (longer, _cut(now[len(was)]))


def _apart(one: str, other: str) -> tuple[str, str]:
    """The two texts around where they begin to differ."""
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    begin = max(0, same - 40)
    return _cut(("…" if begin else "") + one[begin:]), _cut(("…" if begin else "") + other[begin:])


def _cut(value: Any) -> str:
    return str(value)[:80]


def _written(action: Action) -> Any:
    return action if isinstance(action, str) else [action.name, action.arguments]


# -- in the other process --------------------------------------------------------------------------------------------


def main() -> None:
    """Answers one request, and is gone at once, whatever the world has started."""
    answers = mute()
    request = loads(sys.stdin.buffer.read())
    with moved() as clock:
        clock.seconds = LATER_S
        found = asyncio.run(_answer(request, clock))
    with open(answers, "wb") as file:
        file.write(dumps(found).encode())
    os._exit(0)


async def _answer(request: dict[str, Any], clock: Clock) -> dict[str, Any]:
    try:
        return {"episodes": await _replay(request, clock)}
    except IndexError:
        return {"differs": "an episode went on where it had ended"}
    except EpisodeError as error:
        return {"broke": str(error)}
    except TroupeError as error:
        return {"failed": str(error)}


async def _replay(request: dict[str, Any], clock: Clock) -> list[Any]:
    """Whether it closes is another promise's matter, and one that does not is waited for once."""
    closes = True
    world = registry.find(request["name"])
    found = []
    for asked in request["episodes"][:: -1 if request["backwards"] else 1]:
        clock.at(asked["began"] + LATER_S)
        driver = Driver(registry.make(world, request["options"]), timeout_s=request["timeout_s"])
        actions = [action if isinstance(action, str) else ToolCall(*action) for action in asked["actions"]]
        task = world.task(asked["split"], asked["index"])
        episode = await play(driver, task, replayed(actions), asked["turns"])
        try:
            if closes:
                await driver.close()
        except (EpisodeError, TimedOut):
            closes = False
        found.append([plain(asdict(task)), plain(episode.seen)])
    return found[:: -1 if request["backwards"] else 1]
