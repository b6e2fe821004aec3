"""Which split a task is of, where only its first observation can say: it is drawn again until it is of the wanted one."""

from __future__ import annotations

from collections.abc import Callable

from troupe.envs.base import SPLITS, belongs
from troupe.protocol.errors import TaskFailed

_DRAWS = 500
_ALIKE = 16  # openings that are equal before all are taken to be so


def opening_of(split: str, draw: Callable[[], str], by_seed: bool = False) -> str:
    """The first of the openings that `draw` gives that belongs to `split`; the first of all if by_seed.

    If all openings are alike there is nothing to tell the splits apart by, and any will do. Raises TaskFailed for an unknown
    split, or one to which none of few openings belongs.
    """
    if split not in SPLITS:
        raise TaskFailed(f"unknown split '{split}': it is one of {', '.join(SPLITS)}")
    seen = set()
    for number in range(1, _DRAWS + 1):
        opening = draw()
        seen.add(opening)
        if by_seed or belongs(opening, split) or (number == _ALIKE and len(seen) == 1):
            return opening
    raise TaskFailed(f"no {split} task in {_DRAWS} draws, only {len(seen)} openings: set split_by = 'seed'")
