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
from collections.abc import Mapping
from dataclasses import dataclass
from numbers import Real
from typing import Any

import numpy as np

from troupe.learner import filters
from troupe.learner.advantages import Array, Estimator, Group, traits
from troupe.learner.config import LearnerConfig
from troupe.learner.errors import BatchError
from troupe.learner.packing import Trainable, trainable
from troupe.learner.rewards import Indices, return_of, scales_of
from troupe.learner.success import succeeded
from troupe.learner.whiten import whiten
from troupe.protocol.trajectory import Trajectory

_LARGEST = 1e30  # of a reward: float32 ends at 3e38, and there are sums
Floats = np.ndarray[Any, np.dtype[np.float32]]


@dataclass(slots=True)
class TrainingBatch:
    """What the trainer needs of a batch, before anyone is credited.

    trajectories: those that train, in order of id. groups: indices of each group's members. sequences: those with trained
    tokens. owner: trajectory of each sequence. The flat arrays have one entry per trained token [k]: rollout (the engine's
    logprob), version (of the weights that sampled it) and trajectory. spans, order: where a trajectory's tokens lie in the
    flat arrays, and the indices that take its policy tokens from node order to there. metrics: of rewards and sizes.
    idle: the filter left nothing; then all groups are here, and none has an advantage.
    """

    trajectories: list[Trajectory]
    groups: list[list[int]]
    sequences: list[Trainable]
    owner: list[int]
    rollout: Floats
    version: np.ndarray[Any, np.dtype[np.int32]]
    trajectory: Indices
    spans: list[slice]
    order: list[Indices]
    metrics: dict[str, float]
    idle: bool = False

    def in_node_order(self, flat: Array) -> list[Array]:
        """`flat` [k] as one array of policy tokens in node order per trajectory."""
        found = []
        for span, order in zip(self.spans, self.order, strict=True):
            array = np.empty(len(order))
            array[order] = flat[span]
            found.append(array)
        return found


@dataclass(slots=True)
class Credit:
    """Per trained token [k]: advantage, and target, what its value should have been (empty without values)."""

    advantage: Floats
    target: Floats


def assemble(trajectories: list[Trajectory], config: LearnerConfig) -> TrainingBatch:
    """Checks, groups, filters and flattens `trajectories`. Raises BatchError."""
    if not trajectories:
        raise BatchError("an empty batch: there is nothing to train on")
    for trajectory in trajectories:
        _check(trajectory)
    everything = sorted(trajectories, key=lambda t: t.id)
    for one, other in itertools.pairwise(everything):
        if one.id == other.id:
            raise BatchError(f"trajectory '{one.id}' is there twice (attempts {one.attempt} and {other.attempt})")
    groups = _groups(everything)
    rewards = [np.array([t.reward for t in group], np.float64) for group in groups]
    keep = filters.find(config.filter)(rewards, config.filter_value)
    if len(keep) != len(rewards):
        raise BatchError(f"filter '{config.filter}' gave {len(keep)} answers for {len(rewards)} groups")
    idle = not any(keep)
    kept = [group for group, keeps in zip(groups, keep, strict=True) if keeps or idle]
    ordered = sorted((t for group in kept for t in group), key=lambda t: t.id)
    index = {t.id: i for i, t in enumerate(ordered)}

    batch = TrainingBatch(
        trajectories=ordered,
        groups=[[index[t.id] for t in group] for group in kept],
        sequences=[],
        owner=[],
        rollout=np.zeros(0, np.float32),
        version=np.zeros(0, np.int32),
        trajectory=np.zeros(0, np.int64),
        spans=[],
        order=[_sample_order(t) for t in ordered],
        metrics=_metrics(everything, keep),
        idle=idle,
    )
    rollout, version, owner = [batch.rollout], [batch.version], [batch.trajectory]
    first = tokens = 0
    for i, trajectory in enumerate(ordered):
        start = first
        for sample in trajectory.samples():
            tokens += len(sample.tokens)
            if not sample.mask.any():
                continue
            sequence = trainable(
                sample.tokens, sample.mask, first=first, name=f"trajectory '{trajectory.id}'", **_drawn(trajectory)
            )
            first += len(sequence.at)
            batch.sequences.append(sequence)
            batch.owner.append(i)
            rollout.append(sample.logprobs[sequence.at])
            version.append(sample.versions[sequence.at])
            owner.append(np.full(len(sequence.at), i, np.int64))
        batch.spans.append(slice(start, first))
    if not batch.sequences:
        raise BatchError(f"none of the {len(ordered)} trajectories has a policy token: there is nothing to train on")
    batch.rollout, batch.version = np.concatenate(rollout), np.concatenate(version)
    batch.trajectory = np.concatenate(owner)
    batch.metrics |= {"policy_tokens": float(first), "tokens": float(tokens)}
    return batch


def credit(
    batch: TrainingBatch,
    estimator: Estimator,
    config: LearnerConfig,
    *,
    values: Array | None = None,
    old: Array | None = None,
    penalty: Array | None = None,
    teacher: Mapping[str, Any] | None = None,
) -> Credit:
    """Advantages by `estimator`, whitened if it or the configuration says so.

    values: of a critic, old: the learner's logprobs, penalty: rewards of single tokens; all flat [k]. teacher: logprobs of
    each trajectory's policy tokens in node order, by its id. Raises BatchError for what is missing or of a wrong shape.
    """
    needs = traits(estimator).needs
    named = {"values": values, "old": old}
    if missing := [name for name in sorted(needs) if name in named and named[name] is None]:
        raise BatchError(f"estimator '{config.advantage}' needs {' and '.join(missing)}, which nobody gave")
    if "teacher" in needs:
        taught = [_taught(t, teacher or {}) for t in batch.trajectories]
    per_trajectory = {name: batch.in_node_order(array) for name, array in named.items() if array is not None}
    penalties = batch.in_node_order(penalty) if penalty is not None else []
    flat = np.zeros(len(batch.rollout))
    for members in batch.groups:
        paid = [float(penalties[i].sum()) if penalties else 0.0 for i in members]
        trajectories = [batch.trajectories[i] for i in members]
        scales = scales_of(trajectories, config)
        group = Group(
            trajectories,
            np.array([return_of(t, config, scale) + p for t, scale, p in zip(trajectories, scales, paid, strict=True)]),
            config,
            teacher=[taught[i] for i in members] if "teacher" in needs else [],
            penalties=[penalties[i] for i in members] if penalties else [],
            **{name: [arrays[i] for i in members] for name, arrays in per_trajectory.items()},
        )
        answers = _answers(estimator, group, config.advantage)
        for i, answer in zip(members, answers, strict=True):
            flat[batch.spans[i]] = _per_token(batch.trajectories[i], answer)[batch.order[i]]

    target = flat + values if values is not None else np.zeros(0)
    if config.whiten == "batch" or (config.whiten == "auto" and traits(estimator).whiten):
        flat = whiten(flat)
    if batch.idle:
        flat = np.zeros_like(flat)
    return Credit(flat.astype(np.float32), target.astype(np.float32))


def _groups(ordered: list[Trajectory]) -> list[list[Trajectory]]:
    members: dict[int, list[Trajectory]] = {}
    for trajectory in ordered:
        members.setdefault(trajectory.group, []).append(trajectory)
    for number, found in members.items():
        for other in found:
            if _task(other) != (task := _task(found[0])):
                raise BatchError(
                    f"group {number} has trajectories of two tasks, '{found[0].id}' of {task} and '{other.id}' of "
                    f"{_task(other)}: "
                    "a group is compared within itself; give each task a group of its own"
                )
    return list(members.values())


def _task(t: Trajectory) -> tuple[str, str, str, int]:
    return t.task.id, t.task.env, t.task.split, t.task.seed


def _answers(estimator: Estimator, group: Group, name: str) -> list[Any]:
    """What an estimator, perhaps a user's, says of a group. Raises BatchError for whatever is wrong with it."""
    try:
        answers = estimator(group)
    except BatchError:
        raise
    except Exception as error:
        said = " ".join(f"{type(error).__name__}: {error}".split())[:300]
        raise BatchError(f"advantage '{name}' failed: {said}") from error
    members = len(group.trajectories)
    try:
        found = list(answers)
    except TypeError:
        raise BatchError(f"advantage '{name}' gave {answers!r:.80}: return one array per trajectory") from None
    if len(found) != members:
        raise BatchError(f"advantage '{name}' gave {len(found)} advantages for {members} trajectories")
    return found


def _metrics(trajectories: list[Trajectory], keep: Any) -> dict[str, float]:
    return {
        "kept_groups": float(np.mean(list(keep))),
        "success": float(np.mean([succeeded(t) for t in trajectories])),
        "turns": float(np.mean([len(t.steps) for t in trajectories])),
    }


def _check(t: Trajectory) -> None:
    if t.kind != "train":
        raise BatchError(f"trajectory '{t.id}' is of kind '{t.kind}': evaluations are never trained on")
    if t.status != "completed":
        raise BatchError(f"trajectory '{t.id}' is {t.status} ({t.stop}): only completed ones are trained on")
    if not _finite(t.reward):
        raise BatchError(f"trajectory '{t.id}' has reward {t.reward}: it is broken, not bad; retry or exclude it")
    if abs(t.reward) > _LARGEST:
        raise BatchError(f"trajectory '{t.id}' has reward {t.reward:g}: beyond ±{_LARGEST:g} nothing can be computed; scale it")
    for turn, step in enumerate(t.steps):
        if any(_finite(one) and abs(one) > _LARGEST for one in (step.reward, *step.parts.values())):
            raise BatchError(f"trajectory '{t.id}': a reward of turn {turn} is beyond ±{_LARGEST:g}; scale it")
        if not all(map(_finite, (step.reward, *step.parts.values()))):
            raise BatchError(f"trajectory '{t.id}': a reward of turn {turn} is not finite; retry or exclude it")
    drawn = _drawn(t)
    temperature, top_k, top_p = drawn["temperature"], drawn["top_k"], drawn["top_p"]
    if not (_finite(temperature) and temperature > 0):
        raise BatchError(f"trajectory '{t.id}' was sampled at temperature {temperature!r}: training needs one above 0")
    if not (_finite(top_p) and 0 < top_p <= 1):
        raise BatchError(f"trajectory '{t.id}' was sampled with top_p = {top_p!r}: it must be above 0 and at most 1")
    if not (isinstance(top_k, int | np.integer) and top_k >= 0):
        raise BatchError(f"trajectory '{t.id}' was sampled with top_k = {top_k!r}: it must be 0 (off) or more")
    for index, node in enumerate(t.nodes):
        if not (isinstance(node.parent, int | np.integer) and -1 <= node.parent < index):
            raise BatchError(f"trajectory '{t.id}': node {index} has parent {node.parent!r}, which does not come before it")
        try:
            node.check()
        except ValueError as error:
            raise BatchError(f"trajectory '{t.id}': {error}") from error
        if not np.isfinite(node.logprobs).all():
            raise BatchError(f"trajectory '{t.id}': a logprob is not finite, in a node of '{node.role}'")


def _finite(value: Any) -> bool:
    """Whether it is a number, of Python or numpy, and finite."""
    return isinstance(value, Real) and math.isfinite(value)


def _drawn(t: Trajectory) -> dict[str, Any]:
    """How its tokens were drawn."""
    off = {"temperature": 1.0, "top_k": 0, "top_p": 1.0}
    return {name: t.sampling.get(name, default) for name, default in off.items()}


def _taught(trajectory: Trajectory, teacher: Mapping[str, Any]) -> Array:
    if trajectory.id not in teacher:
        raise BatchError(f"the teacher has no logprobs for trajectory '{trajectory.id}': give one for each policy token")
    array = np.asarray(teacher[trajectory.id], np.float64)
    if array.shape != (trajectory.policy_tokens,) or not np.isfinite(array).all():
        raise BatchError(
            f"the teacher's logprobs of trajectory '{trajectory.id}' must be {trajectory.policy_tokens} finite numbers, one "
            f"for each policy token; they have shape {list(array.shape)}"
        )
    return array


def _per_token(trajectory: Trajectory, value: Any) -> Array:
    """An estimator's answer for one trajectory as one number per policy token, in node order."""
    n = trajectory.policy_tokens
    try:
        array = np.asarray(value, np.float64)
    except (TypeError, ValueError):
        raise BatchError(f"an advantage of trajectory '{trajectory.id}' is no number: {value!r:.80}") from None
    if array.ndim > 1 or (array.ndim == 1 and len(array) != n):
        raise BatchError(
            f"advantages of trajectory '{trajectory.id}' have shape {list(array.shape)}: give one number, or one for "
            f"each of its {n} policy tokens"
        )
    if not np.isfinite(array).all():
        raise BatchError(f"an advantage of trajectory '{trajectory.id}' is not finite")
    return np.broadcast_to(array, (n,))


def _sample_order(trajectory: Trajectory) -> Indices:
    """Indices that take policy tokens from node order to the order in which `samples()` trains them."""
    starts = np.cumsum([0, *(len(node.logprobs) for node in trajectory.nodes)])
    order = list(dict.fromkeys(node for branch in trajectory.branches() for node in branch))
    return np.concatenate([np.zeros(0, np.int64), *(np.arange(starts[i], starts[i + 1]) for i in order)])
