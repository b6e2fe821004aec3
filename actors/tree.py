"""Sampling as a tree (TreePO, arXiv:2508.17445): a member of a group goes on from where a sibling was, instead of from nothing.

Owns who forks from whom, where, and how what is shared is played again. Promises:
- all of it follows from the member's number, its seed and what the sibling said: a run that resumes grows the same tree;
- the world is made anew and told what the sibling said, in the sibling's own ids, which keep their logprobs and versions;
  nothing of it is sampled or tokenized again (laws 1, 2 and 4);
- the new episode is fed exactly what the sibling was fed up to the fork, and its world pays and shows the same: else it is
  broken by NotReplayed, and never trained.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import numpy as np

from troupe.protocol.errors import NotReplayed
from troupe.protocol.messages import Generate, Generated
from troupe.protocol.trajectory import POLICY, Fork, Int32, Step, Trajectory

if TYPE_CHECKING:
    from troupe.actors.recorder import Speaks


def sibling_of(member: int, roots: int) -> int | None:
    """The member that `member` forks from; None for the first `roots`, which begin at the start. roots 0: all do.

    The tree doubles: once a member has ended, each later wave forks one more from it. With two roots, 2 and 3 fork from 0
    and 1, and 4 to 7 from 0 to 3.
    """
    if not roots or member < roots:
        return None
    wave = roots
    while 2 * wave <= member:
        wave *= 2
    return member - wave


@dataclass(slots=True)
class Said:
    """A turn of the sibling: what it was fed (ids) and what it answered."""

    prompt: Int32
    answer: Generated


def turns_of(trajectory: Trajectory) -> list[Said]:
    """The turns of a trajectory in the order in which they ended."""
    turns = []
    paths: list[list[Any]] = []  # the ids up to and including each node
    for node in trajectory.nodes:
        before = paths[node.parent] if node.parent >= 0 else []
        paths.append([*before, node.tokens])
        if len(node.logprobs):
            mine = node.provenance == POLICY
            finish = trajectory.steps[node.step].finish if node.step >= 0 else "stop"
            prompt = np.concatenate([*before, node.tokens[~mine]], dtype=np.int32)
            turns.append(Said(prompt, Generated(node.tokens[mine], node.logprobs, node.versions, finish, "sibling")))
    return turns


def drawn(turns: Sequence[Said], segment: int, seed: int) -> tuple[int, int] | None:
    """Where to fork: how many whole turns are kept, and how many tokens of the next one. None if there is no such place.

    Each place is as likely as the others: the beginning of any turn but the first and, with a segment, also every
    `segment` tokens within a turn.
    """
    places = [(turn, kept) for turn, said in enumerate(turns) for kept in range(0, len(said.answer.tokens), segment or 2**31)]
    return random.Random(f"fork/{seed}").choice(places[1:]) if len(places) > 1 else None


class Forking:
    """The policy of an episode that forks: it says what the sibling said, and then what the policy behind it says.

    steps: of the new episode, as they grow.
    """

    def __init__(self, policy: Speaks, steps: list[Step]) -> None:
        self._policy, self._steps = policy, steps
        self._left: list[Said] = []
        self._kept = 0
        self._sibling: Trajectory | None = None
        self.fork: Fork | None = None
        """What was taken from the sibling so far; None before `begin_with`."""

    def begin_with(self, sibling: Trajectory, segment: int, seed: int) -> None:
        """Forks from `sibling`, if it is long enough."""
        turns = turns_of(sibling)
        if place := drawn(turns, segment, seed):
            whole, self._kept = place
            self._left = turns[: whole + 1]
            self._sibling, self.fork = sibling, Fork(sibling.id, sibling.attempt)

    async def generate(self, request: Generate) -> Generated:
        """The next turn. Raises NotReplayed, and whatever the policy raises."""
        if self._sibling is None or self.fork is None or not self._left:
            return await self._policy.generate(request)
        said = self._left.pop(0)
        self._compare(self._sibling, request, said)
        answer, kept = said.answer, len(said.answer.tokens)
        if not self._left:
            kept = self._kept
            answer = await self._go_on(request, said.answer, kept)
        self.fork.tokens += kept
        return answer

    async def _go_on(self, request: Generate, said: Generated, kept: int) -> Generated:
        """The turn in which the fork lies: the first `kept` tokens of what was said, then what is sampled now."""
        if not kept:
            return await self._policy.generate(request)
        prompt = np.concatenate([request.prompt, said.tokens[:kept]])
        room = replace(request.sampling, max_tokens=request.sampling.max_tokens - kept)
        new = await self._policy.generate(replace(request, prompt=prompt, sampling=room))
        return replace(
            new,
            tokens=np.concatenate([said.tokens[:kept], new.tokens]),
            logprobs=np.concatenate([said.logprobs[:kept], new.logprobs]),
            versions=np.concatenate([said.versions[:kept], new.versions]),
        )

    def _compare(self, sibling: Trajectory, request: Generate, said: Said) -> None:
        """Raises NotReplayed if the world did not do again what it did for the sibling."""
        turn = len(self._steps) - 1
        for number, (mine, other) in enumerate(zip(self._steps, sibling.steps, strict=False)):
            for name in ("state_key", "reward", "parts", "invalid"):
                if (number < turn or name == "state_key") and getattr(mine, name) != getattr(other, name):
                    found = f"'{name}' of turn {number + 1} is {getattr(mine, name)!r} now and was {getattr(other, name)!r}"
                    raise self._differs(sibling, found)
        if not np.array_equal(request.prompt, said.prompt):
            raise self._differs(sibling, f"turn {turn + 1} is told something else")

    def _differs(self, sibling: Trajectory, found: str) -> NotReplayed:
        return NotReplayed(
            f"the same actions did not lead to where {sibling.id} was: {found}. A world that does not repeat itself cannot be "
            "sampled as a tree: set rollout.tree = 0"
        )
