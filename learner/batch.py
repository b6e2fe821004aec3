"""A training batch as flat arrays: which sequences go through the model, and what belongs to their trained tokens.

Promises:
- only completed training trajectories with finite rewards and logprobs pass, each id once; anything else is a
  BatchError that names it (laws 3, 6 and 8): what to leave out is decided before, visibly, never here;
- the result does not depend on the order of the trajectories (law 5);
- a token is trained exactly where its provenance is `policy` (law 2), and once, however many branches share it.
"""

from __future__ import annotations

import itertools
import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from troupe.learner.advantages import Array, Estimator, Group
from troupe.learner.errors import BatchError
from troupe.learner.packing import Trainable, trainable
from troupe.protocol.trajectory import Trajectory

Floats = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(slots=True)
class TrainingBatch:
    """What the trainer needs of a batch.

    sequences: those with trained tokens. owner: trajectory (in order of id) of each sequence. The flat arrays have one
    entry per trained token [k]: advantage, rollout (the engine's logprob) and version (of the weights that sampled it).
    metrics: of the rewards and sizes.
    """

    sequences: list[Trainable]
    owner: list[int]
    advantage: Floats
    rollout: Floats
    version: np.ndarray[Any, np.dtype[np.int32]]
    metrics: dict[str, float]


def assemble(trajectories: list[Trajectory], estimator: Estimator) -> TrainingBatch:
    """Checks, groups and flattens `trajectories`. Raises BatchError."""
    if not trajectories:
        raise BatchError("an empty batch: there is nothing to train on")
    for trajectory in trajectories:
        _check(trajectory)
    ordered = sorted(trajectories, key=lambda t: t.id)
    for one, other in itertools.pairwise(ordered):
        if one.id == other.id:
            raise BatchError(f"trajectory '{one.id}' is there twice (attempts {one.attempt} and {other.attempt})")

    members: dict[int, list[Trajectory]] = {}
    for trajectory in ordered:
        members.setdefault(trajectory.group, []).append(trajectory)
    groups = [Group(m, np.array([t.reward for t in m], np.float64)) for m in members.values()]
    advantage_of: dict[str, Array] = {}
    for group in groups:
        values = estimator(group)
        if len(values) != len(group.trajectories):
            raise BatchError(f"the estimator gave {len(values)} advantages for {len(group.returns)} trajectories")
        for trajectory, value in zip(group.trajectories, values, strict=True):
            advantage_of[trajectory.id] = _per_token(trajectory, value)

    sequences: list[Trainable] = []
    owner: list[int] = []
    advantage, rollout, version = [np.zeros(0)], [np.zeros(0)], [np.zeros(0, np.int32)]
    first = tokens = 0
    for index, trajectory in enumerate(ordered):
        temperature = float(trajectory.sampling.get("temperature", 1.0))
        advantage.append(advantage_of[trajectory.id][_sample_order(trajectory)])
        for sample in trajectory.samples():
            tokens += len(sample.tokens)
            if not sample.mask.any():
                continue
            sequence = trainable(
                sample.tokens, sample.mask, first=first, temperature=temperature, name=f"trajectory '{trajectory.id}'"
            )
            first += len(sequence.at)
            sequences.append(sequence)
            owner.append(index)
            rollout.append(sample.logprobs[sequence.at])
            version.append(sample.versions[sequence.at])
    if not sequences:
        raise BatchError(f"none of the {len(ordered)} trajectories has a policy token: there is nothing to train on")

    rewards = np.array([t.reward for t in ordered])
    return TrainingBatch(
        sequences=sequences,
        owner=owner,
        advantage=np.concatenate(advantage).astype(np.float32),
        rollout=np.concatenate(rollout).astype(np.float32),
        version=np.concatenate(version).astype(np.int32),
        metrics={
            "reward_mean": float(rewards.mean()),
            "reward_std": _std(rewards),
            "group_reward_std": float(np.mean([_std(g.returns) for g in groups])),
            "equal_groups": float(np.mean([not g.informative for g in groups])),
            "success": float(np.mean([t.reward > 0 if t.success is None else t.success for t in ordered])),
            "turns": float(np.mean([len(t.steps) for t in ordered])),
            "policy_tokens": float(first),
            "tokens": float(tokens),
        },
    )


def _check(t: Trajectory) -> None:
    if t.kind != "train":
        raise BatchError(f"trajectory '{t.id}' is of kind '{t.kind}': evaluations are never trained on")
    if t.status != "completed":
        raise BatchError(f"trajectory '{t.id}' is {t.status} ({t.stop}): only completed ones are trained on")
    if not math.isfinite(t.reward):
        raise BatchError(f"trajectory '{t.id}' has reward {t.reward}: it is broken, not bad; retry or exclude it")
    temperature = t.sampling.get("temperature", 1.0)
    if not (isinstance(temperature, int | float) and 0 < temperature < math.inf):
        raise BatchError(f"trajectory '{t.id}' was sampled at temperature {temperature!r}: training needs one above 0")
    if t.sampling.get("top_p", 1.0) != 1.0 or t.sampling.get("top_k", 0) != 0:
        raise BatchError(
            f"trajectory '{t.id}' was sampled with top_p or top_k: its logprobs are of a cut distribution that the "
            "learner cannot reproduce; sample training episodes with top_p = 1 and top_k = 0"
        )
    for node in t.nodes:
        try:
            node.check()
        except ValueError as error:
            raise BatchError(f"trajectory '{t.id}': {error}") from error
        if not np.isfinite(node.logprobs).all():
            raise BatchError(f"trajectory '{t.id}': a logprob is not finite, in a node of '{node.role}'")


def _per_token(trajectory: Trajectory, value: Any) -> Array:
    """An estimator's answer for one trajectory as one number per policy token, in node order."""
    n = trajectory.policy_tokens
    array = np.asarray(value, np.float64)
    if array.ndim > 1 or (array.ndim == 1 and len(array) != n):
        raise BatchError(
            f"advantages of trajectory '{trajectory.id}' have shape {list(array.shape)}: give one number, or one for "
            f"each of its {n} policy tokens"
        )
    if not np.isfinite(array).all():
        raise BatchError(f"an advantage of trajectory '{trajectory.id}' is not finite")
    return np.broadcast_to(array, (n,))


def _sample_order(trajectory: Trajectory) -> np.ndarray[Any, np.dtype[np.int64]]:
    """Indices that take policy tokens from node order to the order in which `samples()` trains them."""
    starts = np.cumsum([0, *(len(node.logprobs) for node in trajectory.nodes)])
    order = list(dict.fromkeys(node for branch in trajectory.branches() for node in branch))
    return np.concatenate([np.zeros(0, np.int64), *(np.arange(starts[i], starts[i + 1]) for i in order)])


def _std(values: Array) -> float:
    return float(values.std(ddof=1)) if len(values) > 1 else 0.0
