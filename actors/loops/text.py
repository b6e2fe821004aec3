"""The plain loop: the world speaks, the agent answers with an action, until the world or a limit ends it.

An action that the world cannot read costs a turn; the agent is told and goes on. A turn cut by its token limit goes to the
world as far as it came.
"""

from __future__ import annotations

import asyncio

from troupe.actors.loops.base import LimitReached, Stage
from troupe.actors.rendering import Message
from troupe.protocol.errors import InvalidAction


async def text(stage: Stage) -> None:
    """Plays one episode. The observation of turn i belongs to step i, as does the action that answers it."""
    clock = asyncio.get_running_loop().time
    messages: list[Message] = [{"role": "system", "content": stage.system}] if stage.system else []
    messages.append({"role": "user", "content": await stage.driver.reset(stage.task)})
    while True:
        try:
            reply = await stage.act(messages)
        except LimitReached as limit:
            await stage.conclude(limit.stop)
            return
        step = stage.outcome.steps[-1]
        began = clock()
        try:
            turn = await stage.driver.step(reply.text)
        except InvalidAction as error:
            step.invalid = True
            messages.append({"role": "user", "content": f"Invalid action: {error}"})
            continue
        finally:
            step.env_s = clock() - began
        stage.outcome.credit(turn)
        if turn.done:
            await stage.conclude("terminated")
            return
        messages.append({"role": "user", "content": turn.text})
