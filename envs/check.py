"""Is it a good world? A conformance suite for anybody's environment, and the scripted player's score.

Promises: a check never raises for what the world does wrong, it reports it; a broken promise names the task at which it
was seen; what could not be judged is said to be so, not passed; a world that hangs is waited for once, not once a check.
"""

from __future__ import annotations

import asyncio
import random
import re
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import pairwise, zip_longest
from statistics import median
from time import perf_counter
from typing import Any, NamedTuple

from troupe.envs.base import Task, TextWorld, ToolCall, Turn, action_of
from troupe.envs.drive import Driver
from troupe.envs.registry import make
from troupe.protocol.errors import BadArguments, ConfigError, EpisodeError, InvalidAction, TimedOut, UnknownTool

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
_TOLD = (InvalidAction, UnknownTool, BadArguments)  # what an agent is told while the episode goes on


_Found = tuple[bool | None, str]
"""ok and detail of a Finding."""


Action = str | ToolCall
Agent = Callable[[str, int], Action]
"""(latest observation, turn) → what the agent does."""


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
    actions: list[Action] = field(default_factory=list)
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


def _scripted(driver: Driver, rng: random.Random, noise: float) -> Agent:
    def act(observation: str, turn: int) -> Action:
        message = driver.play(rng, noise)
        if message is None:
            raise ConfigError(f"{driver.name} has no scripted player: define play(self, rng, noise)")
        return message

    return act


def player_or_guesser(driver: Driver, rng: random.Random, noise: float = 0.5) -> Agent:
    """The scripted player, as noisy as that; without one, tools and words picked at random, most of them from what was seen."""

    def act(observation: str, turn: int) -> Action:
        message = driver.play(rng, noise)
        if message is not None:
            return message
        seen: list[str] = re.findall(r"\w+", observation)[:40]
        tools = driver.tools()
        if tools and rng.random() < 0.8:
            found = rng.choice(tools)
            words = [*seen, *(f"{one} {two}" for one, two in pairwise(seen)), *_GENERIC]
            return ToolCall(found["name"], _sample(found["parameters"], found["parameters"], words, rng))
        return rng.choice([*_GENERIC, *seen])

    return act


def _sample(schema: Mapping[str, Any], root: Mapping[str, Any], words: list[str], rng: random.Random) -> Any:
    """Something that a JSON schema allows, more or less."""
    if "$ref" in schema:
        return _sample(root["$defs"][schema["$ref"].rpartition("/")[2]], root, words, rng)
    if "anyOf" in schema:
        return _sample(schema["anyOf"][0], root, words, rng)
    if "enum" in schema:
        return rng.choice(schema["enum"])
    match schema.get("type"):
        case "object":
            parts = schema.get("properties", {})
            return {name: _sample(parts[name], root, words, rng) for name in schema.get("required", parts)}
        case "array":
            return [_sample(schema.get("items", {}), root, words, rng)]
        case "integer":
            return rng.randint(0, 20)
        case "number":
            return rng.random()
        case "boolean":
            return rng.random() < 0.5
        case "null":
            return None
    return schema.get("const", rng.choice(words))


def _replayed(actions: list[Action]) -> Agent:
    return lambda observation, turn: actions[turn]


async def _apply(driver: Driver, action: Action) -> Turn:
    return await (driver.step(action_of(action)) if isinstance(action, str) else driver.call(*action))


async def _play(driver: Driver, task: Task, act: Agent, seconds: list[float]) -> _Episode:
    episode = _Episode(task)
    observation = await driver.reset(task)
    episode.seen.append(("reset", observation, driver.state_key(), driver.tools()))
    episode.words = len(observation.split())
    for index in range(driver.world.max_turns):
        action = act(observation, index)
        episode.actions.append(action)
        started = perf_counter()
        over = False
        try:
            turn = await _apply(driver, action)
        except _TOLD as error:
            observation = str(error)
            episode.seen.append((type(error).__name__, observation))
        else:
            observation, over = turn.text, turn.done
            _credit(episode, turn)
        seconds.append(perf_counter() - started)
        episode.words += len((action if isinstance(action, str) else str(action.arguments)).split()) + len(observation.split())
        if over:
            return episode
        episode.seen.append(("state", driver.state_key()))
    verdict = await driver.verify()
    if verdict is not None:
        _credit(episode, verdict)
    return episode


def _credit(episode: _Episode, turn: Turn) -> None:
    episode.seen.append((turn.text, turn.reward, turn.done, turn.success, sorted(turn.parts.items())))
    episode.reward += turn.reward
    if turn.done:
        episode.success = turn.reward > 0 if turn.success is None else turn.success


class _Suite:
    def __init__(self, world: type[TextWorld], options: dict[str, Any], episodes: int, timeout_s: float) -> None:
        self.world, self.options, self.episodes, self.timeout_s = world, options, episodes, timeout_s
        self.report = Report(world.name or world.__name__)
        self.drivers: list[Driver] = []
        self.played: list[_Episode] = []

    async def run(self) -> Report:
        threads = set(threading.enumerate())
        hung = ""
        for name, promise in (
            ("episodes run and give what they should", self._runs),
            ("same task and actions give the same episode", self._replays),
            ("nothing leaks into the next episode", self._leaks),
            ("garbage actions are invalid or harmless", self._garbage),
            ("an episode that a limit ends can be judged", self._judges),
            ("no held-out task is in training", self._splits),
        ):
            missing = promise in (self._replays, self._leaks) and len(self.played) < self.episodes
            if hung or missing:
                self._found(name, None, hung or "not looked at: there is no episode to replay")
                continue
            try:
                found = await promise()
            except TimedOut as error:
                found, hung = (False, str(error)), "not looked at: the world hangs"
            except EpisodeError as error:
                found = (False, str(error))
            if found is not None:
                self._found(name, *found)
        self._found("it closes and leaves no thread behind", *await self._closes(threads))
        return self.report

    def _driver(self) -> Driver:
        driver = Driver(make(self.world, self.options), timeout_s=self.timeout_s)
        self.drivers.append(driver)
        return driver

    def _found(self, name: str, ok: bool | None, detail: str = "") -> None:
        self.report.findings.append(Finding(name, ok, detail))

    async def _runs(self) -> _Found:
        seconds = [0.0]
        for index in range(self.episodes):
            driver = self._driver()
            agent = player_or_guesser(driver, random.Random(index))
            self.played.append(await _play(driver, self.world.task("train", index), agent, seconds))
        turns = sum(len(episode.actions) for episode in self.played)
        self.report.step_s = (median(seconds), max(seconds))
        speed = f"{median(seconds) * 1e6:.0f} µs a step, longest {max(seconds) * 1e6:.0f} µs"
        return True, f"{len(self.played)} episodes, {turns} steps, {speed}"

    async def _replays(self) -> _Found:
        return await self._again(self.played, self._driver)

    async def _leaks(self) -> _Found:
        driver = self._driver()
        return await self._again(self.played[::-1], lambda: driver)

    async def _again(self, played: list[_Episode], driver: Callable[[], Driver]) -> _Found:
        for episode in played:
            try:
                again = await _play(driver(), episode.task, _replayed(episode.actions), [])
            except IndexError:  # the episode went on where it had ended before
                return False, f"task {episode.task.id}: longer the second time"
            if again.seen != episode.seen:
                pairs = zip_longest(episode.seen, again.seen)
                was, now = next((str(a)[:80], str(b)[:80]) for a, b in pairs if a != b)
                return False, f"task {episode.task.id}, seed {episode.task.seed}: {was} then {now}"
        return True, ""

    async def _garbage(self) -> _Found:
        for kind, action in await self._rubbish():
            driver = self._driver()
            await driver.reset(self.world.task("train", 0))
            try:
                await _apply(driver, action)
            except _TOLD as told:
                if isinstance(told, UnknownTool):
                    return False, f"a tool that is offered cannot be called: {told}"
            except EpisodeError as error:
                return False, f"{kind}: {str(error)[:200]}"
        return True, ", ".join(GARBAGE)

    async def _rubbish(self) -> list[tuple[str, Action]]:
        """Messages; and for each tool calls with no arguments, with wrong ones, and with each garbage in each text."""
        rubbish: list[tuple[str, Action]] = list(GARBAGE.items())
        driver = self._driver()
        await driver.reset(self.world.task("train", 0))
        for found in driver.tools():
            name, schema = found["name"], found["parameters"]
            rubbish.append((f"{name} without arguments", ToolCall(name, {})))
            rubbish.append((f"{name} with objects", ToolCall(name, {key: {} for key in schema.get("properties", {})})))
            for kind, text in GARBAGE.items():
                arguments = _sample(schema, schema, [text], random.Random(0))
                rubbish.append((f"{name} with {kind}", ToolCall(name, arguments)))
        return rubbish

    async def _judges(self) -> _Found | None:
        """Whether `verify` can be asked when nothing has been done yet. None: the world has none."""
        driver = self._driver()
        await driver.reset(self.world.task("train", 0))
        return None if await driver.verify() is None else (True, "")

    async def _splits(self) -> _Found:
        driver, first = self._driver(), {}
        for split in ("train", "heldout"):
            first[split] = {await driver.reset(self.world.task(split, index)) for index in range(_SAMPLE)}
        shared = first["train"] & first["heldout"]
        if len(first["train"] | first["heldout"]) == 1:
            return None, "all tasks open with the same observation, so they cannot be told apart"
        detail = f"both splits open with {min(shared)[:80]!r}" if shared else f"{_SAMPLE} tasks of each compared"
        return not shared, detail

    async def _closes(self, before: set[threading.Thread]) -> _Found:
        for error in await asyncio.gather(*(driver.close() for driver in self.drivers), return_exceptions=True):
            if isinstance(error, EpisodeError | TimedOut):
                return False, str(error)
            if error is not None:
                raise error
        left = [t.name for t in set(threading.enumerate()) - before if not t.name.startswith("world-")]
        return not left, f"still running: {', '.join(sorted(left))}" if left else ""
