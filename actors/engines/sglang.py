"""An SGLang server as an engine: one server process a replica, spoken to over its native HTTP API.

The server is this engine's own, started by `sglang_inside.py` with the interpreter in which SGLang is installed, or somebody
else's, at an address; that one must have been started by `sglang_inside.py` too, and serves nobody else.

Promises, beyond those of `base.py`:
- its own server dies with it, and with its process, even on kill -9 (`server.py`);
- spans of versions come from the server, which pauses for each change of weights; the checksum is of what its model holds;
- keys and values of other versions are never used by a request that comes after a change: each request's prefix cache is salted
  anew with each load. `retract`: requests in flight are fed again to the new weights, and the cache is emptied;
  `in_place`: they keep what the old weights computed for them, to their end, as do those that wait at the server;
- logprobs with top_k or with top_p are those that SGLang drew from. Both together are refused: it takes top_p of the whole
  distribution, Troupe of what top_k left.
"""

from __future__ import annotations

import asyncio
import sys
import tempfile
import time
import uuid
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

import numpy as np

from troupe.actors.engines import admission, sampling, sglang_launch
from troupe.actors.engines.base import Capabilities, Pause, Piece
from troupe.actors.engines.server import Server, free_port
from troupe.actors.engines.sglang_flights import Flights
from troupe.actors.engines.sglang_wire import Wire, request_body
from troupe.learner import model as weights
from troupe.learner.config import ModelConfig
from troupe.protocol.errors import ActorLost, ConfigError, NotReady, Overloaded, RemoteError, TimedOut, TroupeError
from troupe.protocol.messages import Generate, Generated

_CALL_S, _LOAD_S = 150.0, 600.0
"""Longer than one step may take on a busy CPU: the server answers between two of them."""
_LOOK_S = 15.0
"""A server with requests in flight is looked after this often."""


class SGLangEngine:
    """See `base.Engine`. To be used from one asyncio event loop.

    model: the folder that is served, and the dtype. Its weights are not read: they come by `load_weights`.
    python: the interpreter in which SGLang is installed; empty: this one. url: a server that somebody else owns and ends.
    max_running: requests at the server at a time; max_waiting: those that may wait here, then Overloaded.
    max_cached_tokens: keys and values that the server holds, in tokens. threads: of its CPU work. args: more flags for it.
    on_update: what becomes of requests in flight when weights change. transport: how weights get there; `disk`: as a file in a
    temporary folder that both see. start_s: limit of the start. log: what the server writes; None: a temporary file.
    decode: ids to text, for requests with stop strings: their turn is cut here, at the token in which the string is complete.
    """

    def __init__(
        self,
        model: ModelConfig,
        *,
        python: str = "",
        url: str = "",
        max_running: int = 64,
        max_waiting: int = 1024,
        max_cached_tokens: int = 131_072,
        device: str = "cpu",
        threads: int = 1,
        on_update: Literal["retract", "in_place"] = "retract",
        transport: Literal["tensors", "disk"] = "tensors",
        start_s: float = 300.0,
        args: Sequence[str] = (),
        log: Path | None = None,
        generator_name: str = "",
        decode: Callable[[list[int]], str] | None = None,
    ) -> None:
        if model.lora is not None:
            raise ConfigError(
                "generator.engine = 'sglang' takes whole weights, and model.lora trains an adapter, to which SGLang binds a "
                "request from its start to its end: weights could not change under it; set generator.engine = 'local'"
            )
        self.version = -1
        self._model, self._url, self._python = model, url.rstrip("/"), python or sys.executable
        self._max_running, self._max_requests = max_running, max_running + max_waiting
        self._max_cached, self._device, self._threads = max_cached_tokens, device, threads
        self._on_update, self._transport, self._start_s = on_update, transport, start_s
        self._args, self._log, self._decode = list(args), log, decode
        self._name = f"SGLang of {generator_name}" if generator_name else "the SGLang server"
        self._generator_name = generator_name

        self._flights = Flights(self._name, max_running, decode, self._told)
        self._server: Server | None = None
        self._wire: Wire | None = None
        self._watch: asyncio.Task[None] | None = None
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._dead: TroupeError | None = None
        self._changing = asyncio.Lock()
        self._paused: Pause | None = None

    @property
    def capabilities(self) -> Capabilities:
        """Seeds are obeyed; in other company a logit may round otherwise, so tokens are not repeatable without fail."""
        pauses: frozenset[Pause] = frozenset(("in_place", "retract", "abort"))
        return Capabilities("sglang", pauses, score=True, adapters=False, repeatable=False)

    # -- the server ----------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Starts the server, or greets the one at `url`. Call once. Raises ConfigError or TimedOut with its last words."""
        if self._wire is not None:
            raise ConfigError(f"{self._name} was started already")
        try:
            await self._start()
        except TroupeError as error:
            self._dead = error
            await self._end_server()
            raise

    async def _start(self) -> None:
        self._outline: Any = await asyncio.to_thread(weights.outline, self._model)
        config = self._outline.config
        self._vocabulary = int(self._outline.get_input_embeddings().num_embeddings)
        self._context = min(int(config.max_position_embeddings), self._max_cached - sglang_launch.MARGIN)
        self._scratch = tempfile.TemporaryDirectory(prefix="troupe-sglang-")
        if self._url:
            self._wire = Wire(self._name, self._url)
            deadline = time.monotonic() + self._start_s
            while not await self._wire.up():
                if time.monotonic() > deadline:
                    raise TimedOut(
                        f"{self._name}: nobody has answered at generator.sglang_url {self._url} for {self._start_s:g} s"
                    )
                await asyncio.sleep(0.2)
            info = await self._wire.call("/server_info")
            room = min(
                info.get("context_length") or self._context + sglang_launch.MARGIN,
                info.get("max_total_num_tokens") or self._max_cached,
            )
            self._context = min(self._context, int(room) - sglang_launch.MARGIN)
            await self._wire.call("/continue_generation", {})  # whoever used it before may have died in a pause
        else:
            port = free_port()
            self._wire = Wire(self._name, f"http://127.0.0.1:{port}")
            command = sglang_launch.command(
                self._model,
                port,
                python=self._python,
                device=self._device,
                context=self._context,
                vocabulary=self._vocabulary,
                max_running=self._max_running,
                max_cached_tokens=self._max_cached,
                more=self._args,
            )
            environment = sglang_launch.environment(self._device, self._threads)
            log = self._log or Path(self._scratch.name) / "server.log"
            self._server = Server(self._name, command, log, environment, self._scratch.name)
            await self._server.start(self._wire.up, self._start_s)
        self._flights.wire = self._wire
        self._watch = asyncio.create_task(self._look_after())

    async def _look_after(self) -> None:
        """Fails everything once the server is gone, or does not answer."""
        gone = asyncio.create_task(self._server.ended()) if self._server is not None else None
        try:
            while self._dead is None:
                await (asyncio.wait([gone], timeout=_LOOK_S) if gone else asyncio.sleep(_LOOK_S))
                if gone is not None and gone.done():
                    self._die(gone.result())
                elif self._flights.running:
                    try:
                        await self.check()
                    except TroupeError as error:
                        self._die(error)
        finally:
            if gone is not None:
                gone.cancel()

    def _die(self, error: TroupeError) -> None:
        if self._dead is None:
            if self._server is not None and self._server.wrote("NaN detected"):
                error = RemoteError(f"the model's logits are not finite numbers: its weights have diverged; {error}")
            self._dead = error
        self._flights.fail(self._dead)

    def _told(self, error: TroupeError) -> TroupeError:
        """What becomes of an error that one request met: a lost server is lost to all."""
        if isinstance(error, ActorLost):
            self._die(self._server.lost() if self._server is not None and not self._server.alive else error)
            return self._death()
        return error

    def _death(self) -> TroupeError:
        assert self._dead is not None
        return type(self._dead)(str(self._dead))  # to each caller an exception, and so a traceback, of its own

    async def check(self) -> None:
        """Raises ActorLost if the server is gone or silent; RemoteError if it cannot sample any more."""
        wire = self._alive()
        if self._server is not None and not self._server.alive:
            raise self._server.lost()
        try:
            await wire.call("/server_info" if self._flights.held_back else "/health", limit_s=_CALL_S)
        except TimedOut as error:
            raise ActorLost(str(error)) from error

    async def close(self) -> None:
        """Ends its own server; requests in flight end with "abort". Closing again does nothing."""
        if self._dead is None:
            self._dead = ActorLost(f"{self._name} is closed")
            await self._flights.close(limit_s=5.0 if self._url else 0.0)
        await self._end_server()

    async def _end_server(self) -> None:
        if self._watch is not None:
            self._watch.cancel()
        if self._server is not None:
            await self._server.stop()
        if self._wire is not None:
            await self._wire.close()
        if self._scratch is not None:
            self._scratch.cleanup()

    def _alive(self) -> Wire:
        if self._dead is not None:
            raise self._death()
        if self._wire is None:
            raise NotReady(f"{self._name} was not started")
        return self._wire

    # -- requests ------------------------------------------------------------------------------------------------------

    async def generate(self, request: Generate) -> Generated:
        """Samples a continuation. Raises NotReady before the first `load_weights`, Overloaded when the queue is full,
        TaskFailed for a prompt that the model cannot be fed, ConfigError for sampling settings that mean nothing here."""
        pieces = [piece async for piece in self._stream(request, interval=1 if request.sampling.stop else 8)]
        tokens, logprobs, versions = (
            np.concatenate([getattr(piece, name) for piece in pieces]) for name in ("tokens", "logprobs", "versions")
        )
        finish = pieces[-1].finish
        assert finish is not None
        return Generated(tokens, logprobs, versions, finish, self._generator_name)

    def stream(self, request: Generate) -> AsyncIterator[Piece]:
        """The same as it comes, a token or a few at a time."""
        return self._stream(request, interval=1)

    async def _stream(self, request: Generate, interval: int) -> AsyncIterator[Piece]:
        self._alive()
        if self.version < 0:
            raise NotReady(f"{self._name} holds no weights yet: load_weights comes first")
        if len(self._flights) >= self._max_requests:
            raise Overloaded(f"{self._name} has {len(self._flights)} requests in flight, its limit; try again later")
        flight = self._flights.add(request, self._body(request, interval))
        try:
            while True:
                piece = await flight.pieces.get()
                if isinstance(piece, TroupeError):
                    raise piece
                yield piece
                if piece.finish is not None:
                    return
        finally:
            self._flights.drop(flight)

    def _body(self, request: Generate, interval: int) -> dict[str, Any]:
        settings = request.sampling
        sampling.check(settings)
        if settings.stop and self._decode is None:
            raise ConfigError(f"{self._name} was made without a tokenizer: it can stop at ids, not at strings")
        limit = admission.length_limit(request, self._context, self._vocabulary)
        return request_body(request, limit - len(request.prompt), self._vocabulary, interval)

    async def abort(self, request: str) -> None:
        """Ends the request early: its `generate` returns what was sampled. Unknown ids are ignored."""
        self._alive()
        await self._flights.abort([f for f in self._flights.all if f.request.request == request], wait=not self._paused)

    async def end_session(self, session: str) -> None:
        """Nothing to drop: turns share prefixes through the server's own cache, where the least recently used go first."""
        self._alive()

    async def score(self, sequences: Sequence[np.ndarray[Any, Any]], temperature: float = 1.0) -> list[np.ndarray[Any, Any]]:
        """Logprobs of given ids. Raises TaskFailed for ids that the model cannot be fed. Waits for the end of a pause."""
        wire = self._alive()
        if self.version < 0:
            raise NotReady(f"{self._name} holds no weights yet: load_weights comes first")
        admission.check_temperature(temperature)
        for ids in sequences:
            admission.check_scored(np.asarray(ids), self._context, self._vocabulary)
        places = asyncio.Semaphore(self._max_running)

        async def one(ids: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
            body = {
                "input_ids": ids.tolist(),
                "return_logprob": True,
                "logprob_start_len": 0,
                "sampling_params": {"max_new_tokens": 0, "temperature": temperature},
                "extra_key": self._flights.salt,
            }
            async with places:
                found = await wire.score(body, _LOAD_S)
            if [pair[1] for pair in found] != np.where(
                ids == self._vocabulary - 1, 0, ids
            ).tolist():  # SGLang calls the last id 0
                raise RemoteError(f"{self._name} scored other ids than it was given")
            return np.array([pair[0] for pair in found[1:]], np.float32)

        return list(await asyncio.gather(*(one(np.asarray(ids)) for ids in sequences)))

    # -- weights -------------------------------------------------------------------------------------------------------

    async def pause(self, mode: Pause) -> None:
        """Samples nothing from now on. Returns when no token is being computed. Requests still come in, and wait here."""
        async with self._changing:
            wire = self._alive()
            going, self._paused, self._flights.held_back = self._paused is None, mode, True
            if mode == "abort":
                flights = self._flights.all
                await self._flights.abort(flights, wait=going)
                deadline = time.monotonic() + _CALL_S
                while not all(flight.over for flight in flights):
                    if time.monotonic() > deadline:
                        raise TimedOut(f"{self._name} has not ended its requests within {_CALL_S:g} s")
                    await asyncio.sleep(0.01)
            await self._halt(wire, "in_place" if mode == "abort" else mode)

    async def resume(self) -> None:
        """Goes on after `pause`; without one it does nothing."""
        async with self._changing:
            wire = self._alive()
            if self._paused is not None:
                await wire.call("/continue_generation", {}, limit_s=_CALL_S)
                self._paused, self._flights.held_back = None, False
                self._flights.admit()

    async def _halt(self, wire: Wire, mode: str) -> None:
        await wire.call("/pause_generation", {"mode": mode}, limit_s=_CALL_S)
        await wire.call("/server_info", limit_s=_CALL_S)  # answered by the scheduler, after the step that was under way

    async def load_weights(self, version: int, tensors: Mapping[str, np.ndarray[Any, Any]]) -> str:
        """Takes over `tensors` as `version` between two tokens; returns the checksum of what the server's model then holds.

        Raises CheckpointError if they are of another model; the old weights then stay in use. Any other failure leaves the
        server with neither, and the engine dies of it.
        """
        self._alive()
        weights.check_fits(self._outline, tensors)
        async with self._changing:
            wire = self._alive()
            self._flights.held_back = True
            try:
                if self._paused is None:
                    await self._halt(wire, self._on_update)
                await self._send(wire, version, tensors)
                held = await wire.held(_LOAD_S)
                if self._paused is None:
                    await wire.call("/continue_generation", {}, limit_s=_CALL_S)
            except TroupeError as error:
                self._die(self._server.lost() if self._server is not None and not self._server.alive else error)
                raise self._death() from error
            self.version, self._flights.salt = version, uuid.uuid4().hex
            self._flights.held_back = self._paused is not None
            self._flights.admit()
            return held

    async def _send(self, wire: Wire, version: int, tensors: Mapping[str, np.ndarray[Any, Any]]) -> None:
        flush = (self._paused or self._on_update) == "retract"  # else it might be refused; the salt does without
        own = weights.parameters_of(self._outline)
        named = [(name, weights.to_torch(array, own[name].dtype)) for name, array in tensors.items()]
        if self._transport == "tensors":
            await wire.send_tensors(version, named, flush, _LOAD_S)
            return
        from safetensors.torch import save_file

        assert self._scratch is not None
        with tempfile.TemporaryDirectory(dir=self._scratch.name) as folder:
            await asyncio.to_thread(save_file, dict(named), f"{folder}/model.safetensors")
            body = {"model_path": folder, "load_format": "safetensors", "weight_version": str(version), "flush_cache": flush}
            await wire.call("/update_weights_from_disk", body, limit_s=_LOAD_S)

    def stats(self) -> dict[str, float]:
        """`load` (requests in flight), `busy` (share of the time since the last call), `tokens` (sampled since start)."""
        load, tokens = float(len(self._flights)), float(self._flights.tokens)
        return {"load": load, "busy": self._flights.busy(), "tokens": tokens}
