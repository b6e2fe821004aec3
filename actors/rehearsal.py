"""An episode without a model: what the scripted player would do, or tools and words picked at random."""

from __future__ import annotations

import random

from troupe.envs.base import action_of
from troupe.envs.check import player_or_guesser
from troupe.envs.drive import Driver
from troupe.protocol.errors import BadArguments, InvalidAction, UnknownTool
from troupe.protocol.messages import Rehearsed
from troupe.protocol.trajectory import Task


async def play(driver: Driver, task: Task, seed: int, max_turns: int, done: Rehearsed) -> None:
    """Plays `task`, writing into `done` as it goes. Raises what breaks the world: EpisodeError or TimedOut."""
    act = player_or_guesser(driver, random.Random(seed), noise=0.0)
    observation = await driver.reset(task)
    for number in range(max_turns):
        action = act(observation, number)
        done.steps += 1
        try:
            turn = await (driver.step(action_of(action)) if isinstance(action, str) else driver.call(*action))
        except (UnknownTool, BadArguments, InvalidAction) as error:
            observation = str(error)
            done.refused += 1
            continue
        observation = turn.text
        done.reward += turn.reward
        if turn.done:
            return
    verdict = await driver.verify()
    done.reward += verdict.reward if verdict is not None else 0.0
