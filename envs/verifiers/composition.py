"""Several verifiers make one reward: an outcome that decides, and named parts that may count only if a gate holds.

    graded = Composition(
        outcome=of("orders", StateMatch(wanted)),
        parts={"polite": of("answer", Judge(...)), "brief": lambda world: world.asked <= 1},
        weights={"polite": 0.1, "brief": 0.05},
    )

    async def verify(self):
        return await graded(self)

Promises:
- the outcome alone says whether the episode is a success;
- parts behind a closed gate are not in the reward, and not asked: a judge costs nothing where the task was failed;
- a verifier that raises, takes too long or gives no finite number breaks the episode, by its name (law 6). That holds for
  ValueError and InvalidAction as well: the agent is told only what the world itself raises before it asks.
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from troupe.envs.base import finite
from troupe.envs.calls import killable, leashed
from troupe.envs.returned import told
from troupe.envs.tools import Rewards
from troupe.envs.verifiers.bounds import number, seconds
from troupe.protocol.errors import ConfigError, EnvironmentFailed, EpisodeError, nearest

Verifier = Callable[[Any], float | Awaitable[float]]
"""Called with one thing: an answer, a state, a world. 1 is right and 0 is wrong, as a rule; more and less are allowed.

One that has `inline = True` takes microseconds and never blocks: it is called on the event loop. Other synchronous ones run
in a thread of their own.
"""

_OUTCOME = "outcome"
_TAKEN = ("outcome", "gate", "self")  # names that `Rewards` has itself


@dataclass(frozen=True, slots=True)
class Of:
    """A verifier, and where what it judges is found in what the composition is called with."""

    pick: Callable[[Any], Any]
    verifier: Verifier

    def __call__(self, subject: Any) -> float | Awaitable[float]:
        return self.verifier(self.pick(subject))


def of(where: str | Callable[[Any], Any], verifier: Verifier) -> Of:
    """`verifier`, of an attribute of the subject, or of what a quick function of the subject gives."""
    return Of((lambda subject: getattr(subject, where)) if isinstance(where, str) else where, verifier)


class Composition:
    """An outcome and parts, each a verifier of the same subject.

    gate: the part, or "outcome", that must reach `passes` for the other parts to count; None: all count. passes: the score
    (before its weight) that is a success, and opens the gate. weights: of the outcome and the parts, 1 where not given.
    partial: whether an outcome below `passes` is worth its score; else it is worth 0. timeout_s: for each verifier.
    Raises ConfigError for names that are not there, and for numbers that are none.
    """

    def __init__(
        self,
        outcome: Verifier,
        parts: Mapping[str, Verifier] | None = None,
        *,
        gate: str | None = _OUTCOME,
        passes: float = 1.0,
        weights: Mapping[str, float] | None = None,
        partial: bool = True,
        timeout_s: float = 30.0,
    ) -> None:
        for name in parts or {}:
            if name in _TAKEN:
                raise ConfigError(f"a part of a Composition cannot be called '{name}': call it otherwise")
        self.verifiers: dict[str, Verifier] = {_OUTCOME: outcome, **(parts or {})}
        for what, name in (*(("weight", name) for name in weights or {}), *([("gate", gate)] if gate else [])):
            if name not in self.verifiers:
                near = nearest(name, self.verifiers)
                raise ConfigError(f"Composition: no part '{name}' for a {what}.{near} Known: {', '.join(self.verifiers)}")
        self.gate, self.partial = gate, partial
        self.passes = number("Composition: passes", passes)
        self.timeout_s = seconds("Composition: timeout_s", timeout_s)
        given = {name: number(f"Composition: the weight of '{name}'", value) for name, value in (weights or {}).items()}
        self.weights = dict.fromkeys(self.verifiers, 1.0) | given

    async def __call__(self, subject: Any) -> Rewards:
        """What `subject` is worth. Raises EnvironmentFailed, or the EpisodeError of a verifier."""
        first = [_OUTCOME] if self.gate is None else sorted({_OUTCOME, self.gate})
        scores = await self._scores(first, subject)
        if self.gate is None or scores[self.gate] >= self.passes:
            scores |= await self._scores([name for name in self.verifiers if name not in scores], subject)
        else:
            scores = {_OUTCOME: scores[_OUTCOME]}
        success = scores[_OUTCOME] >= self.passes
        if not (success or self.partial):
            scores[_OUTCOME] = 0.0
        counted = {name: self.weights[name] * scores[name] for name in self.verifiers if name in scores}
        rewards = Rewards(counted.pop(_OUTCOME), None, **counted)
        rewards.success = success
        return rewards

    async def _scores(self, names: list[str], subject: Any) -> dict[str, float]:
        """Of verifiers that run at the same time; the first that fails ends the others."""
        tasks = [asyncio.ensure_future(score(name, self.verifiers[name], subject, self.timeout_s)) for name in names]
        try:
            return dict(zip(names, await asyncio.gather(*tasks), strict=True))
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


async def score(name: str, verifier: Verifier, subject: Any, timeout_s: float) -> float:
    """What one verifier gives, a finite number. Raises EnvironmentFailed that names it, or its own EpisodeError."""
    result, error = await _outcome(name, verifier, subject, timeout_s)
    if isinstance(error, EpisodeError | ConfigError):
        raise error
    if error is not None:
        raise EnvironmentFailed(f"verifier '{name}' raised {type(error).__name__}: {told(error)}") from error
    return finite(f"what verifier '{name}' gave", result)


async def _outcome(name: str, verifier: Verifier, subject: Any, timeout_s: float) -> tuple[Any, BaseException | None]:
    clock = asyncio.get_running_loop().time
    until = clock() + timeout_s
    try:
        while isinstance(verifier, Of):
            subject, verifier = verifier.pick(subject), verifier.verifier
        if getattr(verifier, "inline", False) or _is_async(verifier):
            result: Any = verifier(subject)
        else:
            result, error = await killable(partial(verifier, subject), timeout_s, f"verifier {name}")
            if error is not None:
                return None, error
        if not inspect.isawaitable(result):
            return result, None
        return await leashed(result, until - clock())
    except TimeoutError:
        return None, EnvironmentFailed(f"verifier '{name}' has not answered for {timeout_s:g} s")
    except Exception as error:
        return None, error


def _is_async(verifier: Verifier) -> bool:
    return inspect.iscoroutinefunction(verifier) or inspect.iscoroutinefunction(getattr(verifier, "__call__", None))  # noqa: B004
