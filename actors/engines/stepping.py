"""The embedded engine's thread: it owns the model and steps it.

A step feeds every running request its next tokens in one forward pass (one token to those that are sampling, a piece of
the prompt to those that joined) and samples one token for each whose prompt is complete: continuous batching. Between two
steps it does what it was told: requests join, leave and are aborted there, weights change, and given ids are scored.

It knows no event loop: it is told what to do by calls, and hands what it has to say to `answer`, a step's answers at once.
"""

from __future__ import annotations

import queue
import time
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as Seq
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from troupe.actors.engines import kv, sampling
from troupe.actors.engines.attention import ATTENTION, Feed
from troupe.actors.engines.base import Pause, Piece
from troupe.actors.engines.scoring import Scoring
from troupe.learner import alone
from troupe.learner.model import exchange
from troupe.learner.reach import reach
from troupe.learner.settings import check_present
from troupe.protocol.messages import Generate, Generated
from troupe.protocol.trajectory import Finish

_ROUNDING = 2e-4
"""Of a float32 logit, from one company of requests to another: well above what is seen."""
_PREFILL = 1024
"""Prompt tokens fed in one step at most, so that those who are sampling never wait long for those who join."""

_CANNOT = "be sampled by the embedded engine: set generator.engine = 'sglang' or 'vllm', or choose another model"

Answer = tuple[Callable[[Any], None], Any]
"""What to call on the other side, and with what."""


@dataclass(slots=True, eq=False)
class Sequence:
    """A request on its way. `done` gets its Generated, `heard` (if any) each token before the last.

    known: its ids when it joined, and those sampled before it was retracted. length: how many ids it has by now.
    """

    request: Generate
    known: np.ndarray[Any, Any]
    limit: int
    stops: frozenset[int]
    uniforms: np.ndarray[Any, np.dtype[np.float64]]
    done: Callable[[Any], None]
    heard: Callable[[Any], None] | None
    length: int
    keep: bool = True
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


class Stepper:
    """`run` is the thread's body; `tell` is for other threads, and all other methods are for what they tell.

    answer: takes the answers of a step, in order. For the rest see `local.LocalEngine`.
    """

    def __init__(
        self,
        answer: Callable[[list[Answer]], None],
        *,
        max_running: int,
        max_cached_tokens: int,
        min_shared: int,
        device: str,
        generator_name: str,
        decode: Callable[[list[int]], str] | None,
        steady: bool,
    ) -> None:
        self._answer = answer
        self._max_running = max_running
        self._new_cache: Callable[[], kv.KVCache] = lambda: kv.KVCache(max_cached_tokens, min_shared)
        self._device = torch.device(device)
        self._generator_name = generator_name
        self._decode = decode
        self._steady = steady

        # Others may read these.
        self.version = -1
        self.context = 0
        self.vocabulary = 0
        self.busy_s = 0.0
        self.sampled = 0
        self.fed = 0

        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._answers: list[Answer] = []
        self._waiting: deque[Sequence] = deque()
        self._running: dict[kv.Row, Sequence] = {}
        self._scoring: deque[Scoring] = deque()
        self._cache = self._new_cache()
        self._paused = False
        self._open = True

    def tell(self, what: Callable[[], None]) -> None:
        """Has `what` called between two steps."""
        self._inbox.put(what)

    @property
    def sessions(self) -> int:
        """Number of sessions whose keys and values are kept between turns."""
        return self._cache.sessions

    def run(self, load_model: Callable[[], Any], threads: int, loaded: Callable[[Any], None]) -> None:
        """Loads the model, then steps it until told to shut. What breaks is raised."""
        check_present(str(self._device), "generator.device")
        torch.set_num_threads(threads)
        self._adopt(load_model())
        self._answers.append((loaded, None))
        self._send()
        with torch.inference_mode():
            while self._open:
                self._read()
                began = time.monotonic()
                if not self._paused:
                    self._admit()
                    self._step()
                self._score()
                self._send()
                self.busy_s += time.monotonic() - began

    # -- between two steps -------------------------------------------------------------------------------------------

    def add(self, sequence: Sequence) -> None:
        """It waits for a place."""
        self._waiting.append(sequence)

    def abort(self, chosen: Callable[[Sequence], bool]) -> None:
        """Ends them with what was sampled."""
        for sequence in filter(chosen, list(self._waiting)):
            self._waiting.remove(sequence)
            self._end(sequence, sequence.known, "abort")
        for row in [row for row, sequence in self._running.items() if chosen(sequence)]:
            self._finish(row, "abort")

    def end_session(self, session: str) -> None:
        """Drops what is kept for it, and keeps nothing of its turns in flight."""
        self._cache.forget(session)
        for sequence in (*self._waiting, *self._running.values()):
            sequence.keep = sequence.keep and sequence.request.session != session

    def pause(self, mode: Pause, done: Callable[[Any], None]) -> None:
        """See `base.Pause`. retract gives up what is kept between turns, too."""
        self._paused = True
        if mode == "abort":
            self.abort(lambda _: True)
        elif mode == "retract":
            for row, sequence in self._running.items():
                sequence.known = row.ids[: sequence.length]
            self._waiting.extendleft(reversed(self._running.values()))
            self._running = {}
            self._cache = self._new_cache()
        self._answers.append((done, None))

    def resume(self) -> None:
        """Goes on after a pause."""
        self._paused = False

    def score(self, scoring: Scoring) -> None:
        """It is scored a piece at a time, between steps."""
        self._scoring.append(scoring)

    def exchange_weights(self, version: int, copies: dict[str, torch.Tensor], taken: Callable[[Any], None]) -> None:
        """Makes `copies` (from `beside`) the model's parameters, and its parameters `copies`."""
        exchange(self.model, copies)
        self._cache.weights_changed()
        for scoring in self._scoring:
            scoring.restart()
        self.version = version
        self._answers.append((taken, None))

    def shut(self) -> None:
        """Ends what is in flight, and then the thread."""
        self.abort(lambda _: True)
        self._open = False

    # -- a step ------------------------------------------------------------------------------------------------------

    def _adopt(self, model: Any) -> None:
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        plain = alone.replace_attention(base, ATTENTION, _CANNOT)
        self.model = model.to(self._device).eval()
        cache = kv.KVCache(1 << 12)
        alone.check(
            base,
            attention=ATTENTION,
            plain=plain,
            alone=lambda ids: model(input_ids=ids[None], use_cache=False).logits[0],
            together=lambda sequences: self._together(cache, sequences),
            cannot=_CANNOT,
        )
        limits = reach(base.config), cache.window, self._cache.max_tokens
        self.context = min(limit for limit in limits if limit is not None)
        self.vocabulary = int(base.get_input_embeddings().num_embeddings)

    def _together(self, cache: kv.KVCache, sequences: Seq[torch.Tensor]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        """See `alone.check`: a piece of each sequence, then one token, then the rest on top of what was kept."""
        rows = [cache.acquire("", ids.cpu().numpy(), len(ids)) for ids in sequences]
        logits: list[torch.Tensor] = []
        places: dict[kv.Row, list[int]] = {row: [] for row in rows if row is not None}
        fed = 0
        for left in (3, 2, 0):  # ids of each after the pass
            feed = cache.feed([(row, len(row.ids) - row.fed - left) for row in places], self._device)
            logits.append(self._logits(feed, torch.arange(feed.ids.shape[1], device=self._device)))
            for row, n in zip(feed.rows, feed.counts, strict=True):
                places[row].extend(range(fed, fed + n))
                row.fed += n
                fed += n
        return torch.cat(logits), [torch.tensor(at, device=self._device) for at in places.values()]

    def _read(self) -> None:
        """Does what was told; waits if there is nothing else to do."""
        idle = not self._scoring and (self._paused or not (self._running or self._waiting))
        while self._open:
            try:
                what = self._inbox.get(block=idle)
            except queue.Empty:
                return
            what()
            self._send()
            idle = False

    def _send(self) -> None:
        if self._answers:
            self._answer(self._answers)
            self._answers = []

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_running:
            first = self._waiting[0]
            row = self._cache.acquire(first.request.session, first.known, first.limit)
            if row is None:  # until someone leaves
                return
            self._running[row] = self._waiting.popleft()

    def _step(self) -> None:
        """One forward pass, and one token for each request whose prompt is complete."""
        budget = _PREFILL
        parts: list[tuple[kv.Row, int]] = []
        for row, sequence in self._running.items():
            missing = sequence.length - row.fed
            if row.source is not None:
                continue  # another row computes it
            if missing == 1:
                parts.append((row, 1))
            elif budget:
                parts.append((row, min(missing, budget)))
                budget -= parts[-1][1]
        if not parts:
            return
        feed = self._cache.feed(parts, self._device)
        ready = [i for i, row in enumerate(feed.rows) if row.fed + feed.counts[i] == self._running[row].length]
        logits = self._logits(feed, feed.last[ready])
        for row, n in parts:
            row.fed += n
        self._cache.share()
        self.fed += feed.ids.shape[1]
        if ready:
            self._extend([feed.rows[i] for i in ready], logits)

    def _logits(self, feed: Feed, at: torch.Tensor) -> torch.Tensor:
        """Those of the tokens at `at`, shape [len(at), vocabulary]."""
        logits: torch.Tensor = self.model(
            input_ids=feed.ids, position_ids=feed.positions, use_cache=False, logits_to_keep=at, feed=feed
        ).logits
        return logits[0]

    def _alone(self, ids: np.ndarray[Any, Any]) -> torch.Tensor:
        """The next token's logits after `ids`, computed from nothing else, so rounded the same in any company."""
        cache = kv.KVCache(len(ids))
        row = cache.acquire("", ids, len(ids))
        assert row is not None
        feed = cache.feed([(row, len(ids))], self._device)
        return self._logits(feed, feed.last)

    def _extend(self, rows: list[kv.Row], logits: torch.Tensor) -> None:
        """Samples one token for each row and ends those that are complete."""
        sequences = [self._running[row] for row in rows]
        settings = [sequence.request.sampling for sequence in sequences]
        uniform = np.array([sequence.uniforms[len(sequence.logprobs)] for sequence in sequences])
        if self._steady:
            for i in sampling.close(logits, settings, uniform, _ROUNDING):
                logits[i] = self._alone(rows[i].ids[: sequences[i].length])
        tokens, logprobs = sampling.sample(logits, settings, uniform)
        self.sampled += len(tokens)
        for row, sequence, token, logprob in zip(rows, sequences, tokens, logprobs, strict=True):
            row.ids[sequence.length] = token
            sequence.length += 1
            sequence.logprobs.append(logprob)
            sequence.versions.append(self.version)
            if token in sequence.stops or self._has_said(row, sequence):
                self._finish(row, "stop")
            elif sequence.length == sequence.limit:
                self._finish(row, "length")
            elif sequence.heard is not None:
                self._answers.append((sequence.heard, _piece(token, logprob, self.version)))

    def _has_said(self, row: kv.Row, sequence: Sequence) -> bool:
        """Whether a stop string is complete by now, wherever in the last token it ends."""
        stops = sequence.request.sampling.stop
        if not stops or self._decode is None:
            return False
        said = self._decode(row.ids[sequence.length - len(sequence.logprobs) : sequence.length].tolist())
        return any(stop in said for stop in stops)

    def _finish(self, row: kv.Row, finish: Finish) -> None:
        sequence = self._running.pop(row)
        self._end(sequence, row.ids[: sequence.length], finish)
        self._cache.release(row, keep=sequence.keep)

    def _end(self, sequence: Sequence, ids: np.ndarray[Any, Any], finish: Finish) -> None:
        tokens = ids[len(ids) - len(sequence.logprobs) :].astype(np.int32)
        logprobs, versions = np.array(sequence.logprobs, np.float32), np.array(sequence.versions, np.int32)
        self._answers.append((sequence.done, Generated(tokens, logprobs, versions, finish, self._generator_name)))

    def _score(self) -> None:
        """One forward pass of the first in the queue."""
        if not self._scoring:
            return
        found = self._scoring[0].step(self._logits, self._device)
        if found is not None:
            self._answers.append((self._scoring.popleft().done, found))


def _piece(token: int, logprob: float, version: int) -> Piece:
    return Piece(np.array([token], np.int32), np.array([logprob], np.float32), np.array([version], np.int32))
