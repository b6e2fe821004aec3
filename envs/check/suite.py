"""The promises of a world, one method each, in the order in which they are looked at.

Promises: a check never raises for what the world does wrong, it reports it; a broken promise names the task at which it
was seen; what could not be judged is said to be so, not passed; a world that hangs is waited for once, not once a check.
"""

from __future__ import annotations

import asyncio
import contextlib
import copy
import inspect
import json
import random
import traceback
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from troupe.envs.base import SPLITS, Task, TextWorld
from troupe.envs.check.again import REPLAYS, elsewhere, leaks, replays
from troupe.envs.check.beside import beside
from troupe.envs.check.ends import closes, leaves, process
from troupe.envs.check.episodes import (
    Agent,
    Episode,
    Meter,
    Playing,
    player_or_guesser,
)
from troupe.envs.check.garbage import GARBAGE, garbage
from troupe.envs.check.left import Watch, end, look, own_folder
from troupe.envs.check.looking import Looking
from troupe.envs.check.others import Others
from troupe.envs.check.report import Finding, Found, Report
from troupe.envs.check.shared import Process
from troupe.envs.check.splits import splits
from troupe.envs.drive import Driver
from troupe.envs.registry import make
from troupe.envs.tools import ToolWorld
from troupe.protocol.errors import ConfigError, EnvironmentFailed, EpisodeError, TimedOut

PROMISES = (
    "it can be imported and made",
    "its tasks can be told apart and come again",
    "episodes run and give what they should",
    REPLAYS,
    "another process gives the same episode",
    "nothing leaks into the next episode",
    "worlds side by side do not disturb each other",
    "looking at an episode changes nothing",
    "garbage actions are invalid or harmless",
    "an episode that a limit ends can be judged",
    "no held-out task is in training",
    "an episode fits a context window",
    "nothing blocks the event loop",
    "it leaves its process and its options as they were",
    "it closes at any moment, and twice",
    "it leaves nothing behind",
)

_NEED_EPISODES = {*PROMISES[3:8], PROMISES[11], PROMISES[15]}
_OTHERWISE = 4  # tasks that are played once more, with other actions
_LOOKED = 5  # episodes that are looked at
_SHARE = 8  # of the seconds there are, what one promise may use
_OBSERVATION, _EPISODE = 100_000, 400_000  # characters: about 25,000 and 100,000 tokens
_BLOCKS_S, _BLOCKED, _INLINE_S = 0.05, 0.8, 0.01

Tell = Callable[[Finding | str], None]
"""Told of each promise when it is begun, and of what was found."""


class Suite:
    """One check of one world. others: processes that play the same episodes. limit_s: about how long it may take in all.
    name: under which others find the world, if its class does not tell."""

    def __init__(
        self,
        world: type[TextWorld],
        options: dict[str, Any],
        episodes: int,
        timeout_s: float,
        others: int,
        limit_s: float,
        tell: Tell,
        name: str = "",
    ) -> None:
        self.world, self.options, self.episodes, self.timeout_s = world, options, episodes, timeout_s
        self.share_s, self.tell, self.count, self.name = limit_s / _SHARE, tell, others, name
        self.given = copy.deepcopy(options)
        self.report = Report(world.name if isinstance(world.name, str) and world.name else world.__name__)
        self.played: list[Episode] = []
        self.otherwise: list[Episode] = []  # of the first of their tasks, with other actions
        self.meter = Meter()
        self.first_s = 0.0
        self.stop = ""  # why nothing more is looked at
        self.close_failed: Exception | None = None
        self.leaked = ""  # what came out otherwise in another order
        self.unsure = False  # whether chance was seen that no task accounts for

    async def run(self) -> Report:
        """Looks at everything."""
        with own_folder() as self.folder:
            beating = asyncio.ensure_future(self.meter.beat())
            self.process, self.before, self.watch = Process(), look(self.folder), Watch(self.folder)
            self.others = Others(self.world, self.options, self.count, self.folder, self.timeout_s, self.name)
            try:
                for name, promise in zip(PROMISES, self._promises(), strict=True):
                    await self._look(name, promise)
            finally:
                beating.cancel()
                self.others.close()
                self.process.restore()
                end(self.folder)
        names = [name for name in ("make", "reset", "step", "close") if self.meter.seconds.get(name)]
        self.report.seconds = {name: (median(self.meter.seconds[name]), max(self.meter.seconds[name])) for name in names}
        return self.report

    def _promises(self) -> list[Callable[[], Awaitable[Found | None]]]:
        return [
            self._made,
            self._tasks,
            self._runs,
            partial(replays, self, self.watch),
            partial(elsewhere, self),
            partial(leaks, self),
            partial(beside, self),
            self._looks,
            partial(garbage, self),
            self._judges,
            partial(splits, self),
            self._fits,
            self._blocks,
            partial(process, self),
            partial(closes, self),
            partial(leaves, self),
        ]

    async def _look(self, name: str, promise: Callable[[], Awaitable[Found | None]]) -> None:
        self.tell(name)
        found: Found | None
        if self.stop:
            found = ("unknown", self.stop)
        elif name in _NEED_EPISODES and not self.played:
            found = ("unknown", "not looked at: there is no episode to replay")
        else:
            try:
                found = await promise()
            except TimedOut as error:
                found, self.stop = ("broken", str(error)), "not looked at: the world hangs"
            except ConfigError as error:
                if not self.report.findings:
                    raise
                found = ("broken", str(error))
            except EpisodeError as error:
                found = ("broken", str(error))
            except Exception as error:  # what it has changed the check needs as well
                line = traceback.extract_tb(error.__traceback__)[-1]
                where = f"{Path(line.filename).name}, line {line.lineno}"
                found = ("broken", f"the check itself failed: {type(error).__name__}: {error} ({where})")
        if found is not None:
            self.report.findings.append(Finding(name, *found))
            self.tell(self.report.findings[-1])

    # -- making, driving and closing ---------------------------------------------------------------------------------

    def driver(self) -> Driver:
        """A new world, in a driver that whoever asks has to close."""
        with self.meter("make"):
            return Driver(make(self.world, self.options), timeout_s=self.timeout_s)

    async def close(self, driver: Driver, when: str = "") -> None:
        """A close that fails or hangs is another promise's matter, and is waited for once."""
        if not isinstance(self.close_failed, TimedOut):
            try:
                with self.meter("close"):
                    await driver.close()
            except (EpisodeError, TimedOut) as error:
                self.close_failed = self.close_failed or type(error)(f"{when}{error}")

    @contextlib.asynccontextmanager
    async def open(self, when: str = "") -> Any:
        """A new world for the time of the block."""
        driver = self.driver()
        try:
            yield driver
        finally:
            await self.close(driver, when)

    def task(self, split: str, index: int) -> Task:
        """The world's own, looked at."""
        where = f"{self.world.__name__}.task({split!r}, {index})"
        try:
            task = self.world.task(split, index)
        except EpisodeError:
            raise
        except Exception as error:
            raise EnvironmentFailed(f"{where} raised {type(error).__name__}: {error}") from error
        if not isinstance(task, Task):
            raise EnvironmentFailed(f"{where} returned {type(task).__name__}, not a Task")
        return task

    # -- the promises ------------------------------------------------------------------------------------------------

    async def _made(self) -> Found:
        async with self.open("before any reset: ") as driver:
            world = driver.world
            if not isinstance(world.system, str):
                return "broken", f"system is {type(world.system).__name__}, not str"
            turns: Any = world.max_turns
            if isinstance(turns, bool) or not isinstance(turns, int) or turns < 1:
                self.stop = "not looked at: an episode has no length"
                return "broken", f"max_turns is {turns!r}; it is a whole number, 1 or more"
        try:
            stranger = make(self.world, {**self.options, "no_such_option": 0})
        except ConfigError:
            return "ok", ""
        await self.close(Driver(stranger, timeout_s=self.timeout_s))
        return "warning", "takes any option without a word: a misspelt one would change nothing"

    async def _tasks(self) -> Found:
        seen: dict[str, str] = {}
        for split in SPLITS:
            for index in range(self.episodes):
                task = self.task(split, index)
                if task.split != split:
                    return "broken", f"task {index} of {split} says that it is of '{task.split}'"
                if task.id in seen:
                    return "broken", f"task {index} of {split} has the id '{task.id}', and so has {seen[task.id]}"
                if task != self.task(split, index):
                    return "broken", f"task {index} of {split} is another one when it is asked for again"
                try:
                    json.dumps(task.data, allow_nan=False)
                except (TypeError, ValueError) as error:
                    return "broken", f"task {index} of {split}: its data is no JSON: {error}"
                seen[task.id] = f"{index} of {split}"
        return "ok", ""

    async def _runs(self) -> Found:
        """And some of their tasks once more: to be won where they were not, by a player that can, and else at random."""
        began = perf_counter()
        for index in range(self.episodes):
            self.played.append(await self._first(index, 0.5, index, began + self.share_s))
            if perf_counter() - began > self.share_s:
                break
        for episode in self.played[:_OTHERWISE]:
            if perf_counter() - began > self.share_s:
                break
            other = await self._first(episode.index, float(episode.success), ~episode.index, began + self.share_s)
            if other.actions != episode.actions:
                self.otherwise.append(other)
        self.first_s = perf_counter() - began
        self.report.episodes, self.report.steps = len(self.played), sum(len(e.actions) for e in self.played)
        few = f" of {self.episodes}, because it is slow" if len(self.played) < self.episodes else ""
        return "ok", f"{len(self.played)} episodes{few}, {self.report.steps} steps"

    async def _first(self, index: int, noise: float, seed: int, until: float) -> Episode:
        """An episode of the training task `index`, broken off when it is late."""
        async with self.open() as driver:
            act = player_or_guesser(driver, random.Random(seed), noise)
            playing = Playing(driver, self.task("train", index), act, timer=self.meter)
            playing.episode.index = index
            await playing.begin()
            while await playing.turn():
                if perf_counter() > until:
                    playing.episode.turns = len(playing.episode.actions)
                    break
            return await playing.end()

    async def _looks(self) -> Found:
        """`state`, `state_key` and `tools`, asked again and again."""
        for episode in self.played[:_LOOKED]:
            async with self.open() as driver:
                looking = Looking(driver, episode)
                found = await looking.differs()
            if found:
                return "broken", f"task {episode.task.id}, seed {episode.task.seed}: {found}"
        return "ok", ""

    async def _judges(self) -> Found | None:
        """Whether `verify` can be asked when nothing has been done yet. None: the world has none."""
        if not issubclass(self.world, ToolWorld):
            return None
        async with self.open() as driver:
            await driver.reset(self.task("train", 0))
            return None if await driver.verify() is None else ("ok", "")

    async def _fits(self) -> Found:
        longest, episode = max(e.longest for e in self.played), max(e.characters for e in self.played)
        detail = f"longest observation {longest:,} characters, longest episode {episode:,}"
        if longest > _OBSERVATION:
            return "warning", f"{detail}: an observation beyond {_OBSERVATION:,} will hardly fit; cut it in the world"
        if episode > _EPISODE:
            return "warning", f"{detail}: beyond {_EPISODE:,} the context is full before the episode ends"
        return "ok", detail

    async def _blocks(self) -> Found | None:
        """None: the world is synchronous and has threads of its own to be slow in."""
        world = self.world
        calls = {name: self.meter.seconds[name] for name in ("reset", "step") if self.meter.seconds.get(name)}
        direct = {name for name in calls if inspect.iscoroutinefunction(getattr(world, name))}
        if issubclass(world, ToolWorld) and any(inspect.iscoroutinefunction(found.run) for found in world._tools.values()):
            direct.add("step")
        if world.inline is not True and not direct:
            return None
        for name, seconds in calls.items():
            often = median(seconds)
            still = median(gap / span for gap, span in zip(self.meter.blocked[name], seconds, strict=True) if span)
            if still <= _BLOCKED:  # it awaits, and others go on meanwhile
                continue
            if world.inline and often > _INLINE_S:
                return "broken", f"inline = True, but {name} takes {often * 1e3:.0f} ms in which all other episodes wait"
            if name in direct and often > _BLOCKS_S:
                return "broken", (
                    f"{name} is async and takes {often * 1e3:.0f} ms without awaiting, in which all other episodes wait: await "
                    "what it waits for, or make it a plain method"
                )
        return "ok", ""

    # -- what was found -------------------------------------------------------------------------------------------------

    def is_broken(self, name: str) -> bool:
        """Whether that promise was."""
        return any(finding.name == name and finding.status == "broken" for finding in self.report.findings)

    def add(self, name: str, detail: str) -> None:
        """More about a promise that was looked at before."""
        for finding in self.report.findings:
            if finding.name == name:
                finding.detail += f" ({detail})"


__all__ = ["GARBAGE", "PROMISES", "Agent", "Suite"]
