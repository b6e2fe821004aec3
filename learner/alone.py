"""Laid end to end, each sequence gets what it gets alone: packed rows and the embedded engine rest on it.

Attention can be replaced by one that keeps sequences apart. What else in a model looks from token to token (a convolution,
a recurrent state) looks across their borders, and what its own attention does besides (sinks, biases) is gone, in silence.
So both try it, each in its own way of feeding, when a model is loaded.

Promises:
- compared with plain transformers is what each part of each layer gives, by its own size: it does not matter whether weights
  are trained, drawn, or so small that logits would not show it;
- a sliding window, which is longer than what is tried, must be told to the attention;
- roundings pass, and so do the few experts that a router chooses otherwise because of them: most sequences must agree.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from statistics import median
from typing import Any

import torch

from troupe.protocol.errors import ConfigError, TroupeError

_LENGTHS = (6, 5, 7, 6, 5)
"""Of the sequences. Each after the first has a neighbour before it."""

Together = Callable[[Sequence[torch.Tensor]], tuple[torch.Tensor, list[torch.Tensor]]]
"""From sequences of ids [n] to (logits [T, vocabulary], where each one's tokens are among the T that were fed)."""


def replace_attention(model: Any, attention: str, cannot: str) -> str:
    """Has `model` attend by what is registered as `attention`; returns what it attended by. Raises ConfigError if it does not.

    cannot: what is then not to be had, and the fix; it completes "a … model cannot".
    """
    plain: str = model.config._attn_implementation
    try:
        model.set_attn_implementation(attention)
        replaced = model.config._attn_implementation == attention
    except ValueError:
        replaced = False
    if not replaced:
        raise ConfigError(f"a {model.config.model_type} model cannot {cannot} (its attention cannot be replaced)")
    return plain


@torch.no_grad()
def check(
    model: Any,
    *,
    attention: str,
    plain: str,
    alone: Callable[[torch.Tensor], torch.Tensor],
    together: Together,
    cannot: str,
) -> None:
    """Raises ConfigError if sequences that are fed `together` get other values than each `alone`, or cannot be fed so.

    alone: from ids [n] to plain transformers' logits [n, vocabulary]. plain, cannot: see `replace_attention`.
    """
    vocabulary = model.get_input_embeddings().num_embeddings
    device = model.get_input_embeddings().weight.device
    ids = (torch.arange(sum(_LENGTHS), device=device) * 7919 + 5) % vocabulary
    sequences = ids.split(_LENGTHS)
    layers = [layer for layer in model.modules() if _is_layer(layer)]
    parts = [part for layer in layers for part in layer.children()]
    refusal = f"a {model.config.model_type} model cannot {cannot}"
    places: list[torch.Tensor] = []

    def fed() -> torch.Tensor:
        logits, found = together(sequences)
        places.extend(found)
        return logits

    try:
        model.set_attn_implementation(plain)
        expected = [_said(parts, partial(alone, s)) for s in sequences]
        model.set_attn_implementation(attention)
        with _heard(attention, "sliding_window") as windows:
            found = _said(parts, fed)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:  # whatever a model's own code raises where it is called otherwise than it expects
        reason = error if isinstance(error, TroupeError) else f"{type(error).__name__}: {error}"
        raise ConfigError(f"{refusal} ({reason})") from error
    if "sliding_attention" in (getattr(model.config, "layer_types", None) or ()) and not windows:
        raise ConfigError(f"{refusal} (its sliding window is in masks only, of which the attention in their place is not told)")
    limit = max(0.01, 40 * torch.finfo(next(model.parameters()).dtype).eps)
    for i, part in enumerate([*parts, None]):
        apart = [_distance(found[i], at, one[i]) for at, one in zip(places, expected, strict=True)]
        known = [distance for distance in apart if distance is not None]
        if known and not median(known) <= limit:
            name = "its logits" if part is None else f"its {type(part).__name__}"
            raise ConfigError(f"{refusal} (tried on short sequences, {name} gave other values: off by {median(known):.0%})")


@contextlib.contextmanager
def _heard(attention: str, name: str) -> Iterator[set[Any]]:
    """What `attention` is given by that name, but None."""
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    original, heard = ALL_ATTENTION_FUNCTIONS[attention], set[Any]()

    def listening(*args: Any, **named: Any) -> Any:
        heard.update({named.get(name)} - {None})
        return original(*args, **named)

    ALL_ATTENTION_FUNCTIONS.register(attention, listening)
    try:
        yield heard
    finally:
        ALL_ATTENTION_FUNCTIONS.register(attention, original)


def _is_layer(module: torch.nn.Module) -> bool:
    from transformers.modeling_layers import GradientCheckpointingLayer

    return isinstance(module, GradientCheckpointingLayer)


def _said(parts: Sequence[torch.nn.Module], run: Callable[[], torch.Tensor]) -> list[torch.Tensor | None]:
    """What each part gave for each token, [T, width], and last the logits that `run` gives. None: not a row a token."""
    heard: list[list[torch.Tensor]] = [[] for _ in parts]

    def hear(into: list[torch.Tensor], module: Any, given: Any, output: Any) -> None:
        first = output[0] if isinstance(output, tuple) else output
        if isinstance(first, torch.Tensor) and first.is_floating_point():
            into.append(first.reshape(-1, first.shape[-1]).float())

    hooks = [part.register_forward_hook(partial(hear, into)) for part, into in zip(parts, heard, strict=True)]
    try:
        logits = run().float()
    finally:
        for hook in hooks:
            hook.remove()
    said = [torch.cat(one) if one and len({t.shape[1] for t in one}) == 1 else None for one in heard]
    return [*(t if t is not None and len(t) == len(logits) else None for t in said), logits]


def _distance(found: torch.Tensor | None, at: torch.Tensor, expected: torch.Tensor | None) -> float | None:
    """Between the two, as a share of what was expected; None if there is nothing to compare."""
    if found is None or expected is None or found.shape[1] != expected.shape[1]:
        return None
    return float((found[at] - expected).norm() / expected.norm().clamp_min(1e-30))
