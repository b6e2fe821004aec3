"""The key-value cache of the embedded engine: one row a sequence, and the attention that reads it.

A row holds the keys and values of one sequence; a layer's are tensors of shape [rows, kv_heads, capacity, head_dim].
All running sequences advance together but each at its own position: a forward pass gets their new tokens laid end to
end as one row of ids, and `attend` puts each sequence's tokens in its row and lets them see that row only.

Promises:
- a session's row is found again by its next prompt, and what the two have in common from the start is not fed again;
- rows × capacity never exceeds `max_tokens`: idle rows make room, least recently used first; running rows never do;
- rows and capacity grow with need and capacity shrinks again when rows are scarce, so memory follows the work.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from troupe.protocol.errors import ConfigError

ATTENTION = "troupe_rows"
"""Name under which `attend` is registered with transformers."""

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
    fed: int = 0
    running: bool = True
    stale: bool = False
    """Older weights computed it: it may finish but may not be kept."""


class KVCache:
    """Rows of keys and values, at most `max_tokens` in all. Used by one thread."""

    def __init__(self, max_tokens: int) -> None:
        self.max_tokens = max_tokens
        self.capacity = 0
        self._layers: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self._rows: list[Row | None] = []
        self._idle: dict[str, Row] = {}  # by session, least recently used first

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
            row = Row(self._rows.index(None), session, ids)
            self._rows[row.at] = row
            return row
        # A key depends only on the tokens up to its own, so any common prefix can stay. One token at least has to be
        # fed, because its logits are wanted.
        common = min(kept.fed, len(prompt) - 1)
        differs = np.flatnonzero(kept.ids[:common] != ids[:common])
        kept.fed = int(differs[0]) if len(differs) else common
        kept.ids, kept.running = ids, True
        return kept

    def release(self, row: Row, *, keep: bool) -> None:
        """The sequence has ended: its row is kept for the session's next turn, if it can be, or freed."""
        row.running = False
        self.forget(row.session)
        if keep and row.session and not row.stale:
            self._idle[row.session] = row
        else:
            self._rows[row.at] = None

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
            if row is not None:
                row.stale = True

    @property
    def sessions(self) -> int:
        """Number of sessions kept between turns."""
        return len(self._idle)

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
            ids=_tensor([row.ids[row.fed : row.fed + n] for row, n in order], device),
            positions=_tensor([np.arange(row.fed, row.fed + n) for row, n in order], device),
            places=_tensor([np.repeat([row.at for row, _ in order], [n for _, n in order])], device),
            last=torch.from_numpy(np.cumsum([n for _, n in order]) - 1).to(device),
            singles=len(singles),
            lengths=[row.fed + 1 for row in singles],
            window=(singles[0].at, singles[-1].at + 1) if singles else (0, 0),
            runs=[(row.at, row.fed, n) for row, n in runs],
        )

    def layer(self, index: int, like: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of a layer; made at first use in the heads, head size, dtype and device of `like`."""
        if index not in self._layers:
            # Zeros, not garbage: masked values are multiplied by 0, and 0 × NaN is NaN.
            shape = (len(self._rows), like.shape[1], self.capacity, like.shape[3])
            self._layers[index] = (like.new_zeros(shape), like.new_zeros(shape))
        return self._layers[index]


@dataclass(slots=True)
class Feed:
    """One forward pass over T tokens of several rows, laid end to end.

    First come the `singles`: rows of one token that attend together, padded to the longest; then the `runs`
    (place, past, n), which attend one by one. rows: in the order of their tokens.
    ids, positions: [1, T]. last: [rows], index of each row's last token.
    """

    cache: KVCache
    rows: list[Row]
    ids: torch.Tensor
    positions: torch.Tensor
    places: torch.Tensor
    last: torch.Tensor
    singles: int
    lengths: list[int]
    window: tuple[int, int]
    runs: list[tuple[int, int, int]]
    _shared: dict[object, torch.Tensor] = field(default_factory=dict)

    def index(self, kv_heads: int) -> torch.Tensor:
        """Where each (kv head, token) goes in [rows × kv_heads × capacity, head_dim]; shape [kv_heads × T]."""
        if kv_heads not in self._shared:
            head = torch.arange(kv_heads, device=self.places.device)[:, None]
            at = (self.places * kv_heads + head) * self.cache.capacity + self.positions
            self._shared[kv_heads] = at.reshape(-1)
        return self._shared[kv_heads]

    def bias(self, like: torch.Tensor, heads: int, group: int) -> torch.Tensor:
        """0 where a single token may look, -inf elsewhere; shape [window × kv_heads, group, longest]."""
        if "bias" not in self._shared:
            low, high = self.window
            lengths = torch.ones(high - low, dtype=torch.int64)  # rows that sit this pass out see one key: no NaN
            lengths[self.places[0, : self.singles].cpu() - low] = torch.tensor(self.lengths)
            blind = torch.arange(max(self.lengths)) >= lengths[:, None]
            bias = torch.zeros(blind.shape).masked_fill_(blind, float("-inf")).to(like)
            self._shared["bias"] = bias[:, None, None].expand(-1, heads, group, -1).reshape(-1, group, bias.shape[1])
        return self._shared["bias"]

    def causal(self, past: int, n: int) -> torch.Tensor:
        """True where token i of a run may look: at `past` + i and before; shape [n, past + n]."""
        if (past, n) not in self._shared:
            device = self.ids.device
            self._shared[past, n] = torch.ones(n, past + n, dtype=torch.bool, device=device).tril_(past)
        return self._shared[past, n]


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    feed: Feed,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **unused: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention: query [1, heads, T, d]; key, value [1, kv_heads, T, d] → [1, T, heads, d].

    Raises ConfigError for a model whose attention is not the full one.
    """
    if softcap is not None or (sliding_window is not None and sliding_window < feed.cache.capacity):
        raise ConfigError(
            "the embedded engine has full attention only; serve models with sliding windows or soft caps elsewhere"
        )
    _, heads, tokens, dim = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    scaling = dim**-0.5 if scaling is None else scaling
    keys, values = feed.cache.layer(int(module.layer_idx), key)  # type: ignore[arg-type]
    index = feed.index(kv_heads)
    keys.view(-1, dim).index_copy_(0, index, key.reshape(-1, dim))
    values.view(-1, dim).index_copy_(0, index, value.reshape(-1, dim))
    out = query.new_empty(tokens, heads, dim)
    query = query[0].transpose(0, 1)  # [T, heads, d]

    if feed.singles:
        low, high = feed.window
        longest = max(feed.lengths)
        q = query[: feed.singles].reshape(-1, kv_heads, group, dim)
        dense = feed.singles == high - low
        if not dense:
            at = feed.places[0, : feed.singles] - low
            q = q.new_zeros(high - low, kv_heads, group, dim).index_copy_(0, at, q)
        k = keys[low:high].flatten(0, 1)[:, :longest]
        v = values[low:high].flatten(0, 1)[:, :longest]
        bias = feed.bias(key, kv_heads, group)
        weights = torch.baddbmm(bias, q.reshape(-1, group, dim), k.transpose(1, 2), alpha=scaling)
        seen = torch.bmm(weights.softmax(-1, dtype=torch.float32).to(v.dtype), v).view(-1, heads, dim)
        out[: feed.singles] = seen if dense else seen[at]

    begin = feed.singles
    for place, past, n in feed.runs:
        seen = F.scaled_dot_product_attention(
            query[begin : begin + n].transpose(0, 1)[None],
            keys[place, None, :, : past + n],
            values[place, None, :, : past + n],
            attn_mask=feed.causal(past, n) if past else None,
            is_causal=not past,
            scale=scaling,
            enable_gqa=group > 1,
        )
        out[begin : begin + n] = seen[0].transpose(0, 1)
        begin += n
    return out[None], None


AttentionInterface.register(ATTENTION, attend)


def _worth_padding(lengths: np.ndarray[Any, Any]) -> int:
    """How many of the ascending `lengths` to attend together, padded; a few much longer ones cost less one by one."""
    alone = np.append(np.cumsum((lengths + _CALL)[::-1])[::-1], 0)
    together = np.arange(len(lengths) + 1) * np.append(0, lengths)
    return int(np.argmin(alone + together))


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
