"""The best action in each state of a world that tells its transitions, by value iteration.

Gymnasium's toy text environments do, as `P[state][action] = [(probability, next state, reward, terminated), …]`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

_SWEEPS = 10_000


def best_actions(transitions: Mapping[int, Mapping[int, Sequence[Any]]], discount: float = 0.99) -> list[list[int]]:
    """For each state, in order, the actions of the highest discounted value, ascending."""
    rows = [
        (state, action, float(p), int(after), float(reward), bool(over))
        for state, actions in transitions.items()
        for action, outcomes in actions.items()
        for p, after, reward, over in outcomes
    ]
    states, actions, p, after, reward, over = map(np.array, zip(*rows, strict=True))
    shape = (int(states.max()) + 1, int(actions.max()) + 1)
    where = np.ravel_multi_index((states, actions), shape)
    worth: Any = np.zeros(shape)
    for _ in range(_SWEEPS):
        values = p * (reward + discount * np.where(over, 0.0, worth.max(axis=1)[after]))
        again = np.bincount(where, weights=values, minlength=worth.size).reshape(shape)
        change, worth = float(np.abs(again - worth).max()), again
        if change < 1e-9:
            break
    return [np.flatnonzero(row >= row.max() - 1e-6).tolist() for row in worth]
