"""What each turn and each token of a trajectory earned: where the world's rewards meet the sampled tokens.

The reward of turn j is the sum of its parts: the step's reward, with each part named in `reward_parts` weighted anew, and
for the last turn also what the return holds beyond its steps (an outcome that only the whole episode was given) and the
soft overlong punishment. `tool_cost` scales all but that punishment, by the calls of the group. A token outside of any step
belongs to the turn before it. Tokens are in node order, which is the order of time; arithmetic is float64.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, TypeAlias

import numpy as np

from troupe.learner.config import LearnerConfig, OverlongSettings
from troupe.learner.tool_cost import scales
from troupe.protocol.trajectory import Trajectory

Array: TypeAlias = np.ndarray[Any, np.dtype[np.float64]]
Indices: TypeAlias = np.ndarray[Any, np.dtype[np.int64]]


def turn_rewards(trajectory: Trajectory, config: LearnerConfig, scale: float = 1.0) -> Array:
    """Rewards [turns]; a trajectory without steps is one turn. scale: what the group's `tool_cost` made of its reward."""
    weights = config.reward_parts
    rewards = np.zeros(max(1, len(trajectory.steps)))
    for turn, step in enumerate(trajectory.steps):
        rewards[turn] = step.reward + sum((weights[n] - 1) * value for n, value in step.parts.items() if n in weights)
    rewards[-1] += trajectory.reward - float(sum(step.reward for step in trajectory.steps))
    rewards *= scale
    if config.overlong is not None:
        rewards[-1] += overlong(trajectory, config.overlong)
    return rewards


def return_of(trajectory: Trajectory, config: LearnerConfig, scale: float = 1.0) -> float:
    """Sum of the turns' rewards, up to rounding.

    It starts from the trajectory's own reward, so that what turns it came from leaves no residue: equal rewards that are
    weighted and punished alike are exactly equal.
    """
    punished = 0.0 if config.overlong is None else overlong(trajectory, config.overlong)
    return weighed(trajectory, config) * scale + punished


def weighed(trajectory: Trajectory, config: LearnerConfig) -> float:
    """The trajectory's reward with the parts named in `reward_parts` weighted anew, correctly rounded."""
    weights = config.reward_parts
    parts = ((name, value) for step in trajectory.steps for name, value in step.parts.items() if name in weights)
    return math.fsum([trajectory.reward, *((weights[name] - 1) * value for name, value in parts)])


def scales_of(group: Sequence[Trajectory], config: LearnerConfig) -> list[float]:
    """What `tool_cost` multiplies the reward of each trajectory of a group with; 1 where it is not set."""
    if config.tool_cost is None:
        return [1.0] * len(group)
    return scales(group, [weighed(trajectory, config) for trajectory in group], config.tool_cost)


def overlong(trajectory: Trajectory, settings: OverlongSettings) -> float:
    """DAPO's soft overlong punishment (arXiv:2503.14476, equation 13), −factor to 0.

    0 up to limit − buffer tokens, then falling linearly to −factor at the limit; the paper's factor is 1.
    """
    said = settings.counts == "generated"
    length = trajectory.policy_tokens if said else sum(len(node.tokens) for node in trajectory.nodes)
    excess = length - (settings.limit - settings.buffer)
    return -settings.factor * min(max(excess / settings.buffer, 0.0), 1.0)


def turns_of(trajectory: Trajectory) -> Indices:
    """Turn [policy tokens] of each policy token."""
    last = max(1, len(trajectory.steps)) - 1
    turns, turn = [np.zeros(0, np.int64)], 0
    for node in trajectory.nodes:
        turn = min(node.step, last) if node.step >= 0 else turn
        turns.append(np.full(len(node.logprobs), turn, np.int64))
    return np.concatenate(turns)


def at_tokens(rewards: Array, turns: Indices) -> Array:
    """Turn rewards as token rewards [policy tokens]: each at the last token of its turn.

    A turn without tokens pays the last token before it, or the first of all if there is none.
    """
    paid = np.zeros(len(turns))
    if len(turns):
        for turn, reward in enumerate(rewards):
            before = np.flatnonzero(turns == turn)
            before = before if len(before) else np.flatnonzero(turns < turn)
            paid[before[-1] if len(before) else 0] += reward
    return paid


def to_go(rewards: Array, gamma: float) -> Array:
    """Discounted sums of what is still to come: G = r + γG′, of the shape of `rewards` [n]."""
    sums = np.zeros(len(rewards))
    running = 0.0
    for i in range(len(rewards) - 1, -1, -1):
        sums[i] = running = rewards[i] + gamma * running
    return sums
