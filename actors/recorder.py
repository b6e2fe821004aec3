"""Grows one trajectory, token by token true: the only place where an agent loop meets token ids.

Whoever speaks for an agent hands over a whole conversation (`complete`), as to any chat API; the recorder finds what of it
the engine has been fed already. Promises (law 1, law 2):
- a conversation that goes on after a recorded turn extends the exact ids that were fed and sampled; any other one (old
  thoughts dropped, history compacted, another agent) is another branch, which shares the nodes that are the same;
- the ids of a branch are exactly those that the engine was fed and what it answered; the agent's are `POLICY`, with the
  engine's logprob and version, all else is `TEMPLATE` or `ENVIRONMENT`;
- nothing is recorded that was not fed, and a turn that would not fit is not begun: `LimitReached` says which limit it was.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from troupe.actors.loops.base import LimitReached, Reply
from troupe.actors.places import Places
from troupe.actors.rendering import Message, Part, Rendering, SaidCall, Tool, text_of, until
from troupe.protocol.messages import Generate, Generated, RunEpisode, Sampling
from troupe.protocol.trajectory import POLICY, TEMPLATE, Float32, Int32, Node, UInt8

_LONGEST_TOKEN = 64
"""Characters that a token has at most, on average over a long text."""
_NO_IDS = np.zeros(0, np.int32)
_NO_LOGPROBS = np.zeros(0, np.float32)
_NOTHING = Part(0, _NO_IDS, np.zeros(0, np.uint8))


class Speaks(Protocol):
    """Whatever samples tokens: the router in a run, perhaps behind `tree.Forking`; an engine in a test."""

    async def generate(self, request: Generate) -> Generated: ...


@dataclass(slots=True)
class _End:
    """A turn that was sampled, from which a conversation may go on. ids: the first `fed` were fed, the rest sampled."""

    node: int
    ids: Int32
    fed: int


@dataclass(slots=True)
class _Plan:
    """Where a conversation continues: after node `parent` whose branch is `ids`, with `parts` (the last one opens the turn)."""

    parent: int
    ids: Int32
    parts: list[Part]


class Recorder:
    """One episode's memory of what its agents were told and said."""

    def __init__(self, episode: RunEpisode, rendering: Rendering, policy: Speaks, context_window: int = 0) -> None:
        """context_window: tokens that the model can see; 0: unknown. The episode's own limit may be lower."""
        self.nodes: list[Node] = []
        self.tokens = 0
        """Tokens of all nodes."""
        self._episode, self._rendering, self._policy = episode, rendering, policy
        self._session = f"{episode.episode}/{episode.attempt}"
        windows = [window for window in (context_window, episode.limits.context_window) if window]
        self._window = min(windows, default=0)
        self._places, self._ends = Places(), dict[int, _End]()  # by the number of the place
        self._children: dict[tuple[int, str], list[int]] = {}
        self._turn = self._reserved = 0

    async def complete(
        self,
        messages: list[Message],
        tools: list[Tool] | None = None,
        *,
        agent: str = "main",
        step: int = -1,
        max_tokens: int | None = None,
        stop: list[str] | None = None,
    ) -> Reply:
        """Lets `agent` answer the conversation and records exactly what was fed and said, as part of step `step`.

        max_tokens, stop: a narrower limit and further stop strings for this turn. Raises LimitReached, and whatever the
        policy raises; the conversation is then as if nothing had been asked.
        """
        places, characters = self._places.of(agent, tools, messages)
        self._refuse_if_hopeless(characters)
        place, plan = places[-1], self._plan(places, messages, tools, agent)
        opening = len(plan.parts[-1].ids)
        prompt = _ids(plan.parts, plan.ids)
        sampling = self._sampling(len(prompt), len(prompt) - len(plan.ids), max_tokens, stop)
        turn, self._turn = self._turn, self._turn + 1
        request = Generate(
            request=f"{self._session}/{turn}",
            session=self._session,
            prompt=prompt,
            sampling=sampling,
            seed=(self._episode.seed * 1_000_003 + turn) & 0x7FFF_FFFF_FFFF_FFFF,
            min_version=self._episode.min_version,
            group=self._episode.group,
        )
        loop = asyncio.get_running_loop()
        began = loop.time()
        reserved = len(prompt) - len(plan.ids) + sampling.max_tokens
        self._reserved += reserved  # others may speak meanwhile
        try:
            answer = await self._policy.generate(request)
        finally:
            self._reserved -= reserved
        seconds = loop.time() - began
        sampled: list[int] = answer.tokens.tolist()
        if not len(sampled) == len(answer.logprobs) == len(answer.versions):
            told = f"{len(answer.logprobs)} logprobs and {len(answer.versions)} versions"
            raise ValueError(f"'{answer.generator}' answered with {len(sampled)} tokens but {told}")
        said, text = self._rendering.parse(sampled, prompt, tools), self._rendering.decode(sampled)
        parent = self._record_prompt(plan, messages, agent, step)
        ids = np.concatenate((prompt, answer.tokens), dtype=np.int32)
        provenance: UInt8 = np.frombuffer(_marks(TEMPLATE, opening) + _marks(POLICY, len(sampled)), np.uint8)
        own = ids[len(prompt) - opening :].copy()
        node = self._add(parent, "assistant", agent, step, own, provenance, text, answer.logprobs, answer.versions)
        reply = Reply(
            text=until(said.text, sampling.stop)[0],
            think=said.think,
            calls=[_identified(call, turn, n, answer.finish) for n, call in enumerate(said.calls)],
            finish=answer.finish,
            closed=said.closed,
            seconds=seconds,
            prompt_tokens=len(prompt),
            tokens=len(sampled),
        )
        self._ends[self._places.after(place, reply.message)] = _End(node, ids, len(prompt))
        return reply

    # -- where a conversation goes on --------------------------------------------------------------------------------

    def _plan(self, places: list[int], messages: list[Message], tools: list[Tool] | None, agent: str) -> _Plan:
        for count in range(len(messages), 0, -1):
            if end := self._ends.get(places[count]):
                new = messages[count:]
                fed, sampled = end.ids[: end.fed], end.ids[end.fed :]
                parts = self._rendering.extension(fed, sampled, new, tools) if new else None
                if parts is None:
                    break
                for part in parts[:-1]:
                    part.message += count
                return self._shared(_Plan(end.node, end.ids, parts), agent)
        return self._shared(_Plan(-1, _NO_IDS, self._rendering.opening(messages, tools)), agent)

    def _shared(self, plan: _Plan, agent: str) -> _Plan:
        """Walks along the nodes that hold the plan's first ids already; what is left of its parts is new."""
        *told, opening = plan.parts
        if not self._children.get((plan.parent, agent)):  # nothing was ever said from there
            plan.parts = [*[part for part in told if len(part.ids)], opening]
            return plan
        ids, at = _ids(told), 0
        while held := [c for c in self._children.get((plan.parent, agent), ()) if self._holds(c, ids, at)]:
            plan.parent = held[0]
            at += len(self.nodes[held[0]].tokens)
        plan.ids = np.concatenate((plan.ids, ids[:at]))
        left: list[Part] = []
        carried = _NOTHING
        for part in told:
            rest = _behind(carried, part, at)
            partly = 0 < at < len(part.ids)
            at = max(0, at - len(part.ids))
            # The scaffold after a turn that was recorded whole belongs to what comes next, as in an extension.
            carried = rest if partly and bool((rest.provenance == TEMPLATE).all()) else _NOTHING
            if len(rest.ids) and rest is not carried:
                left.append(rest)
        plan.parts = [*left, _behind(carried, opening)]
        return plan

    def _holds(self, node: int, ids: Int32, at: int) -> bool:
        tokens = self.nodes[node].tokens
        return 0 < len(tokens) <= len(ids) - at and np.array_equal(tokens, ids[at : at + len(tokens)])

    # -- limits ------------------------------------------------------------------------------------------------------

    def _refuse_if_hopeless(self, characters: int) -> None:
        """A text that cannot fit whatever its tokens are is not tokenized at all: that alone could take minutes."""
        if self._window and characters > _LONGEST_TOKEN * self._window:
            raise LimitReached("context_window")
        if characters > _LONGEST_TOKEN * self._episode.limits.max_episode_tokens:
            raise LimitReached("max_tokens")

    def _sampling(self, prompt: int, added: int, max_tokens: int | None, stop: list[str] | None) -> Sampling:
        """The settings of a turn, shortened to what the episode and the context have left."""
        asked, limits = self._episode.sampling, self._episode.limits
        left = limits.max_episode_tokens - self.tokens - self._reserved - added
        if left < 1:
            raise LimitReached("max_tokens")
        room = min(asked.max_tokens, left, max_tokens if max_tokens is not None and max_tokens > 0 else asked.max_tokens)
        if self._window:
            room = min(room, self._window - prompt)
        if room < 1:
            raise LimitReached("context_window")
        return Sampling(
            temperature=asked.temperature,
            top_p=asked.top_p,
            top_k=asked.top_k,
            max_tokens=room,
            stop_ids=asked.stop_ids or self._rendering.stop_ids,
            stop=[text for text in (*asked.stop, *(stop or ())) if text],
        )

    # -- recording ---------------------------------------------------------------------------------------------------

    def _record_prompt(self, plan: _Plan, messages: list[Message], agent: str, step: int) -> int:
        """Adds a node for each new message of the prompt. Returns the last one."""
        parent = plan.parent
        for part in plan.parts[:-1]:
            message = messages[part.message]
            role = str(message.get("role", ""))
            step_of = -1 if role == "system" else step
            parent = self._add(parent, role, agent, step_of, part.ids, part.provenance, text_of(message))
        return parent

    def _add(
        self,
        parent: int,
        role: str,
        agent: str,
        step: int,
        ids: Int32,
        provenance: UInt8,
        text: str,
        logprobs: Float32 = _NO_LOGPROBS,
        versions: Int32 = _NO_IDS,
    ) -> int:
        self.nodes.append(Node(parent, role, step, ids, provenance, logprobs, versions, text, agent))
        self.tokens += len(ids)
        number = len(self.nodes) - 1
        self._children.setdefault((parent, agent), []).append(number)
        return number


def _ids(parts: list[Part], before: Int32 = _NO_IDS) -> Int32:
    return np.concatenate((before, *[part.ids for part in parts]))


def _behind(carried: Part, part: Part, at: int = 0) -> Part:
    """What is left of `part` from its id number `at` on, behind what is `carried` over to it."""
    ids, provenance = (carried.ids, part.ids[at:]), (carried.provenance, part.provenance[at:])
    return Part(part.message, np.concatenate(ids), np.concatenate(provenance))


def _marks(provenance: int, count: int) -> bytearray:
    return bytearray((provenance,)) * count


def _identified(call: SaidCall, turn: int, number: int, finish: str) -> SaidCall:
    call.id = call.id or f"call_{turn}_{number}"
    if call.status == "truncated" and finish == "stop":
        call.status = "malformed"  # the agent ended its turn there: nobody cut it
    return call
