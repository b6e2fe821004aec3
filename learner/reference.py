"""The frozen policy that a divergence is measured against.

With LoRA it is the base model, reached by turning the adapter off: no second copy. Without, it is a copy of the policy as it
was when reinforcement learning began (after the cold start), or when it was last reset (ProRL, arXiv:2505.24864, section 3).
Of several ranks each holds a share of the copy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from troupe.learner import ranks
from troupe.learner.config import ModelConfig
from troupe.learner.model import load
from troupe.learner.packing import Parts, prepare


class Reference:
    """Of `model`, whose parts are `parts`. A copy is taken at the first `follow`, and is part of `state_dict`."""

    def __init__(self, model: Any, parts: Parts, config: ModelConfig, *, reset_every: int, seed: int) -> None:
        self._model, self._parts = model, parts
        self._config, self._reset_every, self._seed = config, reset_every, seed
        self._copy: torch.nn.Module | None = None
        self._copied: Parts | None = None

    def follow(self, step: int) -> bool:
        """To be called before each training step, with the steps done: takes a copy when it is time. Returns whether that
        was a reset; the first copy is none."""
        due = bool(self._reset_every and step and step % self._reset_every == 0)
        if self._config.lora is None and (self._copy is None or due):
            with torch.no_grad():
                for mine, current in zip(self._frozen().parameters(), self._model.parameters(), strict=True):
                    mine.copy_(current)
        return due

    @contextmanager
    def parts(self) -> Iterator[Parts]:
        """Those of the reference, for `packing.logprobs`, without gradients."""
        with torch.no_grad():
            if self._copied is not None:
                yield self._copied
            else:
                with self._model.disable_adapter():
                    yield self._parts

    def state_dict(self) -> dict[str, torch.Tensor]:
        """The copy's weights; empty with LoRA, and before the first step."""
        return {} if self._copy is None else dict(self._copy.state_dict())

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """The inverse of `state_dict`."""
        if not state:
            self._copy = self._copied = None
        else:
            ranks.fill(self._frozen(), state)

    def _frozen(self) -> torch.nn.Module:
        if self._copy is None:
            self._copy = load(self._config, seed=self._seed).requires_grad_(False)
            self._copied = prepare(self._copy, device=next(self._model.parameters()).device)
        return self._copy
