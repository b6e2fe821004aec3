"""One forward pass of the embedded engine over several sequences at once, and the attention in it.

A pass gets the new tokens of every sequence laid end to end as one row of ids. `attend` puts each sequence's keys and
values in its row of the cache (`kv.py`) and lets its tokens see that row only, each up to its own position.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

import torch
import torch.nn.functional as F
from transformers import AttentionInterface

from troupe.protocol.errors import ConfigError

if TYPE_CHECKING:
    from troupe.actors.engines.kv import KVCache, Row

ATTENTION = "troupe_rows"
"""Name under which `attend` is registered with transformers."""


@dataclass(slots=True)
class Feed:
    """One forward pass over T tokens of several rows, laid end to end.

    First come the `singles`: rows of one token that attend together, padded to the longest; then the `runs`
    (place, past, n), which attend one by one. rows: in the order of their tokens; counts: of each row's tokens.
    ids, positions: [1, T]. last: [rows], index of each row's last token.
    """

    cache: KVCache
    rows: list[Row]
    counts: list[int]
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

    def within(self, window: int) -> None:
        """Notes that a layer sees so many tokens. Raises ConfigError if a sequence is longer."""
        self.cache.window = min(window, self.cache.window or window)
        if max([*self.lengths, *(past + n for _, past, n in self.runs)]) > window:
            raise ConfigError(
                f"a sequence is longer than a layer's sliding window of {window} tokens, and attention here is full"
            )

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

    Raises ConfigError for soft caps, and for a sequence that is longer than a layer's window.
    """
    if softcap is not None:
        raise ConfigError("its attention has a soft cap")
    if sliding_window is not None:
        feed.within(sliding_window)
    _, heads, tokens, dim = query.shape
    kv_heads = key.shape[1]
    group = heads // kv_heads
    scaling = dim**-0.5 if scaling is None else scaling
    keys, values = feed.cache.layer(int(module.layer_idx), key, value)  # type: ignore[arg-type]
    index = feed.index(kv_heads)
    wide = value.shape[3]  # as a rule, but not always, as wide as a key
    keys.view(-1, dim).index_copy_(0, index, key.reshape(-1, dim))
    values.view(-1, wide).index_copy_(0, index, value.reshape(-1, wide))
    out = query.new_empty(tokens, heads, wide)
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
        seen = torch.bmm(weights.softmax(-1, dtype=torch.float32).to(v.dtype), v).view(-1, heads, wide)
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
