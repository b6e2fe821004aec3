"""Is it a good world? A conformance suite for anybody's environment, and the scripted player's score.

Promises: a check never raises for what the world does wrong, it reports it; a broken promise names the task at which it
was seen; what could not be judged is said to be so, not passed.
"""

from __future__ import annotations

import asyncio
import random
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import zip_longest
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

from troupe.envs.base import Task, TextWorld, action_of
from troupe.envs.drive import Driver
from troupe.envs.registry import make
from troupe.protocol.errors import ConfigError, EpisodeError, InvalidAction, TimedOut

GARBAGE = {
    "empty": "",
    "blank": " \n\t ",
    "huge": "x" * 1_000_000,
    "huge number": "9" * 100_000,
    "null bytes": "\x00\x00left\x00",
    "unicode": "→ 左 ｌｅｆｔ ٣ 🧊\u202e",
    "lone surrogate": "\ud800",
    "braces": "{[(" * 5_000,
    "markup": "<think><|im_end|></tool_call>",
}
_GENERIC = ("left", "1", "50", "yes", "help", "go north", "answer: 1", "up", "hello")
_SAMPLE = 50  # tasks a split whose first observations are compared


@dataclass(slots=True)
class Finding:
    """One promise. ok: kept, broken, or (None) impossible to judge here."""

    name: str
    ok: bool | None
    detail: str = ""


@dataclass(slots=True)
class Report:
    """What `check` found. step_s: median and longest seconds of a step."""

    world: str
    findings: list[Finding] = field(default_factory=list)
    step_s: tuple[float, float] = (0.0, 0.0)

    @property
    def ok(self) -> bool:
        """No promise is broken."""
        return all(finding.ok is not False for finding in self.findings)

    def __str__(self) -> str:
        marks = {True: "ok  ", False: "FAIL", None: "?   "}
        lines = [f"{marks[f.ok]} {f.name}" + (f": {f.detail}" if f.detail else "") for f in self.findings]
        return "\n".join((f"{self.world}: {'conforms' if self.ok else 'does not conform'}", *lines))


class PlayerScore(NamedTuple):
    """Means over episodes of the scripted player. words: blank-separated, of observations and messages together."""

    reward: float
    success: float
    turns: float
    words: float


@dataclass(slots=True)
class _Episode:
    """What was done and what came back, comparable with `==`."""

    task: Task
    actions: list[str] = field(default_factory=list)
    seen: list[tuple[Any, ...]] = field(default_factory=list)
    words: int = 0
    reward: float = 0.0
    success: bool = False


def check(
    world: type[TextWorld], options: Mapping[str, Any] | None = None, episodes: int = 20, timeout_s: float = 30.0
) -> Report:
    """Runs the suite. Raises ConfigError only if the world cannot be made with `options`."""
    return asyncio.run(_Suite(world, dict(options or {}), episodes, timeout_s).run())


def player_score(
    world: type[TextWorld],
    options: Mapping[str, Any] | None = None,
    n: int = 200,
    noise: float = 0.0,
    split: str = "train",
) -> PlayerScore:
    """How the scripted player does on tasks 0..n-1 (n > 0) of `split`.

    Raises ConfigError if the world has no player, EnvironmentFailed or TimedOut if it breaks.
    """

    async def play() -> list[_Episode]:
        driver = Driver(make(world, options or {}))
        try:
            return [
                await _play(driver, world.task(split, index), _scripted(driver, random.Random(index), noise), [])
                for index in range(n)
            ]
        finally:
            await driver.close()

    played = asyncio.run(play())
    return PlayerScore(
        reward=sum(e.reward for e in played) / n,
        success=sum(e.success for e in played) / n,
        turns=sum(len(e.actions) for e in played) / n,
        words=sum(e.words for e in played) / n,
    )


Agent = Callable[[str, int], str]
"""(latest observation, turn) → message."""


def _scripted(driver: Driver, rng: random.Random, noise: float) -> Agent:
    def act(observation: str, turn: int) -> str:
        message = driver.play(rng, noise)
        if message is None:
            raise ConfigError(f"{driver.name} has no scripted player: define play(self, rng, noise)")
        return message

    return act


def _player_or_guesser(driver: Driver, rng: random.Random) -> Agent:
    """The scripted player, rather noisy; without one, words picked from what was observed and from a generic few."""

    def act(observation: str, turn: int) -> str:
        message = driver.play(rng, 0.5)
        return message if message is not None else rng.choice([*_GENERIC, *re.findall(r"\w+", observation)[:40]])

    return act


def _replayed(actions: list[str]) -> Agent:
    return lambda observation, turn: actions[turn]


async def _play(driver: Driver, task: Task, act: Agent, seconds: list[float]) -> _Episode:
    episode = _Episode(task)
    observation = await driver.reset(task)
    episode.seen.append(("reset", observation, driver.state_key()))
    episode.words = len(observation.split())
    for index in range(driver.world.max_turns):
        message = act(observation, index)
        episode.actions.append(message)
        started = perf_counter()
        try:
            turn = await driver.step(action_of(message))
        except InvalidAction as error:
            observation = str(error)
            episode.seen.append(("invalid", observation))
        else:
            observation = turn.text
            episode.seen.append((turn.text, turn.reward, turn.done, turn.success, sorted(turn.parts.items())))
            episode.reward += turn.reward
            if turn.done:
                episode.success = turn.reward > 0 if turn.success is None else turn.success
        seconds.append(perf_counter() - started)
        episode.words += len(message.split()) + len(observation.split())
        if episode.seen[-1][0] != "invalid" and turn.done:
            break
        episode.seen.append(("state", driver.state_key()))
    return episode


class _Suite:
    def __init__(self, world: type[TextWorld], options: dict[str, Any], episodes: int, timeout_s: float) -> None:
        self.world, self.options, self.episodes, self.timeout_s = world, options, episodes, timeout_s
        self.report = Report(world.name or world.__name__)
        self.drivers: list[Driver] = []

    async def run(self) -> Report:
        threads = set(threading.enumerate())
        played = await self._runs()
        if played is not None:
            await self._replays("same task and actions give the same episode", played, fresh=True)
            await self._replays("nothing leaks into the next episode", played[::-1], fresh=False)
        await self._garbage()
        await self._splits()
        await self._closes(threads)
        return self.report

    def _driver(self) -> Driver:
        driver = Driver(make(self.world, self.options), timeout_s=self.timeout_s)
        self.drivers.append(driver)
        return driver

    def _found(self, name: str, ok: bool | None, detail: str = "") -> None:
        self.report.findings.append(Finding(name, ok, detail))

    async def _runs(self) -> list[_Episode] | None:
        name, seconds, played = "episodes run and give what they should", [0.0], []
        for index in range(self.episodes):
            driver = self._driver()
            try:
                agent = _player_or_guesser(driver, random.Random(index))
                played.append(await _play(driver, self.world.task("train", index), agent, seconds))
            except (EpisodeError, TimedOut) as error:
                self._found(name, False, str(error))
                return None
        turns = sum(len(episode.actions) for episode in played)
        self.report.step_s = (median(seconds), max(seconds))
        speed = f"{median(seconds) * 1e6:.0f} µs a step, longest {max(seconds) * 1e6:.0f} µs"
        self._found(name, True, f"{len(played)} episodes, {turns} steps, {speed}")
        return played

    async def _replays(self, name: str, played: list[_Episode], *, fresh: bool) -> None:
        driver = self._driver()
        for episode in played:
            driver = self._driver() if fresh else driver
            try:
                again = await _play(driver, episode.task, _replayed(episode.actions), [])
            except (EpisodeError, TimedOut) as error:
                return self._found(name, False, str(error))
            except IndexError:  # the episode went on where it had ended before
                return self._found(name, False, f"task {episode.task.id}: longer the second time")
            if again.seen != episode.seen:
                pairs = zip_longest(episode.seen, again.seen)
                was, now = next((str(a)[:80], str(b)[:80]) for a, b in pairs if a != b)
                return self._found(name, False, f"task {episode.task.id}, seed {episode.task.seed}: {was} then {now}")
        self._found(name, True)

    async def _garbage(self) -> None:
        name = "garbage actions are invalid or harmless"
        for kind, action in GARBAGE.items():
            driver = self._driver()
            try:
                await driver.reset(self.world.task("train", 0))
                await driver.step(action)
            except InvalidAction:
                continue
            except (EpisodeError, TimedOut) as error:
                return self._found(name, False, f"{kind}: {str(error)[:200]}")
        self._found(name, True, ", ".join(GARBAGE))

    async def _splits(self) -> None:
        name = "no held-out task is in training"
        driver, first = self._driver(), {}
        try:
            for split in ("train", "heldout"):
                first[split] = {await driver.reset(self.world.task(split, index)) for index in range(_SAMPLE)}
        except (EpisodeError, TimedOut) as error:
            return self._found(name, False, str(error))
        shared = first["train"] & first["heldout"]
        if len(first["train"] | first["heldout"]) == 1:
            return self._found(name, None, "all tasks open with the same observation, so they cannot be told apart")
        detail = f"both splits open with {min(shared)[:80]!r}" if shared else f"{_SAMPLE} tasks of each compared"
        self._found(name, not shared, detail)

    async def _closes(self, before: set[threading.Thread]) -> None:
        name = "it closes and leaves no thread behind"
        for driver in self.drivers:
            try:
                await driver.close()
            except (EpisodeError, TimedOut) as error:
                return self._found(name, False, str(error))
        left = [t.name for t in set(threading.enumerate()) - before if not t.name.startswith("world-")]
        self._found(name, not left, f"still running: {', '.join(sorted(left))}" if left else "")
