"""The tool loop: the agent thinks, calls tools, reads what they answer, until it answers itself or a limit ends it.

Promises:
- every call of a turn is answered exactly once, in the order in which the agent wrote them, whichever finishes first;
- a call that cannot be run (broken JSON, no such tool, wrong arguments, cut by the token limit, beyond the number allowed)
  is answered with what is wrong; the episode goes on. Each is counted by its status, apart from tools that failed;
- a message without a call is the agent's answer and goes to the world; one that was cut is no answer: the agent is told.
"""

from __future__ import annotations

import asyncio

from troupe.actors.loops.base import LimitReached, Reply, Stage, arguments_of
from troupe.actors.rendering import Message, SaidCall
from troupe.envs.base import Turn
from troupe.protocol.errors import BadArguments, InvalidAction, UnknownTool
from troupe.protocol.trajectory import Call

CUT = "Your message was cut off at the limit of tokens for one turn. Be shorter."


async def react(stage: Stage) -> None:
    """Plays one episode of a world with tools."""
    messages: list[Message] = [{"role": "system", "content": stage.system}] if stage.system else []
    messages.append({"role": "user", "content": await stage.driver.reset(stage.task)})
    called = 0
    while True:
        if called >= stage.limits.max_tool_calls:
            await stage.conclude("max_tool_calls")
            return
        try:
            reply = await stage.act(messages, stage.driver.tools())
        except LimitReached as limit:
            await stage.conclude(limit.stop)
            return
        if reply.calls:
            allowed = stage.limits.max_tool_calls - called
            called += len(reply.calls)
            done = await _answer_calls(stage, reply, messages, allowed)
        elif reply.finish == "length":
            messages.append({"role": "user", "content": CUT})
            done = False
        else:
            done = await _answer(stage, reply, messages)
        if done:
            await stage.conclude("terminated")
            return


async def _answer(stage: Stage, reply: Reply, messages: list[Message]) -> bool:
    """Gives the agent's message to the world. Returns whether the episode is over."""
    clock = asyncio.get_running_loop().time
    step = stage.outcome.steps[-1]
    began = clock()
    try:
        turn = await stage.driver.step(reply.text)
    except InvalidAction as error:
        step.invalid = True
        turn = Turn(f"Invalid action: {error}")
    finally:
        step.env_s += clock() - began
    stage.outcome.credit(turn)
    messages.append({"role": "user", "content": turn.text})
    return turn.done


async def _answer_calls(stage: Stage, reply: Reply, messages: list[Message], allowed: int) -> bool:
    """Runs the turn's calls at the same time and tells their answers in the calls' own order."""
    clock = asyncio.get_running_loop().time
    step = stage.outcome.steps[-1]
    began = clock()
    records = [Call(call.id, call.name, arguments_of(call), call.status) for call in reply.calls]
    step.calls = records
    for record in records[allowed:]:
        record.status = "refused"
    running = [asyncio.ensure_future(run_call(stage, c, r)) for c, r in zip(reply.calls, records, strict=True)]
    pending, over = set(running), False
    try:
        while pending and not over:
            finished, pending = await asyncio.wait(pending, return_when=asyncio.FIRST_COMPLETED)
            for call in [call for call in running if call in finished]:  # what is earned is earned, whatever else happens
                if call.exception() is None:
                    stage.outcome.credit(call.result())
                    over = over or call.result().done
            if not over:  # when the episode has ended, others no longer count
                for call in finished:
                    call.result()
    finally:
        for call in pending:
            call.cancel()
        await asyncio.gather(*running, return_exceptions=True)
        step.env_s += clock() - began
    for record, call in zip(records, running, strict=True):
        if call.cancelled() or call.exception() is not None:
            record.status = "refused"
        else:
            told = {"role": "tool", "content": call.result().text, "tool_call_id": record.id, "name": record.name}
            messages.append(told)
    return over


async def run_call(stage: Stage, call: SaidCall, record: Call) -> Turn:
    """Runs one call, writes how it ended into `record`, and returns what the agent is told."""
    if record.status == "refused":
        return Turn(f"Error: not run; an episode may make {stage.limits.max_tool_calls} tool calls.")
    if record.status == "truncated":
        return Turn(f"Error: the call was not run. {CUT}")
    if record.status == "malformed":
        return Turn(f"Error: {call.problem}. Write a call as a JSON object with a name and an object of arguments.")
    clock = asyncio.get_running_loop().time
    began = clock()
    try:
        return await stage.driver.call(call.name, call.arguments)
    except UnknownTool as error:
        record.status = "unknown_tool"
        return Turn(f"Error: {error}")
    except BadArguments as error:
        record.status = "bad_arguments"
        return Turn(f"Error: {error}")
    except InvalidAction as error:
        record.status = "failed"
        return Turn(f"Error: {error}")
    finally:
        record.seconds = clock() - began
