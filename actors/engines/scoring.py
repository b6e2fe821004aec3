"""How the embedded engine scores given ids: in forward passes that it makes between two steps of sampling.

Promises: the logits of at most `_TOKENS` positions exist at a time, however many ids are scored; all logprobs of an answer
are of the same weights: a change of weights in between begins anew.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from troupe.actors.engines import sampling
from troupe.actors.engines.attention import Feed
from troupe.actors.engines.kv import KVCache, Row

_TOKENS = 256
"""Scored in one forward pass."""
_CACHED = 16_384
"""Keys and values held while scoring, in tokens; more where one sequence alone needs more."""


class Scoring:
    """A call of `Engine.score` on its way. `done` gets the answer."""

    def __init__(self, sequences: Sequence[np.ndarray[Any, Any]], temperature: float, done: Callable[[Any], None]) -> None:
        self.done = done
        self._sequences = sequences
        self._temperature = temperature
        self.restart()

    def restart(self) -> None:
        """What was computed so far is dropped."""
        self._cache = KVCache(max(_CACHED, *map(len, self._sequences)))
        self._found = [np.empty(len(ids) - 1, np.float32) for ids in self._sequences]
        self._next = 0
        self._row: Row | None = None  # of the next sequence, if it has begun

    def step(
        self, logits_of: Callable[[Feed, torch.Tensor], torch.Tensor], device: torch.device
    ) -> list[np.ndarray[Any, Any]] | None:
        """One forward pass; the answer if it was the last one. logits_of: the model's, of the tokens at some places."""
        numbers = self._begin()
        feed = self._cache.feed([(row, n) for row, (_, n) in numbers.items()], device)
        parts = [(numbers[row][0], row.fed, n) for row, n in zip(feed.rows, feed.counts, strict=True)]
        targets = np.concatenate([self._sequences[i][fed + 1 : fed + n + 1] for i, fed, n in parts])
        logits = logits_of(feed, torch.arange(feed.ids.shape[1], device=device))
        logprobs = sampling.logprobs(logits, targets, self._temperature)
        begin = 0
        for row, (i, fed, n) in zip(feed.rows, parts, strict=True):
            self._found[i][fed : fed + n] = logprobs[begin : begin + n]
            begin += n
            row.fed += n
            if row is not self._row:
                self._cache.release(row, keep=False)
        return self._found if self._next == len(self._sequences) else None

    def _begin(self) -> dict[Row, tuple[int, int]]:
        """The rows of the next pass, with the numbers of their sequences and of the ids to feed."""
        numbers: dict[Row, tuple[int, int]] = {}
        room = _TOKENS
        while room and self._next < len(self._sequences):
            fed = self._sequences[self._next][:-1]  # nothing is asked of what comes after the last
            row = self._row or self._cache.acquire("", fed, len(fed))
            if row is None:
                break
            n = min(room, len(fed) - row.fed)
            numbers[row] = self._next, n
            room -= n
            through = row.fed + n == len(fed)
            self._row = None if through else row
            self._next += through
        return numbers
