"""The embedded engine: transformers decoders whose tokens meet in attention only, in this process, on a CPU or one GPU.

Here is its side on the event loop: what is refused, who waits for what, and how it ends. The model is stepped by a thread
(`stepping.py`), keys and values lie in `kv.py`.

Promises, beyond those of `base.py`:
- between the turns of a session its keys and values are kept (within `max_cached_tokens`), and only what is new is fed;
  a prompt that begins like another one's takes over what that has;
- what was computed with older weights is not used by a request that comes after the change;
- logits are computed for the last position of a sequence only, and for those that are scored;
- a steady engine draws the same tokens for the same request, seed and float32 weights whatever else it runs: logits depend
  on their company by a rounding error, and where that could decide, they are computed once more from the sequence alone;
- what breaks in the thread fails every request in flight and all later calls with RemoteError; nothing hangs.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, get_args

import numpy as np
import torch

from troupe.actors.engines import admission, sampling, stepping
from troupe.actors.engines.base import Capabilities, Pause, Piece
from troupe.actors.engines.scoring import Scoring
from troupe.actors.line import Offer
from troupe.learner.model import arrays_of, base_of, beside
from troupe.protocol.checksum import checksum_of
from troupe.protocol.errors import ActorLost, ConfigError, NotReady, Overloaded, RemoteError, TroupeError
from troupe.protocol.messages import Generate, Generated


class LocalEngine:
    """See `base.Engine`. To be used from one asyncio event loop.

    load_model: makes the model, on the engine's own thread; its weights are not used before the first `load_weights`.
    max_running: requests that sample at the same time; max_waiting: those that may wait for a place, then Overloaded.
    max_cached_tokens: keys and values held, in tokens over all running and kept sequences (padded to the longest).
    min_shared: tokens that two prompts must have in common for one to take over the other's keys and values; 0: never.
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
        min_shared: int = 32,
        device: str = "cpu",
        threads: int = 1,
        generator_name: str = "",
        decode: Callable[[list[int]], str] | None = None,
        steady: bool = False,
    ) -> None:
        self.version, self.base = -1, ""
        self._load_model = load_model
        self._max_requests = max_running + max_waiting
        self._threads = threads
        self._name = generator_name or "the embedded engine"
        self._stops_at_strings = decode is not None
        self._capabilities = Capabilities("local", frozenset(get_args(Pause)), score=True, adapters=True, repeatable=steady)
        self._stepper = stepping.Stepper(
            lambda answers: self._tell(self._hear, answers),
            max_running=max_running,
            max_cached_tokens=max_cached_tokens,
            min_shared=min_shared,
            device=device,
            generator_name=generator_name,
            decode=decode,
            steady=steady,
        )
        self._thread: threading.Thread | None = None
        self._pending: set[asyncio.Future[Any]] = set()
        self._requests = 0
        self._dead: TroupeError | None = None
        self._stats_at = time.monotonic()
        self._stats_busy = 0.0

    @property
    def capabilities(self) -> Capabilities:
        """Everything that the interface knows; repeatable if it is steady."""
        return self._capabilities

    async def start(self) -> None:
        """Loads the model. Call once. Raises the typed error of `load_model`, or RemoteError for any other."""
        if self._thread is not None:
            raise ConfigError(f"{self._name} was started already")
        self._loop = asyncio.get_running_loop()
        loaded = self._expect()
        self._thread = threading.Thread(target=self._work, args=(loaded,), name=self._name, daemon=True)
        self._thread.start()
        await loaded

    # -- requests ----------------------------------------------------------------------------------------------------

    async def generate(self, request: Generate) -> Generated:
        """Samples a continuation. Raises NotReady before the first `load_weights`, Overloaded when the queue is full,
        TaskFailed for a prompt that the model cannot be fed, ConfigError for sampling settings that mean nothing.

        Reaching the model's context ends with finish "length". Cancelling the call aborts the request.
        """
        with self._in_flight(request) as done:
            generated: Generated = await done
            return generated

    async def stream(self, request: Generate) -> AsyncIterator[Piece]:
        """The same, a piece for each token as it is sampled. Leaving the iterator aborts the request."""
        pieces: asyncio.Queue[Piece | None] = asyncio.Queue()
        with self._in_flight(request, pieces.put_nowait) as done:
            done.add_done_callback(lambda _: pieces.put_nowait(None))
            told = 0
            while (piece := await pieces.get()) is not None:
                told += len(piece.tokens)
                yield piece
            got: Generated = done.result()
            yield Piece(got.tokens[told:], got.logprobs[told:], got.versions[told:], got.finish)

    async def abort(self, request: str) -> None:
        """Ends the request early: its `generate` returns what was sampled. Unknown ids are ignored."""
        self._check_alive()
        self._stepper.tell(lambda: self._stepper.abort(lambda sequence: sequence.request.request == request))

    async def end_session(self, session: str) -> None:
        """Drops what is kept for the session between turns. A turn in flight goes on, and is not kept either."""
        self._check_alive()
        self._stepper.tell(lambda: self._stepper.end_session(session))

    async def score(self, sequences: Sequence[np.ndarray[Any, Any]], temperature: float = 1.0) -> list[np.ndarray[Any, Any]]:
        """Logprobs of given ids, all under the same weights; see `base.Engine`. Sampling goes on meanwhile.

        Raises NotReady and Overloaded as `generate` does, TaskFailed for ids that the model cannot be fed, ConfigError for
        a temperature that is not above 0.
        """
        self._check_room()
        admission.check_temperature(temperature)
        for ids in sequences:
            admission.check_scored(ids, self._stepper.context, self._stepper.vocabulary)
        if not len(sequences):
            return []
        done = self._expect()
        scoring = Scoring(sequences, temperature, partial(_settle, done))
        self._requests += 1
        try:
            self._stepper.tell(lambda: self._stepper.score(scoring))
            found: list[np.ndarray[Any, Any]] = await done
            return found
        finally:
            self._requests -= 1

    # -- control -----------------------------------------------------------------------------------------------------

    async def pause(self, mode: Pause) -> None:
        """Samples nothing from now on; scoring and new weights go on. Pausing again may be in another mode."""
        self._check_alive()
        if mode not in self._capabilities.pauses:
            raise ConfigError(f"{self._name} cannot pause in mode '{mode}': choose one of {', '.join(get_args(Pause))}")
        paused = self._expect()
        self._stepper.tell(lambda: self._stepper.pause(mode, partial(_settle, paused)))
        await paused

    async def resume(self) -> None:
        """Goes on after `pause`."""
        self._check_alive()
        self._stepper.tell(self._stepper.resume)

    async def load_weights(self, version: int, tensors: Mapping[str, np.ndarray[Any, Any] | torch.Tensor] | Offer) -> str:
        """Takes over `tensors` as `version` between two steps; returns the checksum of what the model then holds.

        They are copied, if they are arrays, and summed beside the sampling; what is between the two steps is only that they
        become the model's parameters. Until then both are in memory. Raises CheckpointError if they are of another model; the
        old weights then stay in use.
        """
        self._check_alive()
        assert not isinstance(tensors, Offer), "it does not pull"

        def copy() -> tuple[dict[str, torch.Tensor], str, str]:
            model = self._stepper.model
            copies = beside(model, tensors)
            base = checksum_of(base_of(model)) if hasattr(model, "peft_config") else ""
            return copies, checksum_of(arrays_of(copies)), base

        copies, checksum, self.base = await asyncio.to_thread(copy)
        self._check_alive()
        taken = self._expect()

        def took(_: Any) -> None:
            self.version = version
            _settle(taken, None)

        self._stepper.tell(lambda: self._stepper.exchange_weights(version, copies, took))
        await taken
        self._loop.run_in_executor(None, copies.clear)  # they are the old ones now; it takes time to free gigabytes
        return checksum

    async def check(self) -> None:
        """Raises what ended it: RemoteError if it broke, ActorLost if it was closed."""
        self._check_alive()

    def stats(self) -> dict[str, float]:
        """`load` (requests in flight), `busy` (fraction of time since the last call), `tokens` (sampled since start),
        `fed` (prompt and sampled tokens computed since start: what reuse saves is missing here), `sessions` (kept)."""
        now, busy = time.monotonic(), self._stepper.busy_s
        fraction = (busy - self._stats_busy) / max(now - self._stats_at, 1e-9)
        self._stats_at, self._stats_busy = now, busy
        return {
            "load": float(self._requests),
            "busy": min(1.0, fraction),
            "tokens": float(self._stepper.sampled),
            "fed": float(self._stepper.fed),
            "sessions": float(self._stepper.sessions),
        }

    async def close(self) -> None:
        """Stops; requests in flight end with "abort", other calls with ActorLost. Closing again does nothing."""
        if self._thread is None or self._dead is not None:
            return
        self._dead = ActorLost(f"{self._name} is closed")
        self._stepper.tell(self._stepper.shut)
        await asyncio.to_thread(self._thread.join)
        self._fail_pending()

    # -- what is refused ---------------------------------------------------------------------------------------------

    def _check_alive(self) -> None:
        if self._dead is not None:
            raise self._death()
        if self._thread is None:
            raise NotReady(f"{self._name} was not started")

    def _check_room(self) -> None:
        self._check_alive()
        if self.version < 0:
            raise NotReady(f"{self._name} holds no weights yet: load_weights comes first")
        if self._requests >= self._max_requests:
            raise Overloaded(f"{self._name} has {self._requests} requests in flight, its limit; try again later")

    # -- who waits for what ------------------------------------------------------------------------------------------

    @contextmanager
    def _in_flight(
        self, request: Generate, heard: Callable[[Piece], None] | None = None
    ) -> Iterator[asyncio.Future[Generated]]:
        """The future of its answer. Leaving before there is one aborts the request."""
        self._check_room()
        sampling.check(request.sampling)
        prompt = request.prompt
        if request.sampling.stop and not self._stops_at_strings:
            raise ConfigError(f"{self._name} was made without a tokenizer: it can stop at ids, not at strings")
        limit = admission.length_limit(request, self._stepper.context, self._stepper.vocabulary)
        done = self._expect()
        sequence = stepping.Sequence(
            request,
            prompt,
            limit,
            frozenset(request.sampling.stop_ids),
            sampling.uniforms(request.seed, len(prompt), limit - len(prompt)),
            partial(_settle, done),
            heard,
            len(prompt),
        )
        self._requests += 1
        try:
            self._stepper.tell(lambda: self._stepper.add(sequence))
            yield done
        finally:
            self._requests -= 1
            if done.cancel() or done.cancelled():
                self._stepper.tell(lambda: self._stepper.abort(lambda other: other is sequence))

    def _expect(self) -> asyncio.Future[Any]:
        """A future that the thread answers, or its death."""
        future: asyncio.Future[Any] = self._loop.create_future()
        self._pending.add(future)
        future.add_done_callback(self._pending.discard)
        return future

    def _hear(self, answers: list[stepping.Answer]) -> None:
        for take, answer in answers:
            take(answer)

    def _died(self, error: Exception) -> None:
        if isinstance(error, TroupeError):
            self._dead = error
        else:
            self._dead = RemoteError(f"{self._name} died: {type(error).__name__}: {error}")
            self._dead.__cause__ = error
        self._fail_pending()

    def _fail_pending(self) -> None:
        for future in list(self._pending):
            _settle(future, self._death())

    def _death(self) -> TroupeError:
        assert self._dead is not None
        # To each caller an exception of its own: an exception's traceback grows each time that it is raised.
        again = type(self._dead)(str(self._dead))
        again.__cause__ = self._dead.__cause__
        return again

    # -- on the thread -----------------------------------------------------------------------------------------------

    def _work(self, loaded: asyncio.Future[Any]) -> None:
        try:
            self._stepper.run(self._load_model, self._threads, partial(_settle, loaded))
        except Exception as error:
            # Not swallowed: handed to everyone who waits and to every later call.
            self._tell(self._died, error)

    def _tell(self, what: Callable[..., Any], *args: Any) -> None:
        try:
            self._loop.call_soon_threadsafe(what, *args)
        except RuntimeError:  # the loop is closed: nobody waits any more
            self._stepper.shut()


def _settle(future: asyncio.Future[Any], answer: Any) -> None:
    if future.done():  # cancelled
        return
    if isinstance(answer, BaseException):
        future.set_exception(answer)
    else:
        future.set_result(answer)
