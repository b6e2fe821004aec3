"""How an agent and a world take turns: a loop sees messages, never tokens.

Promises of a loop:
- it records one `Step` for each of the agent's turns, in order, and says why the episode stopped;
- at a limit it ends the episode with what was earned: the world is asked for its verdict, and nothing is cut silently;
- it never swallows an error of the world or of the policy: `EpisodeError` and `TimedOut` leave it as they are.
"""

from __future__ import annotations

import json
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any, Protocol

from troupe.actors.rendering import Message, SaidCall, Tool
from troupe.envs.base import Task, Turn
from troupe.envs.drive import Driver
from troupe.protocol.errors import ConfigError
from troupe.protocol.messages import Limits
from troupe.protocol.trajectory import Finish, Step, StopReason


class LimitReached(Exception):
    """A limit of the episode: the turn that was asked for is not begun. `stop` names it."""

    def __init__(self, stop: StopReason) -> None:
        super().__init__(f"the episode has reached its limit '{stop}'")
        self.stop = stop


@dataclass(slots=True)
class Reply:
    """The agent's turn. text: its message without thoughts and calls. calls: in the order in which it wrote them.

    closed: False if it was cut inside a thought. tokens: sampled. prompt_tokens: fed, the whole conversation.
    """

    text: str
    think: str = ""
    calls: list[SaidCall] = field(default_factory=list)
    finish: Finish = "stop"
    closed: bool = True
    seconds: float = 0.0
    prompt_tokens: int = 0
    tokens: int = 0

    @property
    def message(self) -> Message:
        """The turn as a message of the conversation that goes on, calls included, however broken."""
        message: Message = {"role": "assistant", "content": self.text}
        if self.think:
            message["reasoning_content"] = self.think
        if self.calls:
            message["tool_calls"] = [
                {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": arguments_of(call)}}
                for call in self.calls
            ]
        return message


def arguments_of(call: SaidCall) -> str:
    """The arguments as JSON text, or the call as it was written where there is no JSON to be had."""
    return json.dumps(call.arguments) if call.status in ("ok", "unknown_tool") else call.raw


@dataclass(slots=True)
class Outcome:
    """What an episode came to, filled in while it goes on, so that a broken episode still shows how far it got."""

    stop: StopReason = "failed"
    steps: list[Step] = field(default_factory=list)
    success: bool | None = None

    @property
    def reward(self) -> float:
        """Return: the sum of the steps' rewards."""
        return float(sum(step.reward for step in self.steps))

    @property
    def over(self) -> bool:
        """Has the world ended the episode?"""
        return bool(self.steps) and (self.steps[-1].terminated or self.steps[-1].truncated)

    def credit(self, turn: Turn) -> None:
        """Adds what the world gave to the latest step. A success, once told, is not taken back by silence."""
        step = self.steps[-1]
        step.reward += float(turn.reward)
        for name, value in turn.parts.items():
            step.parts[name] = step.parts.get(name, 0.0) + value
        step.terminated = step.terminated or (turn.done and not turn.truncated)
        step.truncated = step.truncated or (turn.done and turn.truncated)
        if turn.success is not None:
            self.success = turn.success
        elif turn.done and self.success is None:
            self.success = turn.reward > 0


class Completes(Protocol):
    """The policy, as loops know it: a conversation in, the next turn out. `recorder.Recorder` is the real one."""

    async def complete(
        self,
        messages: list[Message],
        tools: list[Tool] | None = None,
        *,
        agent: str = "main",
        step: int = -1,
        max_tokens: int | None = None,
        stop: list[str] | None = None,
    ) -> Reply: ...


@dataclass(slots=True)
class Stage:
    """What a loop is given: the world (through its driver), the policy, the limits, and where to write the outcome."""

    driver: Driver
    system: str
    task: Task
    policy: Completes
    limits: Limits
    outcome: Outcome

    async def act(self, messages: list[Message], tools: list[Tool] | None = None) -> Reply:
        """The agent's next turn, which goes on `messages`. Raises LimitReached before the turn is begun."""
        reply = await self.turn(messages, tools)
        messages.append(reply.message)
        return reply

    async def turn(self, messages: list[Message], tools: list[Tool] | None = None, **how: Any) -> Reply:
        """A turn of some agent, as a new step. how: see `Completes.complete`. Raises LimitReached before it is begun."""
        steps = self.outcome.steps
        if len(steps) >= self.limits.max_turns:
            raise LimitReached("max_turns")
        step, number = Step(state_key=self.driver.state_key()), len(steps)
        steps.append(step)
        try:
            reply = await self.policy.complete(messages, tools, step=number, **how)
        except (LimitReached, ConfigError, TypeError, AttributeError, ValueError):  # nothing was fed
            if len(steps) == number + 1:  # else another agent has begun its turn meanwhile
                steps.pop()
            raise
        step.action, step.generate_s, step.finish = reply.text, reply.seconds, reply.finish
        return reply

    async def conclude(self, stop: StopReason) -> None:
        """Ends the episode with `stop` (a limit of the world's own is "max_turns"). The world is asked for its verdict
        unless it has ended the episode itself."""
        outcome = self.outcome
        outcome.stop = "max_turns" if outcome.steps and outcome.steps[-1].truncated else stop
        if not outcome.steps or outcome.over:
            outcome.success = bool(outcome.success)
            return
        verdict = await self.driver.verify()
        if verdict is not None:
            outcome.credit(verdict)
        outcome.steps[-1].terminated = stop == "terminated"
        outcome.steps[-1].truncated = stop != "terminated"
        outcome.success = bool(outcome.success)


Loop = Callable[[Stage], Awaitable[None]]
"""A loop runs one episode and writes what it came to into the outcome that it is given."""
