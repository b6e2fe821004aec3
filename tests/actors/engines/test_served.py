"""What a served engine does without a server: what it refuses, and what becomes of requests when a server is odd."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from troupe.actors.engines import flights
from troupe.actors.engines.base import Capabilities, Piece
from troupe.actors.engines.flights import Flights
from troupe.actors.engines.served import ServedEngine
from troupe.actors.engines.sglang import SGLangEngine
from troupe.actors.engines.vllm import VLLMEngine
from troupe.actors.settings import GeneratorSettings
from troupe.learner.config import ModelConfig
from troupe.learner.model import check_sendable, tensors_of
from troupe.learner.tiny import make_tiny
from troupe.protocol.errors import ConfigError, RemoteError
from troupe.protocol.messages import Generate, Sampling


@pytest.mark.parametrize(("engine", "key"), [(SGLangEngine, "sglang_python"), (VLLMEngine, "vllm_python")])
async def test_an_interpreter_that_is_not_there_is_told_by_its_key(tmp_path: Path, engine: Any, key: str) -> None:
    model = ModelConfig(path=str(make_tiny(tmp_path / "model", ["a word"])))
    with pytest.raises(ConfigError, match=rf"generator\.{key}: no program '/nope/python' on .*virtual environment"):
        await engine(model, python="/nope/python").start()


@pytest.mark.parametrize("url", ["foo", "127.0.0.1:30000", "ftp://host:1", "http://", "http://host:99999", "http://host:x"])
def test_what_is_no_address_of_a_server_is_told_at_once(url: str) -> None:
    with pytest.raises(ValueError, match=r"is no address of a server: write it as http://"):
        GeneratorSettings(engine="sglang", sglang_url=url)


@pytest.mark.parametrize("url", ["", "http://127.0.0.1:30000", "https://some.host/sglang", "http://[::1]:30000"])
def test_addresses_are_taken(url: str) -> None:
    assert GeneratorSettings(engine="sglang", sglang_url=url).sglang_url == url


def test_a_model_with_numbers_that_would_not_be_sent_is_refused() -> None:
    model: Any = torch.nn.Sequential(torch.nn.BatchNorm1d(2, affine=False, track_running_stats=True))
    model.config = ModelConfig(path="x").model_copy(update={"model_type": "normed"})
    with pytest.raises(ConfigError, match=r"'0\.\w+' of a normed model is no parameter.* set generator\.engine = 'local'"):
        check_sendable(model)


class Deaf:
    """A server that forgets an abort of what it does not know yet, as SGLang does."""

    def __init__(self) -> None:
        self.left = False

    def addressed(self, body: dict[str, Any], rid: str, salt: str, said: list[int]) -> dict[str, Any]:
        return body

    async def generate(self, body: dict[str, Any]) -> AsyncIterator[tuple[Piece, dict[str, Any] | None]]:
        try:
            while True:
                await asyncio.sleep(0.01)
                yield Piece(np.array([1], np.int32), np.zeros(1, np.float32), np.zeros(1, np.int32)), None
        finally:
            self.left = True

    async def abort(self, rid: str) -> None:
        return


def ask() -> Generate:
    return Generate("r", "s", np.array([1], np.int32), Sampling(max_tokens=5))


async def test_an_abort_that_the_server_has_not_heard_ends_the_request_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flights, "_UNHEARD_S", 0.1)
    requests, wire = Flights("it", 4, None, lambda error: error), Deaf()
    requests.wire = wire  # type: ignore[assignment]
    flight = requests.add(ask(), {})
    await requests.abort([flight], wait=True)
    async with asyncio.timeout(30):
        while (piece := await flight.pieces.get()).finish is None:  # type: ignore[union-attr]
            pass
        assert piece.finish == "abort" and not len(requests)
        while not wire.left:
            await asyncio.sleep(0.01)


class Full(ServedEngine[Any]):
    """An engine on whose disk there is no room for weights."""

    KIND = SETTING = "full"
    MARGIN = 0
    capabilities = Capabilities("full", frozenset(), True, False, False)

    async def _change(self, wire: Any, version: int, named: Any) -> str:
        raise OSError(28, "No space left on device")

    def _unused(self, *args: Any) -> Any:
        raise AssertionError

    _connect = _launch = _greet = _body = _score = _halt = _go_on = _unused


@pytest.mark.parametrize("how", ["an error", "a cancelled call"])
async def test_whatever_ends_a_load_in_the_middle_ends_the_engine_and_nothing_hangs(how: str) -> None:
    engine, model = Full(ModelConfig(path="x")), torch.nn.Linear(2, 2)
    engine._outline, engine._wire = model, Deaf()
    if how == "an error":
        with pytest.raises(RemoteError, match=r"left in the middle of new weights: OSError: .*No space left"):
            await engine.load_weights(1, tensors_of(model))
    else:
        engine._change = lambda *args: asyncio.sleep(600)  # type: ignore[assignment]
        load = asyncio.ensure_future(engine.load_weights(1, tensors_of(model)))
        await asyncio.sleep(0.05)
        load.cancel()
        with pytest.raises(asyncio.CancelledError):
            await load
    for later in engine.check(), engine.generate(ask()), engine.load_weights(2, tensors_of(model)):
        with pytest.raises(RemoteError, match="in the middle of new weights"):
            async with asyncio.timeout(30):
                await later
