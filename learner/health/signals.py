"""What a batch of trajectories shows about the health of the run, as metrics.

Promises:
- nothing raises for trajectories whose nodes pass `check`, and every value is finite;
- what a batch does not show (no tool calls, no parts) has no key;
- the order of the trajectories changes nothing;
- text and tokenizer are not needed: repetition is measured on sampled token ids.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import Any

import numpy as np

from troupe.learner.rewards import Array, Indices
from troupe.learner.success import succeeded
from troupe.protocol.trajectory import POLICY, CallStatus, StopReason, Trajectory

LIMITS: tuple[StopReason, ...] = ("max_turns", "max_tokens", "context_window", "max_tool_calls", "wall_clock")
MISUSES: tuple[CallStatus, ...] = ("malformed", "unknown_tool", "bad_arguments", "truncated", "refused")

_SAMPLED = 32
_SAMPLED_TOKENS = 1024
"""Repetition is measured on so many trajectories, and on the first so many sampled tokens of each: the figures of a small
batch and a large one compare, and they cost at most about 0.1 s and 20 MB."""


def signals(trajectories: Sequence[Trajectory]) -> dict[str, float]:
    """Metrics of the completed ones of `trajectories`; {} if there is none. Shares are from 0 to 1.

    - rewards: reward_mean, reward_std, reward_min, reward_max, group_reward_std (unbiased, mean over groups),
      equal_groups (share of groups with nothing to compare);
    - lengths in sampled tokens: response_tokens_mean and _max (of a trajectory), turn_tokens_mean and _max;
    - repetition: distinct_1, _2, _3 (different n-grams over all; they do not cross turns), self_similarity (Jaccard index
      of the trigrams of two trajectories, mean over pairs, of different groups if there are several), repeated_turns (share
      of turns that say what an earlier turn of the trajectory said, token for token);
    - actions: invalid_actions (share of steps); tool_calls (per trajectory), and of these the shares tool_failed (the tool
      ran and failed), tool_misuse (never ran) and its kinds tool_malformed, tool_unknown_tool, tool_bad_arguments,
      tool_truncated, tool_refused;
    - truncation: cut_turns (share of steps cut by a token limit), limited (share of trajectories stopped by a limit) and
      its kinds limited_max_turns, limited_max_tokens, ...;
    - sampling as a tree: reused_tokens (share of the policy's tokens that were sampled for a sibling; only if any forked);
    - parts of the reward: reward_part_NAME (mean sum over a trajectory), reward_corr_NAME (its correlation with the
      outcome within groups; the outcome is the part "outcome", else success; below 0 the part is earned by those who fail).
    """
    done = sorted((t for t in trajectories if t.status == "completed"), key=lambda t: (t.id, t.attempt))
    if not done:
        return {}
    groups: dict[int, list[int]] = {}
    for i, trajectory in enumerate(done):
        groups.setdefault(trajectory.group, []).append(i)
    with np.errstate(all="ignore"):  # rewards may be absurd; what overflows is left out below
        told = {
            **_rewards(done, list(groups.values())),
            **_repetition(done, list(groups.values())),
            **_actions(done),
            **_reused(done),
            **_parts(done, list(groups.values())),
        }
    return {name: float(value) for name, value in told.items() if math.isfinite(value)}


def _rewards(done: list[Trajectory], groups: list[list[int]]) -> dict[str, float]:
    reward = np.array([t.reward for t in done], np.float64)
    if not np.isfinite(reward).all():
        return {}
    return {
        "reward_mean": float(reward.mean()),
        "reward_std": _std(reward),
        "reward_min": float(reward.min()),
        "reward_max": float(reward.max()),
        "group_reward_std": float(np.mean([_std(reward[members]) for members in groups])),
        "equal_groups": float(np.mean([not (reward[members] != reward[members[0]]).any() for members in groups])),
    }


def _repetition(done: list[Trajectory], groups: list[list[int]]) -> dict[str, float]:
    """Lengths of all trajectories; n-grams of a sample that takes the first of each group, then the second, ..."""
    spoken = [[node.tokens[node.provenance == POLICY] for node in t.nodes if len(node.logprobs)] for t in done]
    lengths = [len(turn) for turns in spoken for turn in turns]
    told = {"response_tokens_mean": sum(lengths) / len(done), "response_tokens_max": max(sum(map(len, s)) for s in spoken)}
    if not lengths:
        return told
    repeats = sum(len(turns) - len({turn.tobytes() for turn in turns}) for turns in spoken)
    told |= {
        "turn_tokens_mean": sum(lengths) / len(lengths),
        "turn_tokens_max": max(lengths),
        "repeated_turns": repeats / len(lengths),
    }
    chosen = [i for row in zip_longest(*groups) for i in row if i is not None and spoken[i]][:_SAMPLED]
    fresh = {i: _after(spoken[i], done[i].policy_tokens - done[i].sampled_tokens) for i in chosen}  # a sibling's count there
    grams = {n: [_grams(fresh[i], n) for i in chosen] for n in (1, 2, 3)}
    for n, mine in grams.items():
        if count := sum(map(len, mine)):
            told[f"distinct_{n}"] = len(np.unique(np.concatenate(mine))) / count
    apart = np.array([[done[i].group != done[j].group for j in chosen] for i in chosen])
    told["self_similarity"] = _similarity(grams[3], apart if apart.any() else ~np.eye(len(chosen), dtype=bool))
    return told


def _after(turns: Iterable[Any], count: int) -> Iterable[Any]:
    """`turns` without their first `count` tokens."""
    kept = []
    for turn in turns:
        kept.append(turn[count:])
        count = max(0, count - len(turn))
    return kept


def _grams(turns: Iterable[Any], n: int) -> Indices:
    """The n-grams of the first tokens of `turns`, each as one number: ids of 21 bits, and no vocabulary is larger."""
    found, room = [np.zeros(0, np.int64)], _SAMPLED_TOKENS
    for turn in turns:
        ids = turn[:room].astype(np.int64) & 0x1FFFFF
        room -= len(ids)
        if len(ids) >= n:
            code = np.zeros(len(ids) - n + 1, np.int64)
            for k in range(n):
                code = code << 21 | ids[k : len(ids) - n + 1 + k]
            found.append(code)
    return np.concatenate(found)


def _similarity(grams: list[Indices], pairs: Any) -> float:
    """Mean Jaccard index of the sets `grams` over `pairs` [k, k] of those that have any; NaN if no pair has."""
    vocabulary = np.unique(np.concatenate(grams))
    has = np.zeros((len(grams), len(vocabulary)), np.float32)
    for i, mine in enumerate(grams):
        has[i, np.searchsorted(vocabulary, mine)] = 1.0
    size = has.sum(1)
    both = has @ has.T
    pairs = pairs & (size > 0)[:, None] & (size > 0)[None, :]
    return float((both[pairs] / (size[:, None] + size[None, :] - both)[pairs]).mean()) if pairs.any() else math.nan


def _actions(done: list[Trajectory]) -> dict[str, float]:
    steps = [step for t in done for step in t.steps]
    calls = Counter(call.status for step in steps for call in step.calls)
    stops = Counter(t.stop for t in done)
    told = {
        "tool_calls": calls.total() / len(done),
        "limited": sum(stops[name] for name in LIMITS) / len(done),
        **{f"limited_{name}": stops[name] / len(done) for name in LIMITS},
    }
    if steps:
        told["invalid_actions"] = sum(step.invalid for step in steps) / len(steps)
        told["cut_turns"] = sum(step.finish == "length" for step in steps) / len(steps)
    if calls:
        told["tool_failed"] = calls["failed"] / calls.total()
        told["tool_misuse"] = sum(calls[name] for name in MISUSES) / calls.total()
        told |= {f"tool_{name}": calls[name] / calls.total() for name in MISUSES}
    return told


def _reused(done: list[Trajectory]) -> dict[str, float]:
    said = sum(t.policy_tokens for t in done)
    forked = said and any(t.fork is not None for t in done)
    return {"reused_tokens": 1 - sum(t.sampled_tokens for t in done) / said} if forked else {}


def _parts(done: list[Trajectory], groups: list[list[int]]) -> dict[str, float]:
    names = sorted({name for t in done for step in t.steps for name in step.parts})
    sums = {name: np.array([sum(s.parts.get(name, 0.0) for s in t.steps) for t in done], np.float64) for name in names}
    told = {f"reward_part_{name}": values.mean() for name, values in sums.items()}
    outcome = sums.pop("outcome") if "outcome" in sums else np.array([succeeded(t) for t in done], np.float64)
    return told | {f"reward_corr_{name}": _correlation(values, outcome, groups) for name, values in sums.items()}


def _correlation(a: Array, b: Array, groups: list[list[int]]) -> float:
    """Of deviations from the group's mean, so that how hard a task is does not count; NaN where one does not vary."""
    centred = []
    for values in (a, b):
        values = values.copy()
        for members in groups:
            mine = values[members]
            values[members] = mine - mine.mean() if (mine != mine[0]).any() else 0.0
        centred.append(values)
    x, y = centred
    scale = math.sqrt(float(x @ x)) * math.sqrt(float(y @ y))
    return float(x @ y) / scale if scale > 0 else math.nan


def _std(values: Array) -> float:
    return float(values.std(ddof=1)) if len(values) > 1 and (values != values[0]).any() else 0.0
