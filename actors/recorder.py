"""Grows one trajectory, token by token true: the only place where an agent loop meets token ids.

Promises (law 1, law 2):
- the ids sent to the engine for a turn are exactly the ids recorded so far plus the turn's opening; the ids recorded
  for it are exactly those that were sent and sampled;
- what the agent sampled is `POLICY`, with the engine's logprob and version; all else is `TEMPLATE` or `ENVIRONMENT`.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Protocol

import numpy as np

from troupe.actors.rendering import ChatML
from troupe.protocol.messages import Generate, Generated, RunEpisode, Sampling
from troupe.protocol.trajectory import POLICY, TEMPLATE, Node

_NOTHING = np.zeros(0, np.int32)
_NO_LOGPROBS = np.zeros(0, np.float32)


@dataclass(slots=True)
class Reply:
    """The agent's turn: its message without the think block, its thoughts, and whether it was cut by max_tokens."""

    text: str
    think: str
    truncated: bool
    seconds: float


class Speaks(Protocol):
    """Whatever samples tokens: the router in a run, an engine in a test."""

    async def generate(self, request: Generate) -> Generated: ...


class Recorder:
    """One agent's memory of one episode."""

    def __init__(self, episode: RunEpisode, renderer: ChatML, policy: Speaks) -> None:
        self.nodes: list[Node] = []
        self._episode = episode
        self._renderer = renderer
        self._policy = policy
        self._ids: list[int] = []
        self._close: list[int] = []
        self._turn = 0
        sampling = episode.sampling
        self._sampling = Sampling(
            sampling.temperature,
            sampling.top_p,
            sampling.top_k,
            sampling.max_tokens,
            sampling.stop_ids or renderer.stop_ids,
        )

    @property
    def length(self) -> int:
        """Tokens so far."""
        return len(self._ids)

    def observe(self, role: str, text: str, step: int = -1) -> None:
        """Adds somebody else's message (system, user or tool)."""
        ids, provenance = self._renderer.message(role, text)
        ids = self._close + ids
        provenance = [TEMPLATE] * len(self._close) + provenance
        self._close = []
        self._add(role, text, step, ids, np.asarray(provenance, np.uint8), _NO_LOGPROBS, _NOTHING)

    async def act(self, step: int) -> Reply:
        """Lets the agent speak and records exactly what it said."""
        opening = self._close + self._renderer.opening()
        self._close = []
        request = Generate(
            request=f"{self._episode.episode}/{self._episode.attempt}/{self._turn}",
            session=f"{self._episode.episode}/{self._episode.attempt}",
            prompt=np.asarray(self._ids + opening, np.int32),
            sampling=self._sampling,
            seed=(self._episode.seed * 1_000_003 + self._turn) & 0x7FFF_FFFF_FFFF_FFFF,
        )
        self._turn += 1
        loop = asyncio.get_running_loop()
        began = loop.time()
        said = await self._policy.generate(request)
        sampled = said.tokens.tolist()
        provenance = np.full(len(opening) + len(sampled), POLICY, np.uint8)
        provenance[: len(opening)] = TEMPLATE
        parsed = self._renderer.parse(sampled)
        text = self._renderer.decode(sampled)
        self._add("assistant", text, step, opening + sampled, provenance, said.logprobs, said.versions)
        self._close = self._renderer.closing(sampled)
        return Reply(parsed.text, parsed.think, said.finish != "stop", loop.time() - began)

    def _add(
        self,
        role: str,
        text: str,
        step: int,
        ids: list[int],
        provenance: np.ndarray,
        logprobs: np.ndarray,
        versions: np.ndarray,
    ) -> None:
        node = Node(len(self.nodes) - 1, role, step, np.asarray(ids, np.int32), provenance, logprobs, versions, text)
        node.check()
        self.nodes.append(node)
        self._ids += ids
