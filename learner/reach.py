"""How long a sequence may be for a model to read it the same in any company."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any


def reach(config: Any) -> int | None:
    """Tokens of the longest sequence, by a transformers config or what a config.json holds; None if it does not say.

    Of longrope it is what the short factors are for: transformers takes the long ones for all that is in a pass as soon as
    one sequence in it is longer. Of attention in chunks it is one chunk.
    """
    said = config.get if isinstance(config, Mapping) else partial(_said, config)
    rope = said("rope_parameters") or said("rope_scaling") or {}
    ropes = [rope, *(one for one in rope.values() if isinstance(one, Mapping))]  # one, or one for each type of layer
    limits = [said("max_position_embeddings") or said("n_positions"), said("attention_chunk_size")]
    for one in ropes:
        if one.get("rope_type", one.get("type")) in ("longrope", "su"):
            limits.append(one.get("original_max_position_embeddings") or said("original_max_position_embeddings"))
    return min((int(limit) for limit in limits if limit), default=None)


def _said(config: object, name: str) -> Any:
    return getattr(config, name, None)
