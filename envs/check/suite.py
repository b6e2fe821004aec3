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
from statistics import median
from time import perf_counter
from typing import Any

from troupe.envs.base import SPLITS, Task, TextWorld, ToolCall
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
from troupe.envs.check.left import KINDS, Left, Process, end, look, own_folder, since
from troupe.envs.check.others import Others, difference
from troupe.envs.check.report import Finding, Report, Status
from troupe.envs.drive import Driver
from troupe.envs.registry import make
from troupe.envs.tools import ToolWorld
from troupe.protocol.errors import ConfigError, EnvironmentFailed, EpisodeError, TimedOut, UnknownTool

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

_SAMPLE = 50  # tasks a split whose first observations are compared
_BESIDE = 8  # worlds at once
_LOOKED = 5  # episodes that are looked at
_PAIRS = 10  # tasks that open alike, and are played to see whether they are
_CYCLES = 3  # episodes after which what is left behind is counted again
_SETTLE_S = 1.0  # for what ends by itself after `close`
_SHARE = 8  # of the seconds there are, what one promise may use
_OBSERVATION, _EPISODE = 100_000, 400_000  # characters: about 25,000 and 100,000 tokens
_BLOCKS_S, _BLOCKED, _INLINE_S = 0.05, 0.8, 0.01

Found = tuple[Status, str]
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
            self._splits,
            self._fits,
            self._blocks,
            self._process,
            self._closes,
            self._leaves,
        ]

    async def _look(self, name: str, promise: Callable[[], Awaitable[Found | None]]) -> None:
        self.tell(name)
        needs = (self._replays, self._elsewhere, self._leaks, self._beside, self._looks, self._fits, self._leaves)
        found: Found | None
        if self.stop:
            found = ("unknown", self.stop)
        elif promise in needs and not self.played:
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

    def _driver(self) -> Driver:
        with self.meter("make"):
            return Driver(make(self.world, self.options), timeout_s=self.timeout_s)

    async def _close(self, driver: Driver, when: str = "") -> None:
        """A close that fails or hangs is another promise's matter, and is waited for once."""
        if not isinstance(self.close_failed, TimedOut):
            try:
                with self.meter("close"):
                    await driver.close()
            except (EpisodeError, TimedOut) as error:
                self.close_failed = self.close_failed or type(error)(f"{when}{error}")

    @contextlib.asynccontextmanager
    async def _open(self, when: str = "") -> Any:
        driver = self._driver()
        try:
            yield driver
        finally:
            await self._close(driver, when)

    def _task(self, split: str, index: int) -> Task:
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
        async with self._open("before any reset: ") as driver:
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
        await self._close(Driver(stranger, timeout_s=self.timeout_s))
        return "warning", "takes any option without a word: a misspelt one would change nothing"

    async def _tasks(self) -> Found:
        seen: dict[str, str] = {}
        for split in SPLITS:
            for index in range(self.episodes):
                task = self._task(split, index)
                if task.split != split:
                    return "broken", f"task {index} of {split} says that it is of '{task.split}'"
                if task.id in seen:
                    return "broken", f"task {index} of {split} has the id '{task.id}', and so has {seen[task.id]}"
                if task != self._task(split, index):
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
            task = self._task("train", index)
            async with self._open() as driver:
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
            async with self._open() as driver:
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
        except TimeoutError as error:
            return "unknown", f"not looked at: {error}"
        finally:
            self.others.close()
        same_here = not self._is_broken(PROMISES[3])
        if found:
            return "broken", f"{found} (the order of a set, hash(), id() or the process itself)" if same_here else found
        if not same_here:
            self._add(PROMISES[3], "a new process gives the first one again: something outlives an episode, such as a class "
                      "attribute, a mutable default or a global")  # fmt: skip
        return "ok", ""

    async def _leaks(self) -> Found:
        """One instance, and each episode after another one that was left in the middle."""
        async with self._open() as driver:
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
            drivers = [await stack.enter_async_context(self._open()) for _ in played]
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
            async with self._open() as driver:
                looking = _Looking(driver, episode)
                found = await looking.differs()
            if found:
                return "broken", f"task {episode.task.id}, seed {episode.task.seed}: {found}"
        return "ok", ""

    async def _garbage(self) -> Found:
        began, tried = perf_counter(), 0
        async with self._open() as driver:
            for kind, action in await self._rubbish(driver):
                if perf_counter() - began > self.share_s:
                    break
                tried += 1
                await driver.reset(self._task("train", 0))
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
        await driver.reset(self._task("train", 0))
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
        async with self._open() as driver:
            await driver.reset(self._task("train", 0))
            return None if await driver.verify() is None else ("ok", "")

    async def _splits(self) -> Found:
        """Tasks are the same if they open alike and, played alike, go on alike."""
        opens: dict[str, dict[str, int]] = {split: {} for split in SPLITS}
        states: dict[str, dict[str, int]] = {split: {} for split in SPLITS}
        pairs: list[tuple[int, int]] = []
        began, looked = perf_counter(), 0
        async with self._open() as driver:
            for index in range(_SAMPLE):
                for split in SPLITS:
                    text = await driver.reset(self._task(split, index))
                    opens[split].setdefault(text, index)
                    if type(driver.world).state is not TextWorld.state:
                        states[split][text + json.dumps(await driver.state(), sort_keys=True)] = index
                    if split == "heldout" and text in opens["train"]:
                        pairs.append((opens["train"][text], index))
                looked += 1
                if perf_counter() - began > self.share_s:
                    break
        shared = opens["train"].keys() & opens["heldout"].keys()
        if not shared:
            return "ok", f"{looked} tasks of each compared"
        told = f"both splits open with {min(shared)[:80]!r}"
        alike = all([await self._go_on_alike(*pair) for pair in pairs[:_PAIRS]])
        if alike and len(opens["train"].keys() | opens["heldout"].keys()) > 1:
            return "broken", f"{told}, and go on alike: split by what a task is, with troupe.envs.base.belongs"
        same = states["train"].keys() & states["heldout"].keys()
        if same:
            return "broken", f"both splits have the state {min(same)[:120]!r}"
        if states["train"]:
            return "ok", f"{looked} tasks of each told apart by state()"
        if alike:
            return "warning", "all tasks look and go on alike: if they are one, a held-out score says nothing"
        return "unknown", f"{told} and go on differently, so they cannot be told apart: define state()"

    async def _go_on_alike(self, train: int, heldout: int) -> bool:
        async with self._open() as driver:
            one = await play(driver, self._task("train", train), player_or_guesser(driver, random.Random(0)))
        async with self._open() as driver:
            try:
                other = await play(driver, self._task("heldout", heldout), replayed(one.actions), one.turns)
            except IndexError:
                return False
        return one.seen == other.seen

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
            if world.inline and often > _INLINE_S:
                return "broken", f"inline = True, but {name} takes {often * 1e3:.0f} ms in which all other episodes wait"
            if name in direct and often > _BLOCKS_S and still > _BLOCKED:
                return "broken", (
                    f"{name} is async and takes {often * 1e3:.0f} ms without awaiting, in which all other episodes wait: await "
                    "what it waits for, or make it a plain method"
                )
        return "ok", ""

    async def _process(self) -> Found:
        if self.options != self.given:
            return "broken", f"it has changed the options that it was given: {str(self.given)[:80]} to {str(self.options)[:80]}"
        if moved := self.process.moved():
            return "broken", f"the working folder is now {moved}: it is shared by all episodes of a process"
        if drawn := self.process.drawn():
            told = f"it draws from or seeds {' and '.join(drawn)}, which all episodes of a process share: use self.rng"
            return ("broken" if self.unsure else "warning"), told
        if variables := self.process.variables():
            return "warning", f"it has changed environment variables: {', '.join(variables)[:80]}"
        return "ok", ""

    async def _closes(self) -> Found:
        if self.close_failed is not None:
            raise self.close_failed
        for when in ("before any reset", "in the middle of an episode"):
            driver = self._driver()
            if when != "before any reset":
                await driver.reset(self._task("train", 0))
                with contextlib.suppress(*TOLD, EpisodeError):
                    await apply(driver, self.played[0].actions[0] if self.played else "1")
            try:
                await driver.release()
            except EpisodeError as error:
                return "broken", f"{when}: {error}"
            try:
                await driver.close()
            except EpisodeError as error:
                return "broken", f"the second time: {error}"
        return "ok", ""

    async def _leaves(self) -> Found:
        """What there is more of after a few more episodes is leaked; what is there once may be shared by all of them."""
        if isinstance(self.close_failed, TimedOut):
            return "unknown", "not looked at: it does not close"
        first = look(self.folder)
        for episode in (self.played * _CYCLES)[:_CYCLES]:
            async with self._open() as driver:
                await driver.reset(episode.task)
                with contextlib.suppress(*TOLD, EpisodeError):
                    await apply(driver, episode.actions[0])
        grown = since(first, look(self.folder))
        until = perf_counter() + _SETTLE_S
        while any(len(grown[kind]) >= _CYCLES for kind in KINDS) and perf_counter() < until:
            await asyncio.sleep(0.02)
            grown = since(first, look(self.folder))
        for kind in KINDS:
            if len(grown[kind]) >= _CYCLES:
                return "broken", f"{len(grown[kind])} more after {_CYCLES} closed episodes: {kind} {_some(grown, kind)}"
        left = since(self.before, look(self.folder))
        if left["process"]:
            return "broken", f"still running: process {_some(left, 'process')}"
        for kind in ("thread", "temporary file"):
            if left[kind]:
                return "warning", f"once, perhaps for all episodes together: {kind} {_some(left, kind)}"
        return "ok", ""

    # -- helpers -----------------------------------------------------------------------------------------------------

    def _is_broken(self, name: str) -> bool:
        return any(finding.name == name and finding.status == "broken" for finding in self.report.findings)

    def _add(self, name: str, detail: str) -> None:
        for finding in self.report.findings:
            if finding.name == name:
                finding.detail += f" ({detail})"


class _Looking:
    """Plays an episode again, and looks at it between all turns."""

    def __init__(self, driver: Driver, episode: Episode) -> None:
        self.driver, self.was = driver, episode
        self.playing = Playing(driver, episode.task, replayed(episode.actions), episode.turns)

    async def differs(self) -> str:
        """What looking has changed; empty if nothing."""
        await self.playing.begin()
        try:
            more = True
            while more:
                if found := await self._look():
                    return found
                more = await self.playing.turn()
            now = await self.playing.end()
        except IndexError:
            return "the episode was longer when it was looked at"
        found_pair = difference(self.was.seen, now.seen)
        return f"{found_pair[0]} then {found_pair[1]}, when it was looked at" if found_pair else ""

    async def _look(self) -> str:
        for name in ("state_key", "tools", "state"):
            one, two = await self._ask(name), await self._ask(name)
            if one != two:
                return f"{name}() says {str(one)[:60]}, and then {str(two)[:60]}"
        return ""

    async def _ask(self, name: str) -> Any:
        answer = getattr(self.driver, name)()
        return await answer if asyncio.iscoroutine(answer) else answer


def _some(left: Left, kind: str) -> str:
    names = sorted(set(left[kind].values()))
    return ", ".join(names[:3]) + (" …" if len(names) > 3 else "")


__all__ = ["GARBAGE", "PROMISES", "Agent", "Suite"]
