"""The trajectory: a graph of messages whose tokens say where they came from.

Promises:
- a node holds only the tokens it *adds*; a branch (root to leaf) is exactly the sequence that the model saw;
- every token has a provenance; policy tokens, and only they, carry the engine's logprob and the weight version that
  sampled them, so `len(logprobs) == len(versions) == count(provenance == POLICY)`;
- the loss mask is never stored: it is `provenance == POLICY`. A node shared by several branches is trained once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal, TypeAlias

import numpy as np
from pydantic import BeforeValidator, ConfigDict

TEMPLATE, POLICY, ENVIRONMENT = 0, 1, 2
"""Provenance of a token: scaffold of the chat template; sampled by our policy; everything that came back."""


def _array(dtype: Any) -> Any:
    def convert(value: Any) -> Any:
        if not isinstance(value, np.ndarray):
            raise ValueError(f"expected an array of {np.dtype(dtype).name}, got {type(value).__name__}")
        return value.astype(dtype, copy=False)

    return BeforeValidator(convert)


Int32: TypeAlias = Annotated[np.ndarray[Any, np.dtype[np.int32]], _array(np.int32)]
UInt8: TypeAlias = Annotated[np.ndarray[Any, np.dtype[np.uint8]], _array(np.uint8)]
Float32: TypeAlias = Annotated[np.ndarray[Any, np.dtype[np.float32]], _array(np.float32)]

Status = Literal["completed", "failed", "cancelled"]
Kind = Literal["train", "eval"]
StopReason = Literal[
    "terminated",  # the world, or the agent's own program, said that the episode is over
    "max_turns",  # the agent used up its turns, or the world's own limit of them
    "max_tokens",  # the trajectory used up its tokens
    "context_window",  # the next turn would not fit into the model's context
    "max_tool_calls",  # the agent used up its tool calls
    "wall_clock",  # the episode, one of its generations or one of the world's steps took too long
    "failed",  # it broke; see `failure`
    "cancelled",  # nobody needs it any more
]
Finish = Literal[
    "stop",  # the agent ended its turn itself: with a stop id, which is kept as sampled, or a stop string
    "length",  # cut by a token limit; the scaffold that closes the turn is `TEMPLATE`
    "abort",  # cut from outside
]
CallStatus = Literal[
    "ok",  # the tool answered
    "failed",  # the tool was run and refused or failed; the agent was told
    "malformed",  # what the agent wrote is no call: broken JSON, no name, a list where an object belongs
    "unknown_tool",  # well formed, but the world has no tool of that name
    "bad_arguments",  # the tool exists and does not take these arguments
    "truncated",  # the turn was cut before the call was whole
    "refused",  # beyond a limit of the episode; not run
]
"""How a tool call ended. Only "failed" is the tool's doing, only "ok" and "failed" were run."""

_CONFIG = ConfigDict(arbitrary_types_allowed=True, extra="forbid")


@dataclass(slots=True)
class Task:
    """One thing to do. `(env, split, seed, data)` reproduces it exactly; `id` is for people and for joins."""

    __pydantic_config__ = _CONFIG
    id: str
    env: str
    split: str
    seed: int
    data: dict[str, Any] = field(default_factory=dict)


@dataclass(slots=True)
class Node:
    """One message.

    tokens: ids this node adds, shape [n]. provenance: shape [n]. logprobs, versions: one per policy token, in order.
    parent: index of the node before it in the trajectory, -1 for a root. step: index of its step, -1 outside of any.
    text: what it says, for people and harnesses; never turned back into tokens.
    """

    __pydantic_config__ = _CONFIG
    parent: int
    role: str
    step: int
    tokens: Int32
    provenance: UInt8
    logprobs: Float32
    versions: Int32
    text: str = ""
    agent: str = "main"

    def check(self) -> None:
        """Raises ValueError if the arrays contradict each other."""
        policy = int((self.provenance == POLICY).sum())
        if len(self.tokens) != len(self.provenance):
            raise ValueError(f"node '{self.role}': {len(self.tokens)} tokens but {len(self.provenance)} provenances")
        if not (len(self.logprobs) == len(self.versions) == policy):
            raise ValueError(
                f"node '{self.role}': {policy} policy tokens, {len(self.logprobs)} logprobs, {len(self.versions)} versions"
            )


@dataclass(slots=True)
class Call:
    """One tool call of a turn. `arguments`: JSON as the agent wrote it, however broken. `seconds`: the tool's own."""

    __pydantic_config__ = _CONFIG
    id: str
    name: str
    arguments: str
    status: CallStatus
    seconds: float = 0.0


@dataclass(slots=True)
class Step:
    """One act → observe round. `parts` are named parts of `reward`; `state_key` is the anchor state acted from.

    calls: the turn's tool calls, in the order in which the agent wrote them. finish: how the turn's sampling ended.
    """

    __pydantic_config__ = _CONFIG
    reward: float = 0.0
    parts: dict[str, float] = field(default_factory=dict)
    state_key: str = ""
    action: str = ""
    invalid: bool = False
    terminated: bool = False
    truncated: bool = False
    generate_s: float = 0.0
    env_s: float = 0.0
    finish: Finish = "stop"
    calls: list[Call] = field(default_factory=list)


@dataclass(slots=True)
class Failure:
    """Why an episode broke. `where` names the pool and the call."""

    __pydantic_config__ = _CONFIG
    kind: Literal["infrastructure", "data"]
    type: str
    message: str
    where: str = ""


@dataclass(slots=True)
class Fork:
    """Where a trajectory left its sibling, attempt `attempt` of `episode`: it began with the first `tokens` that the policy
    said there, and all that it was told until then. Those tokens keep the logprobs and versions that they have there."""

    __pydantic_config__ = _CONFIG
    episode: str
    attempt: int
    tokens: int = 0


@dataclass(slots=True)
class Trajectory:
    """One attempt at one episode.

    id: the episode's id, the same for all its attempts. group: trajectories of one task and seed share it.
    step: the training step that this episode was born for (for an evaluation: the version evaluated).
    reward: return over all steps; meaningless unless `status` is "completed". success: the world's verdict, None if
    it has none. sampling: settings it was sampled with. pool: the actor that ran it. fork: None if it began at the start.
    """

    __pydantic_config__ = _CONFIG
    id: str
    attempt: int
    group: int
    member: int
    kind: Kind
    step: int
    task: Task
    status: Status
    stop: StopReason
    nodes: list[Node] = field(default_factory=list)
    steps: list[Step] = field(default_factory=list)
    reward: float = 0.0
    success: bool | None = None
    failure: Failure | None = None
    sampling: dict[str, Any] = field(default_factory=dict)
    pool: str = ""
    seed: int = 0
    started_at: float = 0.0
    seconds: float = 0.0
    fork: Fork | None = None

    @property
    def policy_tokens(self) -> int:
        """Number of tokens that the policy said."""
        return sum(len(node.logprobs) for node in self.nodes)

    @property
    def sampled_tokens(self) -> int:
        """Of the policy's tokens those that were sampled for this trajectory, not for the sibling that it forked from."""
        return self.policy_tokens - (self.fork.tokens if self.fork else 0)

    @property
    def versions(self) -> tuple[int, int]:
        """Oldest and newest weight version among the sampled tokens; (-1, -1) if there is none."""
        seen = [node.versions for node in self.nodes if len(node.versions)]
        if not seen:
            return (-1, -1)
        flat = np.concatenate(seen)
        return int(flat.min()), int(flat.max())

    def branches(self) -> Iterator[list[int]]:
        """Each path from a root to a leaf, as node indices, in the order of the leaves."""
        return branches_of(self.nodes)

    def samples(self) -> Iterator[Sample]:
        """Each branch as a training sample. A policy token that several branches share is masked in all but the first."""
        return samples_of(self.nodes)


def branches_of(nodes: list[Node]) -> Iterator[list[int]]:
    """See `Trajectory.branches`."""
    has_child = {node.parent for node in nodes}
    for leaf in range(len(nodes)):
        if leaf in has_child:
            continue
        path = [leaf]
        while nodes[path[-1]].parent >= 0:
            path.append(nodes[path[-1]].parent)
        yield path[::-1]


def samples_of(nodes: list[Node]) -> Iterator[Sample]:
    """See `Trajectory.samples`."""
    trained: set[int] = set()
    for branch in branches_of(nodes):
        yield _sample(nodes, branch, trained)
        trained.update(branch)


@dataclass(slots=True)
class Sample:
    """A token sequence ready for the learner; all arrays have shape [n].

    mask: True where the token is trained (sampled by the policy, not yet counted in an earlier branch).
    logprobs: what the engine said, 0 where `mask` is False. versions: -1 where `mask` is False.
    steps: step index of each token, -1 outside of any.
    """

    tokens: Int32
    mask: np.ndarray[Any, np.dtype[np.bool_]]
    logprobs: Float32
    versions: Int32
    steps: Int32


def _sample(nodes: list[Node], branch: list[int], trained: set[int]) -> Sample:
    n = sum(len(nodes[i].tokens) for i in branch)
    sample = Sample(
        tokens=np.empty(n, np.int32),
        mask=np.zeros(n, np.bool_),
        logprobs=np.zeros(n, np.float32),
        versions=np.full(n, -1, np.int32),
        steps=np.full(n, -1, np.int32),
    )
    at = 0
    for i in branch:
        node = nodes[i]
        span = slice(at, at + len(node.tokens))
        at = span.stop
        sample.tokens[span] = node.tokens
        sample.steps[span] = node.step
        if i not in trained:
            mine = node.provenance == POLICY
            sample.mask[span] = mine
            sample.logprobs[span][mine] = node.logprobs
            sample.versions[span][mine] = node.versions
    return sample
