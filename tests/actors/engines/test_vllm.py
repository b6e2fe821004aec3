"""What the vLLM engine promises beyond the contract of all engines, on real servers; and what it refuses without one."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import AsyncIterator, Awaitable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.actors.engines.servers import START_S, VLLM, below
from tests.actors.engines.suite import ENGINES, assert_true, llama, logits_of, random_ids, request, sampled, started
from troupe.actors.engines import served
from troupe.actors.engines.vllm import VLLMEngine
from troupe.actors.engines.vllm_wire import Wire, request_body
from troupe.learner.config import ModelConfig
from troupe.learner.model import tensors_of
from troupe.protocol.checksum import checksum_of
from troupe.protocol.errors import ActorLost, ConfigError, RemoteError
from troupe.protocol.messages import Generated

KIND = ENGINES["vllm"]


async def _soon(what: Awaitable[Any]) -> Any:
    async with asyncio.timeout(120):
        return await what


def _scored(model: Any, ids: Any, temperature: float = 1.0) -> Any:
    """Logprobs [n - 1] that plain transformers gives to ids [n] after the first."""
    logprobs = (logits_of(model, ids[:1], ids[1:]) / temperature).log_softmax(-1)
    return logprobs.gather(-1, torch.tensor(ids[1:], dtype=torch.int64)[:, None])[:, 0].numpy()


@VLLM
async def test_weights_change_amid_64_requests_and_every_token_is_of_the_version_it_names() -> None:
    old, new = llama(1), llama(2)
    rng = np.random.default_rng(0)
    prompts = [random_ids(rng, int(n)) for n in rng.integers(3, 80, 64)]
    async with started(KIND) as engine:
        assert await engine.load_weights(1, tensors_of(old)) == checksum_of(tensors_of(old))
        calls = [
            asyncio.ensure_future(engine.generate(request(p, name=str(i), seed=i, max_tokens=2000 + i)))
            for i, p in enumerate(prompts)
        ]
        await sampled(engine, 64 * 10)
        scores = asyncio.ensure_future(engine.score(prompts))
        assert await engine.load_weights(2, tensors_of(new)) == checksum_of(tensors_of(new))
        results = await asyncio.gather(*calls)
        for ids, told in zip(prompts, await scores, strict=True):  # each under one of the two, whole
            gaps = [np.abs(told - _scored(model, ids)).max() for model in (old, new)]
            assert min(gaps) < 1e-4
    both = 0
    for i, (prompt, got) in enumerate(zip(prompts, results, strict=True)):
        changed = int((got.versions == 1).sum())
        assert got.versions.tolist() == [1] * changed + [2] * (2000 + i - changed)
        both += 0 < changed < 2000 + i
        assert_true(KIND, old, prompt, Generated(got.tokens[:changed], got.logprobs[:changed], got.versions[:changed], "abort"))
        after = _scored(new, np.concatenate([prompt, got.tokens]))[len(prompt) - 1 + changed :]
        np.testing.assert_allclose(got.logprobs[changed:], after, atol=1e-4)
    assert both > 32, "the change was to come amid the requests"


@VLLM
async def test_the_checksum_is_of_the_memory_of_the_server() -> None:
    model = llama(1)
    async with started(KIND, model) as engine:
        assert isinstance(engine, VLLMEngine) and engine._wire is not None
        assert await engine._wire.ask("troupe_held", limit_s=60) == checksum_of(tensors_of(model))
        await engine._wire.call("/weight_checker", {"action": "reset"})  # behind the engine's back
        assert await engine._wire.ask("troupe_held", limit_s=60) != checksum_of(tensors_of(model))
        assert await engine.load_weights(1, tensors_of(model)) == checksum_of(tensors_of(model))


@VLLM
async def test_a_stop_string_cuts_the_turn_also_when_weights_change_within_it() -> None:
    old, new = llama(1), llama(2)
    prompt = random_ids(np.random.default_rng(5), 10)

    def decode(ids: list[int]) -> str:
        return "".join(chr(ord("A") + i) for i in ids)

    async with started(KIND, old, decode=decode) as engine:
        free = await engine.generate(request(prompt, seed=3, max_tokens=30))
        stop = decode(free.tokens.tolist())[10:13]
        got = await engine.generate(request(prompt, seed=3, max_tokens=30, stop=[stop]))
        assert (got.finish, got.tokens.tolist()) == ("stop", free.tokens[:13].tolist())
        said: list[int] = []
        async for piece in engine.stream(request(prompt, name="s", seed=3, max_tokens=4000, stop=["never said"])):
            said += piece.tokens.tolist()
            if len(said) > 20 and engine.version == 1:
                await engine.load_weights(2, tensors_of(new))
            if len(said) > 60:
                break
        assert engine.version == 2


@asynccontextmanager
async def _own(tmp_path: Path, busy: int) -> AsyncIterator[tuple[VLLMEngine, list[Any], dict[int, str]]]:
    """An engine with a server of its own, `busy` requests that it samples, and the server's processes, which end with it."""
    model: Any = llama(0)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path / "model")
    engine = VLLMEngine(
        ModelConfig(path=str(tmp_path / "model")),
        python=VLLM.python,
        start_s=START_S,
        log=tmp_path / "server.log",
        generator_name="generator-7",
    )
    await engine.start()
    try:
        assert engine._server is not None
        await engine.load_weights(1, tensors_of(llama(1)))
        calls = [asyncio.ensure_future(engine.generate(request([1, 2], max_tokens=4000))) for _ in range(busy)]
        await sampled(engine, 50)
        family = below(engine._server.pid)
        yield engine, calls, family
        await _soon(engine.close())
        async with asyncio.timeout(30):
            while [pid for pid in family if Path(f"/proc/{pid}").exists()]:
                await asyncio.sleep(0.05)
    finally:
        await engine.close()


def _signal(family: dict[int, str], parts: list[str], number: int) -> None:
    hit = [pid for pid, command in family.items() if any(part in command for part in parts)]
    assert hit, family
    os.kill(hit[-1], number)


_CORE = ["EngineCore", "spawn_main"]


@VLLM
@pytest.mark.parametrize("victim", [["vllm.entrypoints"], _CORE, []], ids=["api", "core", "keeper"])
async def test_a_killed_server_fails_what_is_in_flight_with_a_typed_error_and_nothing_hangs(
    tmp_path: Path, victim: list[str]
) -> None:
    async with _own(tmp_path, busy=20) as (engine, calls, family):
        assert engine._server is not None
        _signal(family, victim, signal.SIGKILL) if victim else os.kill(engine._server.pid, signal.SIGKILL)
        for outcome in await _soon(asyncio.gather(*calls, return_exceptions=True)):
            assert isinstance(outcome, ActorLost | RemoteError) and "generator-7" in str(outcome)
        for later in (engine.generate(request([1, 2])), engine.load_weights(2, tensors_of(llama(2))), engine.check()):
            with pytest.raises((ActorLost, RemoteError), match="generator-7"):
                await _soon(later)


@VLLM
async def test_weights_that_diverged_are_an_error_not_a_token(tmp_path: Path) -> None:
    model: Any = llama(2)
    with torch.no_grad():
        model.get_input_embeddings().weight.fill_(float("nan"))
    async with _own(tmp_path, busy=2) as (engine, calls, _):
        await engine.load_weights(2, tensors_of(model))
        for outcome in await _soon(asyncio.gather(*calls, engine.generate(request([1, 2])), return_exceptions=True)):
            assert isinstance(outcome, RemoteError) and "diverged" in str(outcome)


@VLLM
async def test_a_server_that_says_it_is_well_and_samples_nothing_is_lost(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(served, "SILENT_S", 20.0)
    monkeypatch.setattr(served, "_LOOK_S", 1.0)
    async with _own(tmp_path, busy=2) as (engine, calls, family):
        _signal(family, _CORE, signal.SIGSTOP)
        await engine.check()
        for outcome in await _soon(asyncio.gather(*calls, return_exceptions=True)):
            assert isinstance(outcome, ActorLost) and "generator-7 has sampled nothing for 20 s" in str(outcome)
        with pytest.raises(ActorLost, match="generator-7 has sampled nothing"):
            await _soon(engine.generate(request([1, 2])))


# -- without a server --------------------------------------------------------------------------------------------------


async def test_what_vllm_would_not_obey_is_refused() -> None:
    with pytest.raises(ConfigError, match="'in_place': it knows abort, retract"):
        await VLLMEngine(ModelConfig(path="x")).pause("in_place")


def test_the_rest_of_a_request_goes_on_from_what_was_said_with_other_numbers() -> None:
    body = request_body(request([1, 2], seed=2**70, max_tokens=9), 9, 61, 1)
    wire = Wire("s", "http://x")
    whole, rest = wire.addressed(body, "a", "salt", []), wire.addressed(body, "b", "salt", [7, 8])
    assert (rest["prompt"], rest["max_tokens"]) == ([1, 2, 7, 8], 7)
    assert rest["seed"] != whole["seed"] and 0 <= rest["seed"] < 2**63
    assert whole == wire.addressed(body, "a", "salt", [])


def test_an_answer_that_contradicts_itself_is_an_error() -> None:
    wire = Wire("s", "http://x")
    told = {"token_ids": [7], "logprobs": {"tokens": ["token_id:7"], "token_logprobs": [-0.5]}}
    assert wire._piece(told, 3).versions.tolist() == [3]
    with pytest.raises(RemoteError, match="other tokens"):
        wire._piece(told | {"token_ids": [8]}, 3)
    with pytest.raises(RemoteError, match="diverged"):
        wire._piece({"token_ids": [7], "logprobs": {"tokens": ["token_id:7"], "token_logprobs": [None]}}, 3)
