"""The gateway: conversations in, the policy's next turn out, with the newest weights that were announced.

Owns nothing that must survive it: who may answer and with which version it asks the *leader*, the director of a run in
training or the keeper of a served checkpoint. Promises:
- an answer is extended by exact token ids, slice by slice, in the same slices whether it is streamed or not: the same
  seed and weights give the same answer;
- what cannot be text yet (half a character, what may become a stop string) is held back, so nothing that was streamed
  has to be taken back;
- answers in flight are bounded; above that, Overloaded. A client that hangs up ends its answer with the slice under way.
"""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import tomllib
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from troupe.actors import journal, rendering
from troupe.actors.context import Context, within
from troupe.actors.director import Director
from troupe.actors.rendering import Rendering, Tool, until
from troupe.actors.router import Router
from troupe.protocol.errors import NotReady, Overloaded, TaskFailed, TroupeError
from troupe.protocol.messages import COLDEST, Generate, GetStatus, Routes, RunStatus, Sampling, Saved
from troupe.serve import checkpoints
from troupe.serve.chat import ChatRequest, WeightsRequest, called, render
from troupe.serve.keeper import Keeper

MAX_ANSWERS = 1024
"""Answers in flight."""

_FIRST_SLICE, _LONGEST_SLICE = 4, 32
"""Tokens sampled with one message: few at first, so that a stream starts at once, then more."""

_ASK_S = 0.25
_GENERATE_S = 120.0
_PATIENCE_S = 30.0
_ALL_EVENTS_SEEN = 2**62


class InTraining(TroupeError):
    """The weights of a run in training are the learner's to change."""


@dataclass(slots=True)
class Held:
    """What answers now: version, checksum, the replicas that proved it, and the phase of the run (or "serving")."""

    version: int
    checksum: str
    generators: list[str]
    phase: str
    checkpoint: str = ""


@dataclass(slots=True)
class Piece:
    """What one slice adds to a choice: new text, the tokens that text is made of, and in the last one why it ended."""

    choice: int
    text: str
    tokens: list[tuple[str, float]] = field(default_factory=list)
    sampled: int = 0
    version: int = -1
    finish: str | None = None
    calls: list[dict[str, Any]] = field(default_factory=list)


class Gateway:
    """Serves the policy of the run in `folder`; `training` says who leads it."""

    def __init__(self, context: Context, folder: str, training: bool) -> None:
        self._context, self._folder, self._training = context, Path(folder), training
        self._leader = "director" if training else "keeper"
        self._router = Router(context, _GENERATE_S, _PATIENCE_S)
        self._renderer: Rendering | None = None
        self._held = Held(-1, "", [], "starting")
        self._reason = f"the {self._leader} has not answered yet"
        self._following: asyncio.Task[None] | None = None
        self._asking = asyncio.Lock()
        self._open = True
        self._answers = 0
        self.since = int(context.clock.now())

    @property
    def model(self) -> str:
        """The name under which the policy is listed: its run's."""
        return self._folder.name

    async def start(self) -> None:
        """Begins to follow the leader."""
        self._following = asyncio.ensure_future(self._follow())

    async def close(self) -> None:
        """Stops following."""
        self._open = False  # Python 3.11's wait_for, inside, can lose a cancellation
        if self._following is not None:
            self._following.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._following

    # -- weights -----------------------------------------------------------------------------------------------------

    async def weights(self) -> Held:
        """What answers now. Raises NotReady before the first version."""
        await self._ask()
        return self._ready()

    async def load(self, request: WeightsRequest) -> Held:
        """Changes to another checkpoint of the run, or of a folder, without a restart; returns once all replicas proved it.

        Raises InTraining, CheckpointMissing or CheckpointError; the old weights then go on answering.
        """
        if self._training:
            raise InTraining(
                "this run is in training: the newest announced version always answers; "
                "to choose one, serve the run on its own with `troupe serve`"
            )
        wanted = request.version if request.version is not None else request.checkpoint
        found = await asyncio.to_thread(checkpoints.find, self._folder, wanted)
        await self._context.ref("keeper", Keeper).load(Saved(found.version, str(found.path)))
        return await self.weights()

    def ready(self) -> Held:
        """What answers, as far as known here. Raises NotReady, saying what is missing."""
        return self._ready()

    # -- answers -----------------------------------------------------------------------------------------------------

    async def answer(self, request: ChatRequest) -> tuple[int, AsyncIterator[Piece]]:
        """Prompt length in tokens and the pieces of all choices as they come, each choice's in order.

        Raises NotReady, Overloaded; the iterator raises TaskFailed for a prompt that the context cannot hold.
        """
        self._ready()
        choices = request.n or 1
        if self._answers + choices > MAX_ANSWERS:
            raise Overloaded(f"{self._answers} answers are in flight, the limit is {MAX_ANSWERS}: try again later")
        renderer = self._renderer or await self._load_renderer()
        prompt = render(renderer, request.messages, request.functions)
        return len(prompt), self._pieces(request, renderer, prompt, choices)

    async def _pieces(self, request: ChatRequest, renderer: Rendering, prompt: list[int], choices: int) -> AsyncIterator[Piece]:
        seed = request.seed if request.seed is not None else secrets.randbits(48)
        pieces: asyncio.Queue[Piece | None] = asyncio.Queue()
        speaking = [
            asyncio.ensure_future(self._speak(request, renderer, prompt, choice, seed + choice, pieces))
            for choice in range(choices)
        ]
        self._answers += choices
        everyone = asyncio.gather(*speaking)
        everyone.add_done_callback(lambda _: pieces.put_nowait(None))
        try:
            while (piece := await pieces.get()) is not None:
                yield piece
            await everyone
        finally:
            self._answers -= choices
            everyone.cancel()
            await asyncio.gather(*speaking, return_exceptions=True)

    async def _speak(
        self,
        request: ChatRequest,
        renderer: Rendering,
        prompt: list[int],
        choice: int,
        seed: int,
        pieces: asyncio.Queue[Piece | None],
    ) -> None:
        """One choice, slice by slice."""
        session = f"chat-{secrets.token_hex(8)}"
        speech = Speech(renderer, request.stops, bool(request.logprobs))
        ids, left, size, version = list(prompt), request.limit, _FIRST_SLICE, self._held.version
        finish: str | None = None
        held = Piece(choice, "")
        warmth = 1.0 if request.temperature is None else request.temperature
        try:
            while finish is None:
                sampling = Sampling(
                    temperature=warmth if warmth >= COLDEST else 0.0,  # what many clients send and mean by it
                    top_p=1.0 if request.top_p is None else request.top_p,
                    max_tokens=size if left is None else min(size, left),
                    stop_ids=renderer.stop_ids,
                )
                ask = Generate(session, session, np.array(ids, np.int32), sampling, seed)
                tokens: list[int] = []
                logprobs: list[float] = []
                try:
                    made = await self._router.generate(ask)
                    tokens, logprobs = made.tokens.tolist(), made.logprobs.tolist()
                    version = int(made.versions[-1]) if tokens else version
                except TaskFailed:
                    if not speech.sampled:
                        raise
                ids += tokens
                left = None if left is None else left - len(tokens)
                if tokens and tokens[-1] in renderer.stop_ids:
                    finish = "stop"
                elif left == 0 or len(tokens) < sampling.max_tokens:  # fewer than asked for: the context is full
                    finish = "length"
                text, said, stopped = speech.hear(tokens, logprobs, last=finish is not None)
                finish = "stop" if stopped else finish
                piece = Piece(choice, held.text + text, held.tokens + said, speech.sampled, version, finish)
                if not request.functions:
                    pieces.put_nowait(piece)
                elif finish is None:
                    held = piece  # a call is none before it is whole
                else:
                    pieces.put_nowait(_with_calls(piece, renderer, prompt, ids[len(prompt) :], request.functions, session))
                size = min(2 * size, _LONGEST_SLICE)
        finally:
            await self._router.end_session(session)

    # -- the leader --------------------------------------------------------------------------------------------------

    async def _follow(self) -> None:
        while self._open:
            await self._ask()
            await asyncio.sleep(_ASK_S)

    async def _ask(self) -> None:
        """Learns the version and who may answer. A leader that is being replaced changes nothing."""
        leader: Director | Keeper = (
            self._context.ref("director", Director) if self._training else self._context.ref("keeper", Keeper)
        )
        async with self._asking:
            try:
                status: RunStatus = await within(5.0, self._leader, leader.status(GetStatus(_ALL_EVENTS_SEEN)))
            except TroupeError as error:  # lost, silent or still starting
                self._reason = str(error)
                return
            if status.version < 0:  # nothing announced yet, or a new director that has not announced again
                self._reason = f"the {self._leader} is in phase '{status.phase}'"
                return
            known = self._held.checksum if status.version == self._held.version else ""
            self._held = Held(
                status.version,
                known or await self._checksum(status),
                sorted(name for name, state in status.actors.items() if state == "proved"),
                status.phase,
                str(status.metrics.get("checkpoint", "")),
            )
            self._router.set_routes(Routes(self._held.generators))

    async def _checksum(self, status: RunStatus) -> str:
        """The announced version's: the keeper says it, the director wrote it into the run's journal."""
        if not self._training:
            return str(status.metrics["checksum"])
        rows = await asyncio.to_thread(journal.read, str(self._folder / "journal.jsonl"))
        announced = [r for r in rows if r.get("event") == "announced" and r.get("version") == status.version]
        return str(announced[-1]["checksum"]) if announced else ""

    def _ready(self) -> Held:
        if self._following is not None and self._following.done():
            self._following.result()  # a gateway that follows nobody must not answer as if it did
        if self._held.version < 0:
            raise NotReady(f"no weight version can answer yet: {self._reason}")
        return self._held

    async def _load_renderer(self) -> Rendering:
        """The tokenizer lies in every checkpoint, and there is one before the first version is announced."""
        newest = await asyncio.to_thread(checkpoints.find, self._folder)
        folder = Path(self._held.checkpoint) / "model" if self._held.checkpoint else newest.model_folder
        self._renderer = await asyncio.to_thread(rendering.load, str(folder), _renderer_of(self._folder))
        return self._renderer


def _renderer_of(run: Path) -> str:
    """The renderer that the run was trained with."""
    file = run / "config.toml"
    settings = tomllib.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    return str(settings.get("model", {}).get("renderer", "auto"))


def _with_calls(
    piece: Piece, rendering: Rendering, prompt: list[int], sampled: list[int], tools: list[Tool], answer: str
) -> Piece:
    """A whole answer, with the calls in it that can be run; without any it stays the text that it is."""
    said = rendering.parse(sampled, prompt, tools)
    piece.calls = called(said.calls, answer)
    if piece.calls:
        piece.text = said.text
        piece.finish = "tool_calls" if piece.finish == "stop" else piece.finish
    return piece


class Speech:
    """Ids of one choice as they come, and the text that is certain by now."""

    def __init__(self, renderer: Rendering, stops: list[str], with_logprobs: bool) -> None:
        self._renderer, self._stops, self._with_logprobs = renderer, stops, with_logprobs
        self._end = set(renderer.stop_ids)
        self._ids: list[int] = []
        self._logprobs: list[float] = []
        self._shown = 0
        self._told = 0
        self.sampled = 0

    def hear(self, tokens: list[int], logprobs: list[float], *, last: bool) -> tuple[str, list[tuple[str, float]], bool]:
        """Returns the new text, with logprobs also the tokens (text, logprob) that begin in it, and whether a stop string
        was reached. Neither the end of the turn nor a stop string is part of the text."""
        self.sampled += len(tokens)
        spoken = [(t, p) for t, p in zip(tokens, logprobs, strict=True) if t not in self._end]
        self._ids += [t for t, _ in spoken]
        self._logprobs += [p for _, p in spoken]
        text = self._renderer.decode(self._ids)
        text, found = until(text, self._stops)
        last = last or found
        certain = len(text) if last else len(text) - self._uncertain(text)
        new = text[self._shown : certain]
        self._shown = max(self._shown, certain)
        said = self._newly_told(certain, last and not found) if self._with_logprobs else []
        return new, said, found

    def _uncertain(self, text: str) -> int:
        """Characters at the end that may yet change or turn out to begin a stop string."""
        half = len(text) - len(text.rstrip("\ufffd"))
        whole = text[: len(text) - half]
        starts = [n for stop in self._stops for n in range(1, len(stop)) if whole.endswith(stop[:n])]
        return half + max(starts, default=0)

    def _newly_told(self, certain: int, everything: bool) -> list[tuple[str, float]]:
        told = []
        while self._told < len(self._ids):
            if not everything and len(self._renderer.decode(self._ids[: self._told])) >= certain:
                break
            told.append((self._renderer.decode([self._ids[self._told]]), self._logprobs[self._told]))
            self._told += 1
        return told
