"""The key-value cache of the embedded engine: one row a sequence.

A row holds the keys and values of one sequence; a layer's are tensors of shape [rows, kv_heads, capacity, head_dim].
All running sequences advance together but each at its own position; `feed` lays out a forward pass (`attention.py`).

Promises:
- a session's row is found again by its next prompt, and what the two have in common from the start is not fed again;
- a prompt that begins like that of another row takes over that row's keys and values, and if these are about to be
  computed, waits for them: the members of a group compute their common prompt once;
- keys and values of older weights are never taken over;
- rows × capacity never exceeds `max_tokens`: idle rows make room, least recently used first; running rows never do;
- rows and capacity grow with need and capacity shrinks again when rows are scarce, so memory follows the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from troupe.actors.engines.attention import Feed

_MIN_CAPACITY = 256
_MIN_ROWS = 8
_CALL = 256
"""What an attention call of its own costs, in keys that a batched one reads in that time."""


@dataclass(slots=True, eq=False)
class Row:
    """The place of one sequence. `ids[:fed]` are the tokens whose keys and values it holds; it may grow to len(ids)."""

    at: int
    session: str
    ids: np.ndarray[Any, np.dtype[np.int64]]
    prompt: int
    fed: int = 0
    running: bool = True
    stale: bool = False
    """Older weights computed it: it may finish but may not be kept, nor serve others."""
    source: Row | None = None
    """The running row that is about to compute its first `shared` tokens; until then it is not to be fed."""
    shared: int = 0


class KVCache:
    """Rows of keys and values, at most `max_tokens` in all. Used by one thread.

    min_shared: tokens that a prompt must have in common with another row to take them over; 0: it never does.
    """

    def __init__(self, max_tokens: int, min_shared: int = 0) -> None:
        self.max_tokens = max_tokens
        self._min_shared = min_shared
        self.capacity = 0
        self.window: int | None = None
        """The shortest sliding window of the model's layers, once it was fed."""
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._rows: list[Row | None] = []
        self._idle: dict[str, Row] = {}  # by session, least recently used first
        self._borrowers: list[Row] = []  # those that have a source

    # -- rows --------------------------------------------------------------------------------------------------------

    def acquire(self, session: str, prompt: np.ndarray[Any, Any], limit: int) -> Row | None:
        """A row for `prompt` (ids, shape [n]) that may grow to `limit` tokens; None if running rows leave no room."""
        ids = np.empty(limit, np.int64)
        ids[: len(prompt)] = prompt
        kept = self._idle.pop(session, None)
        if not self._make_room(limit, with_new_row=kept is None):
            if kept is not None:
                self._idle[session] = kept
            return None
        if kept is None:
            row = Row(self._rows.index(None), session, ids, len(prompt))
            self._rows[row.at] = row
            self._borrow(row)
            return row
        # A key depends only on the tokens up to its own, so any common prefix can stay. One token at least has to be
        # fed, because its logits are wanted.
        had, kept.fed = kept.fed, _common(kept.ids, ids, min(kept.fed, len(prompt) - 1))
        kept.ids, kept.prompt, kept.running = ids, len(prompt), True
        if kept.fed < had:  # else it goes on from where it was, which is what turns mostly do
            self._borrow(kept)
        return kept

    def release(self, row: Row, *, keep: bool) -> None:
        """The sequence has ended: its row is kept for the session's next turn, if it can be, or freed."""
        row.running = False
        self.forget(row.session)
        if keep and row.session and not row.stale:
            self._idle[row.session] = row
        else:
            self._rows[row.at] = None
        if row.source is not None:
            self._borrowers.remove(row)
            row.source = None
        self._borrow_elsewhere([other for other in self._borrowers if other.source is row])

    def forget(self, session: str) -> None:
        """Frees what is kept for `session`, if anything."""
        row = self._idle.pop(session, None)
        if row is not None:
            self._rows[row.at] = None

    def weights_changed(self) -> None:
        """Frees all idle rows and marks the running ones: their keys and values come from older weights."""
        for session in list(self._idle):
            self.forget(session)
        for row in self._rows:
            if row is not None and row.fed:
                row.stale = True
        self._borrow_elsewhere(list(self._borrowers))

    @property
    def sessions(self) -> int:
        """Number of sessions kept between turns."""
        return len(self._idle)

    # -- what rows have in common ------------------------------------------------------------------------------------

    def share(self) -> None:
        """To be called after each forward pass: who waited for what was computed in it has it now."""
        for row in [row for row in self._borrowers if row.source is not None and row.source.fed >= row.shared]:
            self._borrowers.remove(row)
            self._take_over(row)

    def _borrow(self, row: Row) -> None:
        """Takes over what another row has of the prompt, or marks the row that is about to have it."""
        if not self._min_shared:
            return
        best: Row | None = None
        most = row.fed + self._min_shared - 1
        for other in self._rows:
            if other is None or other is row or other.stale or other.source is not None:
                continue
            n = min(max(other.fed, other.prompt) if other.running else other.fed, row.prompt - 1)
            if n > most and other.ids[most] == row.ids[most]:
                n = _common(other.ids, row.ids, n)
                if n > most:
                    best, most = other, n
        if best is None:
            return
        row.source, row.shared = best, most
        if best.fed >= most:
            self._take_over(row)
        else:
            self._borrowers.append(row)

    def _borrow_elsewhere(self, rows: list[Row]) -> None:
        # One after the other: while a row has a source, nobody waits for it, so there is never a circle.
        for row in rows:
            self._borrowers.remove(row)
            row.source = None
            self._borrow(row)

    def _take_over(self, row: Row) -> None:
        source, new = row.source, slice(row.fed, row.shared)
        assert source is not None
        for keys, values in self._layers.values():
            keys[row.at, :, new] = keys[source.at, :, new]
            values[row.at, :, new] = values[source.at, :, new]
        row.fed, row.source = row.shared, None

    # -- room --------------------------------------------------------------------------------------------------------

    def _make_room(self, limit: int, *, with_new_row: bool) -> bool:
        """Provides capacity for `limit` tokens (and a free row), at the cost of idle rows if need be."""
        capacity = max(self.capacity, _rounded(limit, self.max_tokens))
        used = sum(row is not None for row in self._rows) + with_new_row
        if used * capacity > self.max_tokens:
            running = [row for row in self._rows if row is not None and row.running]
            needed = max([limit, *(len(row.ids) for row in running)])
            capacity = _rounded(needed, self.max_tokens)
            # Of the idle rows stay as many as there is room for, the most recently used ones. The row to be reused is
            # in neither list and counts for the newcomer.
            room = self.max_tokens // capacity - len(running) - 1
            if room < 0:
                return False
            for session in list(self._idle)[: max(0, len(self._idle) - room)]:
                self.forget(session)
            for session in [s for s, row in self._idle.items() if row.fed > capacity]:
                self.forget(session)
            used = sum(row is not None for row in self._rows) + with_new_row
        rows = len(self._rows)
        if used > rows or rows * capacity > self.max_tokens:
            rows = min(self.max_tokens // capacity, max(_MIN_ROWS, 1 << (used - 1).bit_length()))
        if (rows, capacity) != (len(self._rows), self.capacity):
            self._resize(rows, capacity)
        return True

    def _resize(self, rows: int, capacity: int) -> None:
        self._compact([row for row in self._rows if row is not None])
        for layer, (keys, values) in self._layers.items():
            self._layers[layer] = (_resized(keys, rows, capacity), _resized(values, rows, capacity))
        self._rows = (self._rows + [None] * rows)[:rows]
        self.capacity = capacity

    def _compact(self, first: Sequence[Row]) -> None:
        """Moves the rows `first` to the low places, swapping them with what is there."""
        high = [row for row in first if row.at >= len(first)]
        if not high:
            return
        taken = {row.at for row in first}
        low = [at for at in range(len(first)) if at not in taken]
        there, here = [*low, *(row.at for row in high)], [*(row.at for row in high), *low]
        for keys, values in self._layers.values():
            keys[there] = keys[here]
            values[there] = values[here]
        moved = [self._rows[at] for at in here]
        for at, row in zip(there, moved, strict=True):
            self._rows[at] = row
            if row is not None:
                row.at = at

    # -- a forward pass ----------------------------------------------------------------------------------------------

    def feed(self, parts: Sequence[tuple[Row, int]], device: torch.device) -> Feed:
        """Lays out a forward pass that feeds the next `n` ids of each (row, n).

        The caller adds `n` to `row.fed` afterwards.
        """
        running = [row for row in self._rows if row is not None and row.running]
        # Single tokens are computed over the whole stretch of rows from the lowest to the highest, so that keys need
        # not be copied together. When most of that stretch is not running it is cheaper to move the rows, once.
        if running and running[-1].at + 1 - running[0].at > 2 * len(running) + _MIN_ROWS:
            self._compact(running)
        by_length = sorted((row for row, n in parts if n == 1), key=lambda row: row.fed)
        batched = _worth_padding(np.array([row.fed + 1 for row in by_length]))
        singles = sorted(by_length[:batched], key=lambda row: row.at)
        runs = [*((row, 1) for row in by_length[batched:]), *((row, n) for row, n in parts if n > 1)]
        order = [*((row, 1) for row in singles), *runs]
        return Feed(
            cache=self,
            rows=[row for row, _ in order],
            counts=[n for _, n in order],
            ids=_tensor([row.ids[row.fed : row.fed + n] for row, n in order], device),
            positions=_tensor([np.arange(row.fed, row.fed + n) for row, n in order], device),
            places=_tensor([np.repeat([row.at for row, _ in order], [n for _, n in order])], device),
            last=torch.from_numpy(np.cumsum([n for _, n in order]) - 1).to(device),
            singles=len(singles),
            lengths=[row.fed + 1 for row in singles],
            window=(singles[0].at, singles[-1].at + 1) if singles else (0, 0),
            runs=[(row.at, row.fed, n) for row, n in runs],
        )

    def layer(self, index: int, key: torch.Tensor, value: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer; made at first use in the heads, head sizes, dtype and device of these."""
        if index not in self._layers:
            # Zeros, not garbage: masked values are multiplied by 0, and 0 × NaN is NaN.
            rows = len(self._rows), key.shape[1], self.capacity
            self._layers[index] = (key.new_zeros(*rows, key.shape[3]), value.new_zeros(*rows, value.shape[3]))
        return self._layers[index]


def _worth_padding(lengths: np.ndarray[Any, Any]) -> int:
    """How many of the ascending `lengths` to attend together, padded; a few much longer ones cost less one by one."""
    alone = np.append(np.cumsum((lengths + _CALL)[::-1])[::-1], 0)
    together = np.arange(len(lengths) + 1) * np.append(0, lengths)
    return int(np.argmin(alone + together))


def _common(one: np.ndarray[Any, Any], other: np.ndarray[Any, Any], n: int) -> int:
    """How many of their first `n` ids the two have in common from the start."""
    differs = np.flatnonzero(one[:n] != other[:n])
    return int(differs[0]) if len(differs) else n


def _rounded(length: int, most: int) -> int:
    """The capacity for `length` tokens: a power of two if there is room for it."""
    return max(length, min(most, max(_MIN_CAPACITY, 1 << (length - 1).bit_length())))


def _resized(old: torch.Tensor, rows: int, capacity: int) -> torch.Tensor:
    new = old.new_zeros(rows, old.shape[1], capacity, old.shape[3])
    r, c = min(rows, old.shape[0]), min(capacity, old.shape[2])
    new[:r, :, :c] = old[:r, :, :c]
    return new


def _tensor(parts: Sequence[Any], device: torch.device) -> torch.Tensor:
    return torch.from_numpy(np.concatenate(parts)[None]).to(device)
