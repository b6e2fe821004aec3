"""Playing an episode and writing down what was done and seen, so that it can be played again and compared.

Promise: whoever acts draws from a generator of its own; nothing here touches the process's global chance.
"""

from __future__ import annotations

import asyncio
import random
import re
from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from itertools import pairwise
from json import dumps, loads  # a world may replace those of the module
from time import perf_counter, time
from typing import Any, NamedTuple

from troupe.envs.base import Task, TextWorld, ToolCall, Turn, action_of
from troupe.envs.drive import Driver
from troupe.envs.registry import make
from troupe.protocol.errors import BadArguments, ConfigError, InvalidAction, UnknownTool

TOLD = (InvalidAction, UnknownTool, BadArguments)
"""What an agent is told while the episode goes on."""

LONGEST = 100
"""Steps of an episode that a check plays."""

_GENERIC = ("left", "1", "50", "yes", "help", "go north", "answer: 1", "up", "hello")

Action = str | ToolCall
Agent = Callable[[str, int], Action]
"""(latest observation, turn) → what the agent does."""

Timer = Callable[[str], AbstractContextManager[Any]]
"""Takes the time of a call of that name."""


@dataclass(slots=True)
class Episode:
    """What was done and what came back: `seen`, comparable with `==`.

    turns: that it may have. index: of the task in its split. began: when, in seconds since 1970.
    words: blank-separated, of observations and messages. longest, characters: of one observation,
    and of all of them.
    """

    task: Task
    turns: int
    index: int = 0
    began: float = field(default_factory=time)
    actions: list[Action] = field(default_factory=list)
    seen: list[tuple[Any, ...]] = field(default_factory=list)
    words: int = 0
    longest: int = 0
    characters: int = 0
    reward: float = 0.0
    success: bool = False
    over: bool = False

    def heard(self, text: str) -> None:
        """Counts an observation."""
        self.words += len(text.split())
        self.longest = max(self.longest, len(text))
        self.characters += len(text)

    def credit(self, turn: Turn) -> None:
        """Takes down what a turn brought."""
        self.seen.append((turn.text, turn.reward, turn.done, turn.success, sorted(turn.parts.items())))
        self.reward += turn.reward
        if turn.done:
            self.success = turn.reward > 0 if turn.success is None else turn.success


class Playing:
    """An episode that is played turn by turn."""

    def __init__(
        self, driver: Driver, task: Task, act: Agent, turns: int = LONGEST, timer: Timer = lambda name: nullcontext()
    ) -> None:
        self._driver, self._act, self._timer = driver, act, timer
        self._observation = ""
        self.episode = Episode(task, min(turns, driver.world.max_turns))

    async def begin(self) -> None:
        """Resets the world."""
        episode = self.episode
        with self._timer("reset"):
            self._observation = await self._driver.reset(episode.task)
        episode.seen.append(("reset", self._observation, self._driver.state_key(), self._driver.tools()))
        episode.heard(self._observation)

    async def turn(self) -> bool:
        """One action; whether there is another one to come."""
        episode = self.episode
        action = self._act(self._observation, len(episode.actions))
        episode.actions.append(action)
        try:
            with self._timer("step"):
                turn = await apply(self._driver, action)
        except TOLD as error:
            self._observation = str(error)
            episode.seen.append((type(error).__name__, self._observation))
        else:
            self._observation, episode.over = turn.text, turn.done
            episode.credit(turn)
        episode.words += len((action if isinstance(action, str) else str(action.arguments)).split())
        episode.heard(self._observation)
        if not episode.over:
            episode.seen.append(("state", self._driver.state_key()))
        return not episode.over and len(episode.actions) < episode.turns

    async def end(self) -> Episode:
        """The world's verdict, if a limit of its own has ended the episode."""
        if not self.episode.over and self.episode.turns == self._driver.world.max_turns:
            verdict = await self._driver.verify()
            if verdict is not None:
                self.episode.credit(verdict)
        return self.episode


async def play(driver: Driver, task: Task, act: Agent, turns: int = LONGEST) -> Episode:
    """A whole episode, of at most `turns` and the world's `max_turns`."""
    playing = Playing(driver, task, act, turns)
    await playing.begin()
    while await playing.turn():
        pass
    return await playing.end()


async def apply(driver: Driver, action: Action) -> Turn:
    """One action, whatever its kind."""
    return await (driver.step(action_of(action)) if isinstance(action, str) else driver.call(*action))


# -- who plays -------------------------------------------------------------------------------------------------------


def scripted(driver: Driver, rng: random.Random, noise: float) -> Agent:
    """The world's own player. Raises ConfigError, when it is asked, if there is none."""

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
        seen: list[str] = re.findall(r"\w+", observation[:10_000])[:40]
        tools = driver.tools()
        if tools and rng.random() < 0.8:
            found = rng.choice(tools)
            words = [*seen, *(f"{one} {two}" for one, two in pairwise(seen)), *_GENERIC]
            return ToolCall(found["name"], sample(found["parameters"], found["parameters"], words, rng))
        return rng.choice([*_GENERIC, *seen])

    return act


def replayed(actions: list[Action]) -> Agent:
    """Does the same again. Raises IndexError if more is asked of it."""
    return lambda observation, turn: actions[turn]


def sample(schema: Mapping[str, Any], root: Mapping[str, Any], words: list[str], rng: random.Random) -> Any:
    """Something that a JSON schema allows, more or less."""
    if "$ref" in schema:
        return sample(root["$defs"][schema["$ref"].rpartition("/")[2]], root, words, rng)
    if "anyOf" in schema:
        return sample(schema["anyOf"][0], root, words, rng)
    if "enum" in schema:
        return rng.choice(schema["enum"])
    match schema.get("type"):
        case "object":
            parts = schema.get("properties", {})
            return {name: sample(parts[name], root, words, rng) for name in schema.get("required", parts)}
        case "array":
            return [sample(schema.get("items", {}), root, words, rng)]
        case "integer":
            return rng.randint(0, 20)
        case "number":
            return rng.random()
        case "boolean":
            return rng.random() < 0.5
        case "null":
            return None
    return schema.get("const", rng.choice(words))


# -- comparing -------------------------------------------------------------------------------------------------------


def plain(value: Any) -> Any:
    """As JSON has it: what another process can be told, and compares equal."""
    return loads(dumps(value, default=str))


# -- the player's score ----------------------------------------------------------------------------------------------


class PlayerScore(NamedTuple):
    """Means over episodes of the scripted player. words: blank-separated, of observations and messages together."""

    reward: float
    success: float
    turns: float
    words: float


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
    played = player_episodes(world, options, n, noise, split)
    return PlayerScore(
        reward=sum(e.reward for e in played) / n,
        success=sum(e.success for e in played) / n,
        turns=sum(len(e.actions) for e in played) / n,
        words=sum(e.words for e in played) / n,
    )


def player_episodes(
    world: type[TextWorld], options: Mapping[str, Any] | None, n: int, noise: float, split: str
) -> list[Episode]:
    """The scripted player's episodes of tasks 0..n-1 of `split`; raises as `player_score` does."""

    async def run() -> list[Episode]:
        driver = Driver(make(world, options or {}))
        try:
            return [
                await play(driver, world.task(split, i), scripted(driver, random.Random(i), noise), driver.world.max_turns)
                for i in range(n)
            ]
        finally:
            await driver.close()

    return asyncio.run(run())


class Meter:
    """How long calls take, and for how long the event loop stood still meanwhile. Use `beat` as a task beside them."""

    _BEAT_S = 0.005

    def __init__(self) -> None:
        self.seconds: dict[str, list[float]] = {}
        self.blocked: dict[str, list[float]] = {}
        self._last = self._gap = 0.0

    async def beat(self) -> None:
        """Notices, for ever, how long it was not run."""
        while True:
            await asyncio.sleep(self._BEAT_S)
            self._hear()

    def _hear(self) -> None:
        now = perf_counter()
        self._gap, self._last = max(self._gap, now - self._last), now

    def __call__(self, name: str) -> AbstractContextManager[None]:
        return _Span(self, name)


class _Span(AbstractContextManager[None]):
    def __init__(self, meter: Meter, name: str) -> None:
        self._meter, self._name = meter, name

    def __enter__(self) -> None:
        self._began = self._meter._last = perf_counter()
        self._meter._gap = 0.0

    def __exit__(self, *exc: object) -> None:
        self._meter._hear()
        self._meter.seconds.setdefault(self._name, []).append(perf_counter() - self._began)
        self._meter.blocked.setdefault(self._name, []).append(self._meter._gap)
