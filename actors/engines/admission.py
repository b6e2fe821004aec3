"""Which requests an engine can be asked at all, told before anything is computed."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from troupe.protocol.errors import ConfigError, TaskFailed
from troupe.protocol.messages import COLDEST, Generate


def length_limit(request: Generate, context: int, vocabulary: int) -> int:
    """How long the sequence may become, prompt included. Raises TaskFailed for a prompt that the model cannot be fed."""
    prompt = request.prompt
    if np.ndim(prompt) != 1 or not np.issubdtype(prompt.dtype, np.integer):
        raise TaskFailed(
            f"request '{request.request}': a prompt is a row of token ids, shape [n]; this one is {prompt.dtype} {prompt.shape}"
        )
    if not len(prompt):
        raise TaskFailed(f"request '{request.request}': the prompt is empty; there is nothing to continue")
    if len(prompt) >= context:
        raise TaskFailed(
            f"request '{request.request}': a prompt of {len(prompt)} tokens leaves no room in the context of "
            f"{context}: end the episode earlier (limits.max_episode_tokens) or compact it"
        )
    _known(prompt, vocabulary, f"request '{request.request}'")
    return min(len(prompt) + request.sampling.max_tokens, context)


def check_scored(ids: np.ndarray[Any, Any], context: int, vocabulary: int) -> None:
    """Raises TaskFailed for ids whose logprobs cannot be told."""
    if len(ids) < 2:
        raise TaskFailed(f"a sequence to score needs two ids or more, this one has {len(ids)}: the first has no logprob")
    if len(ids) > context:
        raise TaskFailed(f"a sequence of {len(ids)} ids cannot be scored: the context is {context}")
    _known(ids, vocabulary, "a sequence to score")


def check_temperature(temperature: float) -> None:
    """Raises ConfigError for one at which logprobs mean nothing."""
    if not (COLDEST <= temperature < math.inf):
        raise ConfigError(f"the temperature of scores must be {COLDEST} or more, got {temperature}")


def _known(ids: np.ndarray[Any, Any], vocabulary: int, where: str) -> None:
    if ids.min() < 0 or ids.max() >= vocabulary:
        raise TaskFailed(
            f"{where}: token ids run from {ids.min()} to {ids.max()}, the model knows 0 to {vocabulary - 1}: "
            "is the tokenizer of another model?"
        )
