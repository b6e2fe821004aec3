"""The embedded engine: any transformers decoder with full attention, in this process, on a CPU or one GPU.

It owns the model and a thread that steps it. A step feeds every running request its next tokens in one forward pass
(one token to those that are sampling, a piece of the prompt to those that joined) and samples one token for each whose
prompt is complete: continuous batching. Requests join, leave and are aborted between two steps; so do weights change.

Promises, beyond those of `base.py`:
- between the turns of a session its keys and values are kept (within `max_cached_tokens`), and only what is new is fed;
  what was computed with older weights is not used by a request that comes after the change;
- logits are computed for the last position of a sequence only;
- a steady engine draws the same tokens for the same request, seed and float32 weights whatever else it runs: logits depend
  on their company by a rounding error, and where that could decide, they are computed once more from the sequence alone;
- what breaks in the thread fails every request in flight and all later calls with RemoteError; nothing hangs.
"""

from __future__ import annotations

import asyncio
import queue
import threading
import time
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from troupe.actors.engines import kv, sampling
from troupe.learner.model import arrays_of, beside, exchange
from troupe.protocol.checksum import checksum_of
from troupe.protocol.errors import ActorLost, ConfigError, NotReady, Overloaded, RemoteError, TaskFailed, TroupeError
from troupe.protocol.messages import Generate, Generated
from troupe.protocol.trajectory import Finish

_ROUNDING = 2e-4
"""Of a float32 logit, from one company of requests to another: well above what is seen."""
_PREFILL = 1024
"""Prompt tokens fed in one step at most, so that those who are sampling never wait long for those who join."""


@dataclass(slots=True, eq=False)
class _Sequence:
    """A request on its way, `length` tokens long by now."""

    request: Generate
    done: asyncio.Future[Any]
    limit: int
    stops: frozenset[int]
    uniforms: np.ndarray[Any, np.dtype[np.float64]]
    length: int
    keep: bool = True
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)


class LocalEngine:
    """See `base.Engine`. To be used from one asyncio event loop.

    load_model: makes the model, on the engine's own thread; its weights are not used before the first `load_weights`.
    max_running: requests that sample at the same time; max_waiting: those that may wait for a place, then Overloaded.
    max_cached_tokens: keys and values held, in tokens over all running and kept sequences (padded to the longest).
    steady: tokens never depend on the company of a request; costs a forward pass for each draw that rounding could decide.
    threads: CPU threads of one step. generator_name: stamped on every answer and named in errors.
    decode: ids to text, for requests with stop strings.
    """

    def __init__(
        self,
        load_model: Callable[[], torch.nn.Module],
        *,
        max_running: int = 64,
        max_waiting: int = 1024,
        max_cached_tokens: int = 131_072,
        device: str = "cpu",
        threads: int = 1,
        generator_name: str = "",
        decode: Callable[[list[int]], str] | None = None,
        steady: bool = False,
    ) -> None:
        self.version = -1
        self._load_model = load_model
        self._max_running = max_running
        self._max_requests = max_running + max_waiting
        self._device = torch.device(device)
        self._threads = threads
        self._name = generator_name or "the embedded engine"
        self._generator_name = generator_name
        self._decode = decode
        self._steady = steady

        # Of the event loop.
        self._thread: threading.Thread | None = None
        self._pending: set[asyncio.Future[Any]] = set()
        self._requests = 0
        self._dead: TroupeError | None = None
        self._stats_at = time.monotonic()
        self._stats_busy = 0.0

        # Of the thread.
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._answers: list[tuple[asyncio.Future[Any], Any]] = []
        self._waiting: deque[_Sequence] = deque()
        self._running: dict[kv.Row, _Sequence] = {}
        self._cache = kv.KVCache(max_cached_tokens)
        self._open = True
        self._busy = 0.0
        self._sampled = 0
        self._fed = 0

    # -- on the event loop -------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Loads the model. Call once. Raises the typed error of `load_model`, or RemoteError for any other."""
        if self._thread is not None:
            raise ConfigError(f"{self._name} was started already")
        self._loop = asyncio.get_running_loop()
        loaded = self._expect()
        self._thread = threading.Thread(target=self._work, args=(loaded,), name=self._name, daemon=True)
        self._thread.start()
        await loaded

    async def generate(self, request: Generate) -> Generated:
        """Samples a continuation. Raises NotReady before the first `load_weights`, Overloaded when the queue is full,
        TaskFailed for a prompt that the model cannot be fed, ConfigError for sampling settings that mean nothing.

        Reaching the model's context ends with finish "length". Cancelling the call aborts the request.
        """
        self._check_alive()
        if self.version < 0:
            raise NotReady(f"{self._name} holds no weights yet: load_weights comes first")
        if self._requests >= self._max_requests:
            raise Overloaded(f"{self._name} has {self._requests} requests in flight, its limit; try again later")
        sequence = self._admissible(request)
        self._requests += 1
        try:
            self._inbox.put(lambda: self._waiting.append(sequence))
            generated: Generated = await sequence.done
            return generated
        except asyncio.CancelledError:
            self._inbox.put(lambda: self._abort(lambda other: other is sequence))
            raise
        finally:
            self._requests -= 1

    async def abort(self, request: str) -> None:
        """Ends the request early: its `generate` returns what was sampled. Unknown ids are ignored."""
        self._check_alive()
        self._inbox.put(lambda: self._abort(lambda sequence: sequence.request.request == request))

    async def end_session(self, session: str) -> None:
        """Drops what is kept for the session between turns. A turn in flight goes on, and is not kept either."""
        self._check_alive()
        self._inbox.put(lambda: self._end(session))

    async def load_weights(self, version: int, tensors: Mapping[str, np.ndarray[Any, Any]]) -> str:
        """Takes over `tensors` as `version` between two steps; returns the checksum of what the model then holds.

        They are copied and summed beside the sampling; what is between the two steps is only that the copies become the model's
        parameters. Until then both are in memory. Raises CheckpointError if they are of another model; the old weights then
        stay in use.
        """
        self._check_alive()

        def copy() -> tuple[dict[str, torch.Tensor], str]:
            copies = beside(self._model, tensors)
            return copies, checksum_of(arrays_of(copies))

        copies, checksum = await asyncio.to_thread(copy)
        self._check_alive()
        taken = self._expect()
        self._inbox.put(lambda: self._take_weights(version, copies, taken))
        await taken
        self._loop.run_in_executor(None, copies.clear)  # they are the old ones now; it takes time to free gigabytes
        return checksum

    def stats(self) -> dict[str, float]:
        """`load` (requests in flight), `busy` (fraction of time since the last call), `tokens` (sampled since start),
        `fed` (prompt and sampled tokens computed since start: what reuse saves is missing here), `sessions` (kept)."""
        now, busy = time.monotonic(), self._busy
        fraction = (busy - self._stats_busy) / max(now - self._stats_at, 1e-9)
        self._stats_at, self._stats_busy = now, busy
        return {
            "load": float(self._requests),
            "busy": min(1.0, fraction),
            "tokens": float(self._sampled),
            "fed": float(self._fed),
            "sessions": float(self._cache.sessions),
        }

    async def close(self) -> None:
        """Stops; requests in flight end with "abort". Closing again does nothing."""
        if self._thread is None or self._dead is not None:
            return
        self._dead = ActorLost(f"{self._name} is closed")
        self._inbox.put(self._shut)
        await asyncio.to_thread(self._thread.join)

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise self._death()
        if self._thread is None:
            raise NotReady(f"{self._name} was not started")

    def _expect(self) -> asyncio.Future[Any]:
        """A future that the thread answers, or its death."""
        future: asyncio.Future[Any] = self._loop.create_future()
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        return future

    def _admissible(self, request: Generate) -> _Sequence:
        sampling.check(request.sampling)
        if request.sampling.stop and self._decode is None:
            raise ConfigError(f"{self._name} was made without a tokenizer: it can stop at ids, not at strings")
        prompt = request.prompt
        if not len(prompt):
            raise TaskFailed(f"request '{request.request}': the prompt is empty; there is nothing to continue")
        if len(prompt) >= self._context:
            raise TaskFailed(
                f"request '{request.request}': a prompt of {len(prompt)} tokens leaves no room in the context of "
                f"{self._context}: end the episode earlier (limits.max_episode_tokens) or compact it"
            )
        if prompt.min() < 0 or prompt.max() >= self._vocabulary:
            raise TaskFailed(
                f"request '{request.request}': token ids run from {prompt.min()} to {prompt.max()}, the model knows 0 "
                f"to {self._vocabulary - 1}: is the tokenizer of another model?"
            )
        limit = min(len(prompt) + request.sampling.max_tokens, self._context)
        return _Sequence(
            request,
            self._expect(),
            limit,
            frozenset(request.sampling.stop_ids),
            sampling.uniforms(request.seed, len(prompt), limit - len(prompt)),
            len(prompt),
        )

    def _resolve(self, answers: list[tuple[asyncio.Future[Any], Any]]) -> None:
        for future, answer in answers:
            if future.done():  # cancelled
                continue
            if isinstance(answer, BaseException):
                future.set_exception(answer)
            else:
                future.set_result(answer)

    def _died(self, error: Exception) -> None:
        if isinstance(error, TroupeError):
            self._dead = error
        else:
            self._dead = RemoteError(f"{self._name} died: {type(error).__name__}: {error}")
            self._dead.__cause__ = error
        self._resolve([(future, self._death()) for future in self._pending])

    def _death(self) -> TroupeError:
        assert self._dead is not None
        # To each caller an exception of its own: an exception's traceback grows each time that it is raised.
        again = type(self._dead)(str(self._dead))
        again.__cause__ = self._dead.__cause__
        return again

    # -- on the thread -----------------------------------------------------------------------------------------------

    def _work(self, loaded: asyncio.Future[Any]) -> None:
        try:
            torch.set_num_threads(self._threads)
            self._adopt(self._load_model())
            self._answers.append((loaded, None))
            self._send()
            with torch.inference_mode():
                while self._open:
                    self._read()
                    began = time.monotonic()
                    self._admit()
                    self._step()
                    self._send()
                    self._busy += time.monotonic() - began
        except Exception as error:
            # Not swallowed: handed to everyone who waits and to every later call.
            self._tell(self._died, error)

    def _tell(self, what: Callable[..., Any], *args: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(what, *args)
        except RuntimeError:  # the loop is closed: nobody waits any more
            self._open = False

    def _send(self) -> None:
        if self._answers:
            self._tell(self._resolve, self._answers)
            self._answers = []

    def _adopt(self, model: Any) -> None:
        base = model.get_base_model() if hasattr(model, "get_base_model") else model
        base.set_attn_implementation(kv.ATTENTION)
        self._model = model.to(self._device).eval()
        self._context = min(int(base.config.max_position_embeddings), self._cache.max_tokens)
        self._vocabulary = int(base.get_input_embeddings().num_embeddings)

    def _read(self) -> None:
        """Carries out what the event loop asked for; waits if there is nothing else to do."""
        idle = not (self._running or self._waiting)
        while self._open:
            try:
                message = self._inbox.get(block=idle)
            except queue.Empty:
                return
            message()
            self._send()
            idle = False

    def _abort(self, chosen: Callable[[_Sequence], bool]) -> None:
        for sequence in filter(chosen, list(self._waiting)):
            self._waiting.remove(sequence)
            self._answer(sequence, np.empty(0, np.int32), "abort")
        for row in [row for row, sequence in self._running.items() if chosen(sequence)]:
            self._finish(row, "abort")

    def _end(self, session: str) -> None:
        self._cache.forget(session)
        for sequence in (*self._waiting, *self._running.values()):
            sequence.keep = sequence.keep and sequence.request.session != session

    def _shut(self) -> None:
        self._abort(lambda _: True)
        self._open = False

    def _take_weights(self, version: int, copies: dict[str, torch.Tensor], taken: asyncio.Future[Any]) -> None:
        exchange(self._model, copies)
        self._cache.weights_changed()
        self.version = version
        self._answers.append((taken, None))

    def _admit(self) -> None:
        while self._waiting and len(self._running) < self._max_running:
            first = self._waiting[0]
            row = self._cache.acquire(first.request.session, first.request.prompt, first.limit)
            if row is None:  # until someone leaves
                return
            self._running[row] = self._waiting.popleft()

    def _step(self) -> None:
        """One forward pass, and one token for each request whose prompt is complete."""
        budget = _PREFILL
        parts: list[tuple[kv.Row, int]] = []
        for row, sequence in self._running.items():
            missing = sequence.length - row.fed
            if missing == 1:
                parts.append((row, 1))
            elif budget:
                parts.append((row, min(missing, budget)))
                budget -= parts[-1][1]
        if not parts:
            return
        feed = self._cache.feed(parts, self._device)
        for row, n in parts:
            row.fed += n
        ready = [i for i, row in enumerate(feed.rows) if row.fed == self._running[row].length]
        logits = self._logits(feed, feed.last[ready])
        self._fed += feed.ids.shape[1]
        if ready:
            self._extend([feed.rows[i] for i in ready], logits)

    def _logits(self, feed: kv.Feed, last: torch.Tensor) -> torch.Tensor:
        """Those of the tokens at `last`, shape [len(last), vocabulary]."""
        ids, at = feed.ids, feed.positions
        logits: torch.Tensor = self._model(
            input_ids=ids, position_ids=at, use_cache=False, logits_to_keep=last, feed=feed
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
        self._sampled += len(tokens)
        for row, sequence, token, logprob in zip(rows, sequences, tokens, logprobs, strict=True):
            row.ids[sequence.length] = token
            sequence.length += 1
            sequence.logprobs.append(logprob)
            sequence.versions.append(self.version)
            if token in sequence.stops or self._has_said(row, sequence):
                self._finish(row, "stop")
            elif sequence.length == sequence.limit:
                self._finish(row, "length")

    def _has_said(self, row: kv.Row, sequence: _Sequence) -> bool:
        """Whether a stop string is complete by now, wherever in the last token it ends."""
        stops = sequence.request.sampling.stop
        if not stops or self._decode is None:
            return False
        said = self._decode(row.ids[sequence.length - len(sequence.logprobs) : sequence.length].tolist())
        return any(stop in said for stop in stops)

    def _finish(self, row: kv.Row, finish: Finish) -> None:
        sequence = self._running.pop(row)
        begin = sequence.length - len(sequence.logprobs)
        self._answer(sequence, row.ids[begin : sequence.length].astype(np.int32), finish)
        self._cache.release(row, keep=sequence.keep)

    def _answer(self, sequence: _Sequence, tokens: np.ndarray[Any, Any], finish: Finish) -> None:
        logprobs, versions = np.array(sequence.logprobs, np.float32), np.array(sequence.versions, np.int32)
        self._answers.append((sequence.done, Generated(tokens, logprobs, versions, finish, self._generator_name)))
