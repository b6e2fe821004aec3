"""A world that a player of numbers can play too: an array for what is observed, one of a few texts for an action.

A world offers this form by having two things beside `reset` and `step`:

    actions   what can be said now, as texts: a list (or property) that is always of the same length
    encode()  what the agent has been told and still matters, as an array of float32 that is always of the same shape

`TensorEnv` makes a `gymnasium.Env` of such a world. It steps the world itself with the text of the action, so that a
baseline and an LLM play the very same thing, for the same rewards.

Promises: what the world returns is looked at as a `Driver` does; a broken world raises, it is no reward (law 6); an action
that the world cannot read costs a turn and nothing else, as it does an LLM.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor, Future
from typing import Any, Protocol, TypeAlias

import gymnasium
import numpy as np

from troupe.envs import registry
from troupe.envs.base import TextWorld, Turn
from troupe.envs.drive import Driver
from troupe.protocol.errors import ConfigError, InvalidAction

Array: TypeAlias = np.ndarray[Any, np.dtype[np.float32]]

_TIMEOUT_S = 60.0
_TASKS = 2**31


class Tensors(Protocol):
    """What a world with a tensor form has."""

    @property
    def actions(self) -> Sequence[str]:
        """What can be said now."""

    def encode(self) -> Array:
        """What the next action is chosen by."""


def has_tensors(world: type[TextWorld]) -> bool:
    """Whether it has a tensor form."""
    return hasattr(world, "actions") and callable(getattr(world, "encode", None))


def names() -> list[str]:
    """Worlds known by name that have one; somebody's broken package has none."""
    found = []
    for name in registry.names():
        try:
            if has_tensors(registry.find(name)):
                found.append(name)
        except ConfigError:
            continue
    return found


def find(name: str) -> type[TextWorld]:
    """The world of that name. Raises ConfigError if it has no tensor form."""
    world = registry.find(name)
    if not has_tensors(world):
        raise ConfigError(
            f"world '{name}' has no tensor form (actions and encode(), see docs/baseline.md); these have: {', '.join(names())}"
        )
    return world


class TensorEnv(gymnasium.Env[Array, np.int64]):
    """The world called `name` as a `gymnasium.Env`: Box observations, Discrete actions.

    reset: a task of the train split, drawn by the seed; `options={"split": ..., "index": ...}` names one. info has "task"
    and, at the end, "success". An episode that uses up `max_turns` is truncated, after the world's own verdict if it has one.
    Raises ConfigError, EnvironmentFailed or TimedOut.
    """

    def __init__(self, name: str, options: Mapping[str, Any] | None = None) -> None:
        self.world = find(name)
        self._driver = Driver(registry.make(self.world, options or {}), executor=_Here(), timeout_s=_TIMEOUT_S)
        self._loop = asyncio.new_event_loop()
        self._turn = 0
        self._begin("train", 0)  # shapes are known once there is an episode
        self.observation_space = gymnasium.spaces.Box(-np.inf, np.inf, self._observed().shape, np.float32)
        self.action_space = gymnasium.spaces.Discrete(len(self._tensors.actions))

    @property
    def _tensors(self) -> Any:
        return self._driver.world

    def reset(self, *, seed: int | None = None, options: dict[str, Any] | None = None) -> tuple[Array, dict[str, Any]]:
        super().reset(seed=seed)
        chosen = options or {}
        index = chosen.get("index")
        return self._begin(
            str(chosen.get("split", "train")), int(self.np_random.integers(_TASKS)) if index is None else int(index)
        )

    def _begin(self, split: str, index: int) -> tuple[Array, dict[str, Any]]:
        task = self.world.task(split, index)
        self._loop.run_until_complete(self._driver.reset(task))
        self._turn = 0
        return self._observed(), {"task": task.id}

    def step(self, action: Any) -> tuple[Array, float, bool, bool, dict[str, Any]]:
        self._turn += 1
        reward, done = 0.0, False
        info: dict[str, Any] = {}
        turn = Turn("")
        try:
            turn = self._loop.run_until_complete(self._driver.step(self._tensors.actions[int(action)]))
        except InvalidAction as error:
            info["invalid"] = str(error)
        else:
            reward, done = turn.reward, turn.done
        truncated = not done and self._turn >= self._driver.world.max_turns
        if truncated and (verdict := self._loop.run_until_complete(self._driver.verify())) is not None:
            turn, reward = verdict, reward + verdict.reward
        if done or truncated:
            info["success"] = turn.done and (turn.reward > 0 if turn.success is None else turn.success)
        return self._observed(), reward, done, truncated, info

    def _observed(self) -> Array:
        return np.asarray(self._tensors.encode(), np.float32)

    def close(self) -> None:
        if not self._loop.is_closed():
            self._loop.run_until_complete(self._driver.close())
            self._loop.close()


class _Here(Executor):
    """Runs what it is given at once: nobody else waits in this loop."""

    def submit(self, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(function(*args, **kwargs))
        return future
