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
from collections.abc import Awaitable, Callable
from functools import partial
from statistics import median
from time import perf_counter
from typing import Any

from troupe.envs.base import SPLITS, Task, TextWorld, ToolCall
from troupe.envs.check.ends import closes, leaves, process
from troupe.envs.check.episodes import (
    TOLD,
    Action,
    Agent,
    Episode,
    Meter,
    Playing,
    apply,
    play,
    player_or_guesser,
    replayed,
    sample,
)
from troupe.envs.check.garbage import GARBAGE
from troupe.envs.check.left import Process, end, look, own_folder
from troupe.envs.check.looking import Looking
from troupe.envs.check.others import Others, difference
from troupe.envs.check.report import Finding, Found, Report
from troupe.envs.check.splits import splits
from troupe.envs.drive import Driver
from troupe.envs.registry import make
from troupe.envs.tools import ToolWorld
from troupe.protocol.errors import ConfigError, EnvironmentFailed, EpisodeError, NotReady, TimedOut, UnknownTool

PROMISES = (
    "it can be imported and made",
    "its tasks can be told apart and come again",
    "episodes run and give what they should",
    "same task and actions give the same episode",
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
_BESIDE = 8  # worlds at once
_LOOKED = 5  # episodes that are looked at
_SHARE = 8  # of the seconds there are, what one promise may use
_OBSERVATION, _EPISODE = 100_000, 400_000  # characters: about 25,000 and 100,000 tokens
_BLOCKS_S, _BLOCKED, _INLINE_S = 0.05, 0.8, 0.01

Tell = Callable[[Finding | str], None]
"""Told of each promise when it is begun, and of what was found."""


class Suite:
    """One check of one world. others: processes that play the same episodes. limit_s: about how long it may take in all."""

    def __init__(
        self,
        world: type[TextWorld],
        options: dict[str, Any],
        episodes: int,
        timeout_s: float,
        others: int,
        limit_s: float,
        tell: Tell,
    ) -> None:
        self.world, self.options, self.episodes, self.timeout_s = world, options, episodes, timeout_s
        self.share_s, self.tell, self.count = limit_s / _SHARE, tell, others
        self.given = copy.deepcopy(options)
        self.report = Report(world.name if isinstance(world.name, str) and world.name else world.__name__)
        self.played: list[Episode] = []
        self.meter = Meter()
        self.first_s = 0.0
        self.stop = ""  # why nothing more is looked at
        self.close_failed: Exception | None = None
        self.unsure = False  # whether chance was seen that no task accounts for

    async def run(self) -> Report:
        """Looks at everything."""
        with own_folder() as self.folder:
            self.process, self.before = Process(), look(self.folder)
            self.others = Others(self.world, self.options, self.count, self.folder, self.timeout_s)
            beating = asyncio.ensure_future(self.meter.beat())
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
            self._replays,
            self._elsewhere,
            self._leaks,
            self._beside,
            self._looks,
            self._garbage,
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
            except RecursionError as error:
                found = ("broken", f"RecursionError: {error}")
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

    async def _again(self, episode: Episode, driver: Driver) -> str:
        """How the same actions came out otherwise; empty if they did not."""
        try:
            again = await play(driver, episode.task, replayed(episode.actions), episode.turns)
        except IndexError:  # the episode went on where it had ended before
            return f"task {episode.task.id}: longer the second time"
        return self._differs(episode, again)

    def _differs(self, was: Episode, now: Episode) -> str:
        found = difference(was.seen, now.seen)
        return f"task {was.task.id}, seed {was.task.seed}: {found[0]} then {found[1]}" if found else ""

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
        began = perf_counter()
        for index in range(self.episodes):
            task = self.task("train", index)
            async with self.open() as driver:
                playing = Playing(driver, task, player_or_guesser(driver, random.Random(index)), timer=self.meter)
                await playing.begin()
                while await playing.turn():
                    if perf_counter() - began > self.share_s:
                        playing.episode.turns = len(playing.episode.actions)
                        break
                self.played.append(await playing.end())
            if perf_counter() - began > self.share_s:
                break
        self.first_s = perf_counter() - began
        self.report.episodes, self.report.steps = len(self.played), sum(len(e.actions) for e in self.played)
        few = f" of {self.episodes}, because it is slow" if len(self.played) < self.episodes else ""
        return "ok", f"{len(self.played)} episodes{few}, {self.report.steps} steps"

    async def _replays(self) -> Found:
        for episode in self.played:
            async with self.open() as driver:
                found = await self._again(episode, driver)
            if found:
                self.unsure = True
                return "broken", found
        return "ok", ""

    async def _elsewhere(self) -> Found:
        if self.others.missing:
            return "unknown", self.others.missing
        try:
            found = await self.others.differ(self.played, self.first_s)
        except NotReady as error:
            return "unknown", f"not judged: {error}"
        except EpisodeError as error:
            return "broken", f"in another process it breaks: {error}"
        finally:
            self.others.close()
        same_here = not self._is_broken(PROMISES[3])
        if found:
            return (
                "broken",
                f"{found} (the order of a set, hash(), id(), the clock or the process itself)" if same_here else found,
            )
        if not same_here:
            self._add(PROMISES[3], "a new process gives the first one again: something outlives an episode, such as a class "
                      "attribute, a mutable default or a global")  # fmt: skip
        return "ok", ""

    async def _leaks(self) -> Found:
        """One instance, and each episode after another one that was left in the middle."""
        async with self.open() as driver:
            for episode in self.played[::-1]:
                await self._abandoned(driver)
                found = await self._again(episode, driver)
                if found:
                    return "broken", found
        return "ok", ""

    async def _abandoned(self, driver: Driver) -> None:
        episode = self.played[0]
        await driver.reset(episode.task)
        for action in ("\x00", *episode.actions[:1]):
            with contextlib.suppress(*TOLD, EpisodeError):
                if (await apply(driver, action)).done:
                    break

    async def _beside(self) -> Found:
        """First turn by turn, one after the other; then each as fast as it can."""
        played = self.played[:_BESIDE]
        async with contextlib.AsyncExitStack() as stack:
            drivers = [await stack.enter_async_context(self.open()) for _ in played]
            try:
                for found in (await self._in_turns(played, drivers), await self._at_once(played, drivers)):
                    if found:
                        self.unsure = True
                        return "broken", found
            except IndexError:
                return "broken", "an episode was longer beside others"
        return "ok", f"{len(played)} at once"

    async def _in_turns(self, played: list[Episode], drivers: list[Driver]) -> str:
        games = [Playing(d, e.task, replayed(e.actions), e.turns) for e, d in zip(played, drivers, strict=True)]
        for game in games:
            await game.begin()
        active = games
        while active:
            active = [game for game in active if await game.turn()]
        found = [self._differs(was, await game.end()) for was, game in zip(played, games, strict=True)]
        return next(filter(None, found), "")

    async def _at_once(self, played: list[Episode], drivers: list[Driver]) -> str:
        again = [self._again(episode, driver) for episode, driver in zip(played, drivers, strict=True)]
        results = await asyncio.gather(*again, return_exceptions=True)
        for result in results:
            if isinstance(result, BaseException):
                raise result
        return next((found for found in results if isinstance(found, str) and found), "")

    async def _looks(self) -> Found:
        """`state`, `state_key` and `tools`, asked again and again."""
        for episode in self.played[:_LOOKED]:
            async with self.open() as driver:
                looking = Looking(driver, episode)
                found = await looking.differs()
            if found:
                return "broken", f"task {episode.task.id}, seed {episode.task.seed}: {found}"
        return "ok", ""

    async def _garbage(self) -> Found:
        began, tried = perf_counter(), 0
        async with self.open() as driver:
            for kind, action in await self._rubbish(driver):
                if perf_counter() - began > self.share_s:
                    break
                tried += 1
                await driver.reset(self.task("train", 0))
                try:
                    await apply(driver, action)
                except TOLD as told:
                    if isinstance(told, UnknownTool):
                        return "broken", f"a tool that is offered cannot be called: {told}"
                except TimedOut as error:
                    raise TimedOut(f"{kind}: {error}") from error
                except EpisodeError as error:
                    return "broken", f"{kind}: {str(error)[:200]}"
        return "ok", f"{tried} actions"

    async def _rubbish(self, driver: Driver) -> list[tuple[str, Action]]:
        """Messages; and for each tool calls with no arguments, with wrong ones, and with each garbage in each text."""
        rubbish: list[tuple[str, Action]] = list(GARBAGE.items())
        await driver.reset(self.task("train", 0))
        for found in driver.tools():
            name, schema = found["name"], found["parameters"]
            rubbish.append((f"{name} without arguments", ToolCall(name, {})))
            rubbish.append((f"{name} with objects", ToolCall(name, {key: {} for key in schema.get("properties", {})})))
            for kind, text in GARBAGE.items():
                arguments = sample(schema, schema, [text], random.Random(0))
                rubbish.append((f"{name} with {kind}", ToolCall(name, arguments)))
        return rubbish

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

    # -- helpers -----------------------------------------------------------------------------------------------------

    def _is_broken(self, name: str) -> bool:
        return any(finding.name == name and finding.status == "broken" for finding in self.report.findings)

    def _add(self, name: str, detail: str) -> None:
        for finding in self.report.findings:
            if finding.name == name:
                finding.detail += f" ({detail})"


__all__ = ["GARBAGE", "PROMISES", "Agent", "Suite"]
