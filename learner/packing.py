"""Sequences of any length through the model without padding: packed into rows, but blind to each other.

Promises:
- a row holds whole sequences, one after another; positions restart and attention never crosses a border, so every
  logprob equals that of the sequence alone, and gradients do not depend on what shares a row (law 5);
- attention costs Σ nᵢ², not (Σ nᵢ)²: it runs sequence by sequence, without a mask; all else runs on the whole row;
- logits are made for trained positions only, a bounded number at a time, never for tokens × vocabulary;
- of several ranks each gets as many rows as the others, so that none waits in vain: the last may train nothing.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeVar

import numpy as np
import torch
import torch.nn.functional as F
from torch.utils.checkpoint import checkpoint

from troupe.learner import alone, ranks
from troupe.learner.errors import BatchError
from troupe.learner.reach import reach
from troupe.learner.truncation import kept
from troupe.protocol.errors import ConfigError

ATTENTION = "troupe_packed"
"""Name of the attention implementation that `prepare` gives a model."""

_CANNOT = (
    "be trained on packed rows: train one whose layers look from token to token by plain attention alone, as those of llama, "
    "mistral, qwen2, qwen3 and gemma3 do"
)

_LOGITS_AT_ONCE = 1 << 25
"""Float32 logits held at a time (128 MiB)."""


@dataclass(slots=True)
class Trainable:
    """A token sequence and what is trained in it.

    tokens: ids [n]. at: positions [k] ≥ 1 of the trained tokens, ascending. first: index of the sequence's first
    trained token among all of the batch, so that per-token data lives in flat arrays beside the sequences.
    temperature: what the logits are divided by; top_k (0: off) and top_p (1: off): what then cut them.
    """

    tokens: np.ndarray[Any, np.dtype[np.int32]]
    at: np.ndarray[Any, np.dtype[np.int64]]
    first: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    @property
    def where(self) -> slice:
        """The sequence's trained tokens among all of the batch."""
        return slice(self.first, self.first + len(self.at))


def trainable(
    tokens: Any,
    mask: Any,
    *,
    first: int = 0,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    name: str = "sequence",
) -> Trainable:
    """Checks and wraps `tokens` [n] whose trained ones are marked in `mask` [n]. Raises BatchError."""
    tokens, at = np.asarray(tokens, np.int32), np.flatnonzero(mask)
    if len(tokens) != len(mask):
        raise BatchError(f"{name}: {len(tokens)} tokens but a mask of {len(mask)}")
    if len(at) and at[0] == 0:
        raise BatchError(f"{name}: its first token is to be trained, but nothing comes before it to predict it from")
    return Trainable(tokens, at, first, temperature, top_k, top_p)


def pack(lengths: Sequence[int], capacity: int) -> list[list[int]]:
    """Rows of indices into `lengths`, each of at most `capacity` tokens: best fit, longest first, deterministic.

    A sequence longer than `capacity` gets a row of its own: nothing is ever cut.
    """
    rows: list[list[int]] = []
    room: list[tuple[int, int]] = []  # (free tokens, row), ascending
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        slot = bisect.bisect_left(room, (lengths[index], -1))
        if slot < len(room):
            free, row = room.pop(slot)
            rows[row].append(index)
        else:
            free, row = capacity, len(rows)
            rows.append([index])
        bisect.insort(room, (max(free - lengths[index], 0), row))
    return rows


def deal(lengths: Sequence[int], capacity: int, count: int) -> list[list[list[int]]]:
    """The rows of each of `count` ranks: sequences go, longest first, to the rank with the fewest tokens, which packs its own.

    All ranks get the same number of rows; those beyond a rank's own are empty.
    """
    own: list[list[int]] = [[] for _ in range(count)]
    tokens = [0] * count
    for index in sorted(range(len(lengths)), key=lambda i: (-lengths[i], i)):
        least = tokens.index(min(tokens))
        own[least].append(index)
        tokens[least] += lengths[index]
    rows = [[[mine[i] for i in row] for row in pack([lengths[i] for i in mine], capacity)] for mine in own]
    most = max(map(len, rows))
    return [found + [[]] * (most - len(found)) for found in rows]


_NOTHING = Trainable(np.zeros(1, np.int32), np.zeros(0, np.int64))
"""What an empty row holds: one token, which trains nothing. Its gradient is zero."""


@dataclass(slots=True)
class Row:
    """One forward pass.

    tokens, positions: [1, T]. lengths, ends: of its sequences, and where each ends in the row. at: row positions [k]
    whose logits predict `targets` [k]. where: flat index [k] of each among all trained tokens. temperature: [k], None if
    all are 1.
    cut: (top_k [k], top_p [k]), None if nothing was sampled from a cut distribution.
    """

    tokens: torch.Tensor
    positions: torch.Tensor
    lengths: list[int]
    ends: torch.Tensor
    at: torch.Tensor
    targets: torch.Tensor
    where: torch.Tensor
    temperature: torch.Tensor | None
    cut: tuple[torch.Tensor, torch.Tensor] | None = None

    @property
    def sequence(self) -> torch.Tensor:
        """Which of the row's sequences each target belongs to [k]."""
        return torch.bucketize(self.at, self.ends, right=True)


def rows_of(sequences: Sequence[Trainable], capacity: int, device: torch.device) -> Iterator[Row]:
    """Packs `sequences`, of several ranks this one's share of them, into rows on `device`."""
    for indices in deal([len(s.tokens) for s in sequences], capacity, ranks.size())[ranks.rank()]:
        members = [sequences[i] for i in indices] or [_NOTHING]
        lengths = [len(s.tokens) for s in members]
        starts = np.cumsum([0, *lengths[:-1]])
        counts = [len(s.at) for s in members]
        tokens = np.concatenate([s.tokens for s in members]).astype(np.int64)
        at = np.concatenate([s.at + start for s, start in zip(members, starts, strict=True)])
        positions = np.concatenate([np.arange(n) for n in lengths])
        where = np.concatenate([np.arange(s.first, s.first + n) for s, n in zip(members, counts, strict=True)])

        def of_tokens(name: str, dtype: Any, members: Any = members, counts: Any = counts) -> torch.Tensor:
            return torch.from_numpy(np.repeat(np.array([getattr(s, name) for s in members], dtype), counts)).to(device)

        whole = all(s.top_k == 0 and s.top_p == 1 for s in members)
        yield Row(
            tokens=torch.from_numpy(tokens)[None].to(device),
            positions=torch.from_numpy(positions)[None].to(device),
            lengths=lengths,
            ends=torch.tensor(np.cumsum(lengths), device=device),
            at=torch.from_numpy(at - 1).to(device),
            targets=torch.from_numpy(tokens[at]).to(device),
            where=torch.from_numpy(where).to(device),
            temperature=of_tokens("temperature", np.float32) if any(s.temperature != 1 for s in members) else None,
            cut=None if whole else (of_tokens("top_k", np.int64), of_tokens("top_p", np.float64)),
        )


T = TypeVar("T")


@dataclass(slots=True)
class Parts:
    """A model's backbone and output head. whole: of several ranks, what gathers their weights around a piece of work."""

    backbone: Any
    head: Any
    whole: Any = None

    def run(self, work: Callable[[], T]) -> T:
        """`work()`, while the weights are there."""
        done: T = work() if self.whole is None else self.whole(work)
        return done


def prepare(model: torch.nn.Module, *, device: torch.device | None = None, checkpointing: bool = False) -> Parts:
    """Makes `model` fit for packed rows on `device` (unset: the CPU); returns its parts for `logprobs`.

    From then on it reads packed rows and nothing else; of several ranks each holds a share of it. checkpointing: keep only
    what goes into each layer, and compute the rest again in the backward pass (arXiv:1604.06174). Raises ConfigError if
    its attention cannot be replaced, or sequences in a row then change each other (`alone`).
    """
    from transformers import AttentionInterface
    from transformers.modeling_layers import GradientCheckpointingLayer

    AttentionInterface.register(ATTENTION, _attention)
    causal: Any = model.get_base_model() if hasattr(model, "peft_config") else model  # type: ignore[operator]
    if getattr(causal.config, "is_encoder_decoder", False):
        raise ConfigError(f"a {causal.config.model_type} model is no decoder: it cannot be trained here")
    plain = alone.replace_attention(causal, ATTENTION, _CANNOT)
    layers: list[Any] = [module for module in causal.modules() if isinstance(module, GradientCheckpointingLayer)]
    if checkpointing and not layers:
        raise ConfigError(
            f"a {causal.config.model_type} model has no layers to checkpoint: set activation_checkpointing = false"
        )
    if checkpointing:
        for layer in layers:  # transformers does it in training mode only, which also turns on dropout
            layer.forward = partial(checkpoint, layer.forward, use_reentrant=False)
    parts = Parts(causal.get_decoder(), causal.get_output_embeddings())
    if ranks.spread(causal, layers, device or torch.device("cpu")):
        causal.forward = lambda work: work()  # backbone and head are called one by one, and both need their weights
        parts.whole = causal
    _check(causal, parts, plain)
    return parts


def _check(causal: Any, parts: Parts, plain: str) -> None:
    """Raises ConfigError if a row says something else than its sequences alone: beside each other, and beside the end of a
    sequence as long as may be."""
    far = reach(causal.config) or 0
    forward = type(causal).forward  # of several ranks, the model's own is replaced

    def single(ids: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = parts.run(lambda: forward(causal, input_ids=ids[None], use_cache=False).logits[0])
        return logits

    def row(sequences: Sequence[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        lengths = [len(s) for s in sequences]
        tokens = torch.cat([*sequences, sequences[0][:1]])
        positions = torch.cat([*(torch.arange(n) for n in lengths), torch.tensor([max(far - 1, 0)])]).to(tokens.device)
        ends = torch.tensor([*np.cumsum(lengths), len(tokens)], device=tokens.device)
        every = torch.arange(len(tokens), device=tokens.device)
        packed = Row(tokens[None], positions[None], [*lengths, 1], ends, every, tokens, every, None)
        return parts.run(lambda: parts.head(_hidden_states(parts.backbone, packed))), list(torch.split(every[:-1], lengths))

    alone.check(causal, attention=ATTENTION, plain=plain, alone=single, together=row, cannot=_CANNOT)


Entropy = Literal["skip", "measure", "train"]
"""Of the policy at each trained token: leave it at 0, compute it without a gradient, or with one."""


def hidden_states(model: Parts, row: Row) -> torch.Tensor:
    """The last hidden states [k, hidden] from which each target is predicted."""
    return model.run(lambda: _hidden_states(model.backbone, row))


def _hidden_states(backbone: Any, row: Row) -> torch.Tensor:
    output = backbone(input_ids=row.tokens, position_ids=row.positions, use_cache=False, sequence_lengths=row.lengths)
    hidden: torch.Tensor = output.last_hidden_state[0].index_select(0, row.at)
    return hidden


def logprobs(model: Parts, row: Row, *, entropy: Entropy = "skip") -> tuple[torch.Tensor, torch.Tensor]:
    """(logprob of each target, entropy of each distribution), both float32 [k].

    Logprobs are of softmax(logits / temperature), cut by top_k and top_p, as the engine samples; entropy is of
    softmax(logits), in nats.
    """
    return model.run(lambda: _logprobs(model.backbone, model.head, row, entropy))


def _logprobs(backbone: Any, head: Any, row: Row, entropy: Entropy) -> tuple[torch.Tensor, torch.Tensor]:
    hidden = _hidden_states(backbone, row)
    # sorting a cut distribution takes several times the room of its logits
    step = max(1, _LOGITS_AT_ONCE // head.weight.shape[0] // (1 if row.cut is None else 8))

    def chunk(i: int) -> tuple[Any, ...]:
        part = slice(i, i + step)
        cut = None if row.cut is None else (row.cut[0][part], row.cut[1][part])
        return head, hidden[part], row.targets[part], None if row.temperature is None else row.temperature[part], cut, entropy

    if len(row.at) <= step:
        return _predict(*chunk(0))
    # the backward pass makes each chunk's logits again instead of keeping them all
    parts = [checkpoint(_predict, *chunk(i), use_reentrant=False) for i in range(0, len(row.at), step)]
    return torch.cat([p[0] for p in parts]), torch.cat([p[1] for p in parts])


def _predict(
    head: Any,
    hidden: torch.Tensor,
    targets: torch.Tensor,
    temperature: torch.Tensor | None,
    cut: tuple[torch.Tensor, torch.Tensor] | None,
    entropy: Entropy,
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = head(hidden).float()
    tempered = logits if temperature is None else logits / temperature[:, None]
    if cut is not None:
        tempered = tempered.masked_fill(~kept(tempered, targets, *cut), -torch.inf)
    whole = tempered.log_softmax(-1)
    lp = whole.gather(1, targets[:, None])[:, 0]
    if entropy == "skip":
        return lp, torch.zeros_like(lp)
    if tempered is not logits:
        whole = logits.log_softmax(-1)
    if entropy == "measure":
        whole = whole.detach()
    return lp, -(whole.exp() * whole).sum(-1)


def _attention(
    module: Any,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: None,
    *,
    sequence_lengths: list[int],
    sliding_window: int | None = None,
    scaling: float | None = None,
    softcap: float | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention within each of `sequence_lengths`; query [1, heads, T, d], key and value [1, kv_heads, T, d]."""
    if softcap is not None:
        raise ConfigError("its attention has a soft cap")
    grouped = key.shape[1] != query.shape[1]
    outputs = []
    for q, k, v in zip(*(torch.split(t, sequence_lengths, dim=2) for t in (query, key, value)), strict=True):
        mask = None
        n = q.shape[2]
        if sliding_window is not None and n > sliding_window:
            ones = torch.ones(n, n, dtype=torch.bool, device=q.device)
            mask = ones.tril() & ones.triu(1 - sliding_window)
        outputs.append(
            F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None, scale=scaling, enable_gqa=grouped)
        )
    return torch.cat(outputs, dim=2).transpose(1, 2).contiguous(), None
