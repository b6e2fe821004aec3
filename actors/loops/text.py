"""The plain loop: the world speaks, the agent answers with an action, until the world or a limit ends it.

An action that the world cannot read costs a turn; the agent is told and goes on. An episode that a limit ends was not
successful, and keeps the rewards that it has earned.
"""

from __future__ import annotations

import asyncio

from troupe.actors.loops.base import Agent, Outcome
from troupe.envs.base import Task, TextWorld
from troupe.envs.drive import Driver
from troupe.protocol.errors import InvalidAction
from troupe.protocol.messages import Limits
from troupe.protocol.trajectory import Step, StopReason


async def text(driver: Driver, world: type[TextWorld], task: Task, agent: Agent, limits: Limits, outcome: Outcome) -> None:
    """Plays one episode of `task`. The observation of turn i belongs to step i, as does the action that answers it."""
    clock = asyncio.get_running_loop().time
    if world.system:
        agent.observe("system", world.system)
    observation = await driver.reset(task)
    stop: StopReason = "max_turns"
    for turn in range(limits.max_turns):
        if agent.length >= limits.max_episode_tokens:
            stop = "max_tokens"
            break
        # Told only when the agent will act on it: what nobody was fed is no part of the trajectory.
        step = Step(state_key=driver.state_key())
        outcome.steps.append(step)
        agent.observe("user", observation, step=turn)
        reply = await agent.act(turn)
        step.action, step.generate_s = reply.text, reply.seconds
        began = clock()
        try:
            result = await driver.step(reply.text)
        except (InvalidAction, ValueError) as error:
            step.invalid = True
            observation = f"Invalid action: {error}"
            continue
        finally:
            step.env_s = clock() - began
        step.reward, step.parts, observation = float(result.reward), dict(result.parts), result.text
        if result.done:
            step.terminated = True
            outcome.stop = "terminated"
            outcome.success = bool(result.reward > 0) if result.success is None else result.success
            return
    if outcome.steps:
        outcome.steps[-1].truncated = True
    outcome.stop, outcome.success = stop, False
