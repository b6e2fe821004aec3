"""An engine that is a server process of its own, spoken to over HTTP: what such engines have in common.

Promises, beyond those of `base.py`:
- its own server dies with it, and with its process, even on kill -9 (`server.py`);
- a server that is gone, does not answer, or answers but samples nothing of what it was sent, fails what is in flight and all
  later calls with one typed error; nothing hangs;
- a failure in the middle of a change of weights is the end of the engine: nobody samples from mixed ones;
- with LoRA the base is sent once and proved, and then adapters alone, which the server merges into it (`landing.py`).
"""

from __future__ import annotations

import asyncio
import os
import shutil
import sys
import tempfile
import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Generic, TypeVar

import numpy as np
import torch

from troupe.actors.engines import admission, landing, sampling
from troupe.actors.engines.base import Capabilities, Pause, Piece
from troupe.actors.engines.flights import Flights
from troupe.actors.engines.server import Server, free_port
from troupe.actors.engines.wire import ServerWire
from troupe.actors.line import Offer
from troupe.learner import model as weights
from troupe.learner.config import ModelConfig
from troupe.learner.reach import reach
from troupe.protocol.checksum import checksum_of
from troupe.protocol.errors import ActorLost, ConfigError, NotReady, Overloaded, RemoteError, TimedOut, TroupeError
from troupe.protocol.messages import Generate, Generated

CALL_S, LOAD_S = 150.0, 600.0
"""Longer than one step may take on a busy CPU: the server answers between two of them."""
_LOOK_S = 15.0
"""A server with requests in flight is looked after this often."""
SILENT_S = 300.0
"""So long may it have requests and say not one token, unless it was told to wait: longer than prompts and a few steps take."""


W = TypeVar("W", bound=ServerWire)


class ServedEngine(ABC, Generic[W]):
    """See `base.Engine`. To be used from one asyncio event loop.

    model: the folder that is served, and the dtype. Its weights come by `load_weights`; with LoRA the base is read from it, and
    drawn from `seed` if it has none.
    python: the interpreter in which the server is installed; empty: this one. url: a server that somebody else owns and ends.
    max_running: requests at the server at a time; max_waiting: those that may wait here, then Overloaded.
    max_cached_tokens: keys and values that the server holds, in tokens. threads: of its CPU work. args: more flags for it.
    start_s: limit of the start. log: what the server writes; None: a temporary file.
    decode: ids to text, for requests with stop strings: their turn is cut here, at the token in which the string is complete.
    """

    KIND: str
    """How the server is called."""
    SETTING: str
    """How `generator.engine` calls it."""
    MARGIN: int
    """Positions of its context that the server keeps for itself."""

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
        start_s: float = 300.0,
        args: Sequence[str] = (),
        log: Path | None = None,
        generator_name: str = "",
        decode: Callable[[list[int]], str] | None = None,
        seed: int = 0,
    ) -> None:
        self.version, self.base = -1, ""
        self._model, self._url, self._python = model, url.rstrip("/"), python or sys.executable
        self._max_running, self._max_requests = max_running, max_running + max_waiting
        self._max_cached, self._device, self._threads = max_cached_tokens, device, threads
        self._start_s, self._args, self._log, self._decode = start_s, list(args), log, decode
        self._name = f"{self.KIND} of {generator_name}" if generator_name else f"the {self.KIND} server"
        self._generator_name, self._seed = generator_name, seed

        self._flights = Flights(self._name, max_running, decode, self._told)
        self._server: Server | None = None
        self._wire: W | None = None
        self._watch: asyncio.Task[None] | None = None
        self._scratch: tempfile.TemporaryDirectory[str] | None = None
        self._dead: TroupeError | None = None
        self._changing = asyncio.Lock()
        self._paused: Pause | None = None

    # -- what each kind of server does its own way -----------------------------------------------------------------------

    @property
    @abstractmethod
    def capabilities(self) -> Capabilities:
        """Known before `start`."""

    @abstractmethod
    def _connect(self, url: str) -> W:
        """The wire to the server at `url`."""

    @abstractmethod
    def _launch(self, port: int, scratch: Path) -> tuple[list[str], dict[str, str]]:
        """The command that starts the server, and variables of its environment beside those that are set."""

    @abstractmethod
    async def _greet(self, wire: W) -> None:
        """Takes over a server of somebody else's: goes on if it was left in a pause; its context may be the shorter one."""

    @abstractmethod
    def _body(self, request: Generate, room: int, interval: int) -> dict[str, Any]:
        """What is asked for, `room` tokens at most. Raises ConfigError for what the server means otherwise."""

    @abstractmethod
    async def _score(self, wire: W, ids: np.ndarray[Any, Any], temperature: float) -> np.ndarray[Any, Any]:
        """Logprobs [n - 1] of the ids after the first."""

    @abstractmethod
    async def _halt(self, wire: W, mode: Pause) -> None:
        """Returns when no token is being computed. mode: what becomes of those in flight."""

    @abstractmethod
    async def _go_on(self, wire: W) -> None:
        """After `_halt`."""

    @abstractmethod
    async def _change(self, wire: W, version: int, named: list[tuple[str, torch.Tensor]]) -> str:
        """Between `_halt` and `_go_on`, if no pause was asked for: new weights; the checksum of what the model then holds."""

    async def _pull(self, wire: W, offer: Offer) -> str:
        """As `_change`, of weights that the learner sends into the server itself. NotReady: it did not, and nothing changed."""
        raise ConfigError(f"{self._name} cannot fetch weights itself")

    async def _look(self, wire: W) -> None:
        """Raises if the server does not answer."""
        await wire.call("/health", limit_s=CALL_S)

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
        weights.check_sendable(self._outline)
        if self._model.lora is not None:
            weights.check_mergeable(self._outline)
        self._vocabulary = int(self._outline.get_input_embeddings().num_embeddings)
        longest = reach(self._outline.config)
        self._context = min(longest or self._max_cached, self._max_cached - self.MARGIN)
        self._scratch = tempfile.TemporaryDirectory(prefix=f"troupe-{self.SETTING}-")
        if self._url:
            self._wire = self._connect(self._url)
            deadline = time.monotonic() + self._start_s
            while not await self._wire.up():
                if time.monotonic() > deadline:
                    where = f"generator.{self.SETTING}_url {self._url}"
                    raise TimedOut(
                        f"{self._name}: nobody has answered at {where} for {self._start_s:g} s: is the server started, and "
                        "can this machine reach it?"
                    )
                await asyncio.sleep(0.2)
            await self._greet(self._wire)
        else:
            if shutil.which(self._python) is None:
                raise ConfigError(
                    f"generator.{self.SETTING}_python: no program '{self._python}' on {os.uname().nodename}; name the Python "
                    f"of the virtual environment in which {self.KIND} is installed"
                )
            port, scratch = free_port(), Path(self._scratch.name)
            self._wire = self._connect(f"http://127.0.0.1:{port}")
            command, environment = self._launch(port, scratch)
            log = self._log or scratch / "server.log"
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
                elif self._flights.running and not self._changing.locked():  # a change has limits of its own
                    try:
                        await self.check()
                        self._listen()
                    except TroupeError as error:
                        self._die(error)
        finally:
            if gone is not None:
                gone.cancel()

    def _listen(self) -> None:
        """Raises ActorLost if the server has been silent for too long: some answer that they are well while nothing moves."""
        if self._flights.held_back:
            self._flights.heard()
        elif self._flights.silent_s > SILENT_S:
            raise ActorLost(
                f"{self._name} has sampled nothing for {SILENT_S:g} s, with {len(self._flights)} requests in flight"
            )

    def _die(self, error: TroupeError) -> None:
        if self._dead is None:
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
            await self._look(wire)
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

    def _alive(self) -> W:
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
        flight = self._flights.add(request, self._asked(request, interval))
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

    def _asked(self, request: Generate, interval: int) -> dict[str, Any]:
        settings = request.sampling
        sampling.check(settings)
        if settings.stop and self._decode is None:
            raise ConfigError(f"{self._name} was made without a tokenizer: it can stop at ids, not at strings")
        limit = admission.length_limit(request, self._context, self._vocabulary)
        return self._body(request, limit - len(request.prompt), interval)

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
            async with places:
                return await self._score(wire, ids, temperature)

        return list(await asyncio.gather(*(one(np.asarray(ids)) for ids in sequences)))

    # -- weights -------------------------------------------------------------------------------------------------------

    async def pause(self, mode: Pause) -> None:
        """Samples nothing from now on. Returns when no token is being computed. Requests still come in, and wait here."""
        if mode not in self.capabilities.pauses:
            raise ConfigError(f"{self._name} cannot pause by '{mode}': it knows {', '.join(sorted(self.capabilities.pauses))}")
        async with self._changing:
            wire = self._alive()
            going, self._paused, self._flights.held_back = self._paused is None, mode, True
            if mode == "abort":
                flights = self._flights.all
                await self._flights.abort(flights, wait=going)
                deadline = time.monotonic() + CALL_S
                while not all(flight.over for flight in flights):
                    if time.monotonic() > deadline:
                        raise TimedOut(f"{self._name} has not ended its requests within {CALL_S:g} s")
                    await asyncio.sleep(0.01)
            await self._halt(wire, mode)

    async def resume(self) -> None:
        """Goes on after `pause`; without one it does nothing."""
        async with self._changing:
            wire = self._alive()
            if self._paused is not None:
                await self._go_on(wire)
                self._paused, self._flights.held_back = None, False
                self._flights.admit()

    async def load_weights(self, version: int, tensors: Mapping[str, weights.Array] | Offer) -> str:
        """Takes over `tensors` as `version` between two tokens; returns the checksum of what the server's model then holds.

        Raises CheckpointError if they are of another model, and NotReady if the learner of an offer is gone; the old weights
        then stay in use. Any other failure leaves the server with neither, and the engine dies of it.
        """
        self._alive()
        weights.check_fits(self._outline, tensors.outline() if isinstance(tensors, Offer) else tensors)
        async with self._changing:
            wire = self._alive()
            self._flights.held_back = True
            try:
                held = (
                    await self._pull(wire, tensors) if isinstance(tensors, Offer) else await self._send(wire, version, tensors)
                )
            except NotReady:
                self._flights.held_back = self._paused is not None
                self._flights.admit()
                raise
            except TroupeError as error:
                self._die(self._server.lost() if self._server is not None and not self._server.alive else error)
                raise self._death() from error
            except BaseException as error:
                what = f"{type(error).__name__}: {error}".rstrip(": ")
                self._die(RemoteError(f"{self._name} was left in the middle of new weights: {what}"))
                if isinstance(error, Exception):
                    raise self._death() from error
                raise
            self.version, self._flights.salt = version, uuid.uuid4().hex
            self._flights.held_back = self._paused is not None
            self._flights.admit()
            return held

    async def _send(self, wire: W, version: int, tensors: Mapping[str, weights.Array]) -> str:
        own = weights.parameters_of(self._outline)
        named = [(name, weights.to_torch(array, own[name].dtype).cpu()) for name, array in tensors.items()]
        if self._model.lora is not None:
            await self._send_base(wire, version)
            scale = self._model.lora.alpha / self._model.lora.rank
            named.append((landing.SCALE, torch.tensor([scale], dtype=torch.float64)))
        held, _, base = (await self._change(wire, version, named)).partition(landing.OVER)
        if base != self.base:
            raise RemoteError(f"{self._name} holds an adapter over the base {base or 'none'}; it is {self.base}")
        return held

    async def _send_base(self, wire: W, version: int) -> None:
        """What adapters are merged into. Once; nothing is sampled from it."""
        if not self.base:
            plain = self._model.model_copy(update={"lora": None})
            base = await asyncio.to_thread(weights.load, plain, seed=self._seed)
            await self._change(wire, version, [(name, tensor.detach()) for name, tensor in weights.parameters_of(base).items()])
            self.base = await asyncio.to_thread(checksum_of, weights.tensors_of(base))

    def stats(self) -> dict[str, float]:
        """`load` (requests in flight), `busy` (share of the time since the last call), `tokens` (sampled since start)."""
        load, tokens = float(len(self._flights)), float(self._flights.tokens)
        return {"load": load, "busy": self._flights.busy(), "tokens": tokens}
