"""What the SGLang engine promises of servers behind an sglang-router, on a real router and two real servers."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.actors.engines import test_contract, test_contract_control, test_contract_weights
from tests.actors.engines.servers import SGLANG, START_S, Routed, SharedRouted, below
from tests.actors.engines.suite import Kind, Running, assert_true, llama, llama_with_lora, random_ids, request, started
from troupe.actors.engines.sglang import SGLangEngine
from troupe.learner.config import ModelConfig
from troupe.learner.model import tensors_of
from troupe.protocol.checksum import checksum_of
from troupe.protocol.errors import ActorLost, RemoteError

KIND = Kind(SharedRouted)


async def _soon(what: Awaitable[Any], limit_s: float = 120) -> Any:
    async with asyncio.timeout(limit_s):
        return await what


PROMISES: dict[str, Callable[[], Any]] = {
    "weights_change_under_64_requests": lambda: (
        test_contract_weights.test_weights_that_change_under_64_requests_part_their_tokens_exactly(
            KIND, "retract", llama, torch.float32
        )
    ),
    "adapters_change_under_64_requests": lambda: (
        test_contract_weights.test_weights_that_change_under_64_requests_part_their_tokens_exactly(
            KIND, "in_place", llama_with_lora, torch.float32
        )
    ),
    "abort": lambda: test_contract_control.test_abort_returns_what_was_sampled_and_leaves_the_others_alone(KIND),
    "abort_pause": lambda: test_contract_control.test_nothing_is_sampled_in_a_pause_and_what_comes_meanwhile_waits(
        KIND, "abort"
    ),
    "leaving": lambda: test_contract_control.test_leaving_a_stream_early_aborts_its_request(KIND),
    "scores": lambda: test_contract_control.test_scores_are_the_logprobs_of_transformers_at_any_length(KIND, llama),
}


@SGLANG
@pytest.mark.parametrize("promise", PROMISES.values(), ids=PROMISES.keys())
async def test_what_every_engine_promises_holds_behind_a_router(promise: Callable[[], Any]) -> None:
    await promise()


@SGLANG
@pytest.mark.parametrize("sampling", [{"top_k": 3}, {"top_p": 0.6}], ids=str)
def test_logprobs_of_what_was_left_come_through_a_router_that_does_not_know_the_question(sampling: dict[str, Any]) -> None:
    test_contract.test_top_k_and_top_p_draw_only_what_they_leave_with_its_renormalised_logprob(KIND, sampling)


@SGLANG
async def test_both_servers_sample_and_a_session_stays_where_its_cache_is() -> None:
    model, rng = llama(1), np.random.default_rng(0)
    prompts = [random_ids(rng, 40) for _ in range(16)]
    homes: list[list[bool]] = []
    async with started(KIND, model) as engine:
        assert isinstance(engine, SGLangEngine) and engine._wire is not None
        for _ in range(2):
            running = [Running(engine, request(p, name=f"{i}", seed=i, max_tokens=4000)) for i, p in enumerate(prompts)]
            for one in running:
                await one.has(3)
            for flight in engine._flights.all:
                await engine._wire.servers[0].abort(flight.rid)  # behind the engine's back: it ends only if it is there
            for one in running:
                await one.has(one.sampled + 50)
            homes.append([one.over for one in running])
            for i in range(16):
                await engine.abort(f"{i}")
            await asyncio.gather(*(one.end() for one in running), return_exceptions=True)
            prompts = [np.concatenate([prompt, random_ids(rng, 30)]) for prompt in prompts]
    assert homes[0] == homes[1] and len(set(homes[0])) == 2


@SGLANG
async def test_a_server_that_holds_other_weights_denies_the_proof_of_all_and_is_named() -> None:
    model, other = llama_with_lora(1), llama_with_lora(2)
    async with started(KIND, model, llama_with_lora) as engine:
        assert isinstance(engine, SGLangEngine) and engine._wire is not None
        first, second = engine._wire.servers
        assert (await engine._wire.held(60)).startswith(checksum_of(tensors_of(model)))
        await second.call("/weights_checker", {"action": "reset_tensors"})  # behind the engine's back
        with pytest.raises(RemoteError, match=second.url):
            await engine._wire.held(60)
        with pytest.raises(RemoteError, match=f"{first.url}.* holds .*{second.url}.* holds "):
            await engine.load_weights(2, tensors_of(other))
        with pytest.raises(RemoteError, match=second.url):
            await engine.generate(request([1, 2]))


@SGLANG
async def test_a_killed_server_is_named_and_the_next_engine_does_with_the_one_that_is_left(tmp_path: Path) -> None:
    model: Any = llama(0)
    model.config.architectures = [type(model).__name__]
    model.config.save_pretrained(tmp_path)
    folder, new = ModelConfig(path=str(tmp_path)), llama(2)
    limits: dict[str, Any] = {"max_running": 16, "max_cached_tokens": 65_536, "start_s": START_S}
    routed = Routed(folder, python=SGLANG.python, **limits)
    prompts = [random_ids(np.random.default_rng(i), 20) for i in range(16)]
    try:
        await routed.start()
        engine = SGLangEngine(folder, url=routed.url, generator_name="generator-7", **limits)
        await engine.start()
        await engine.load_weights(1, tensors_of(llama(1)))
        running = [Running(engine, request(p, name=f"{i}", seed=i, max_tokens=4000)) for i, p in enumerate(prompts)]
        for one in running:
            await one.has(3)
        victim = routed.owners[1]
        assert victim._server is not None
        os.kill(
            next(pid for pid, command in below(victim._server.pid).items() if "sglang_inside.py" in command), signal.SIGKILL
        )
        for outcome in await _soon(asyncio.gather(*(one.end() for one in running), return_exceptions=True)):
            assert isinstance(outcome, ActorLost) and "generator-7" in str(outcome) and victim.url in str(outcome)
        with pytest.raises(ActorLost, match="generator-7"):
            await engine.generate(request([1, 2]))
        await engine.close()

        engine = SGLangEngine(folder, url=routed.url, generator_name="generator-7", **limits)
        await engine.start()  # as the replica that replaces the one that ended
        try:
            assert engine._wire is not None
            assert [server.url for server in engine._wire.servers] == [routed.owners[0].url]
            assert await engine.load_weights(2, tensors_of(new)) == checksum_of(tensors_of(new))
            made = await asyncio.gather(*(engine.generate(request(p, seed=i, max_tokens=9)) for i, p in enumerate(prompts)))
            for prompt, got in zip(prompts, made, strict=True):
                assert got.versions.tolist() == [2] * 9
                assert_true(KIND, new, prompt, got)
        finally:
            await engine.close()
    finally:
        await routed.end()
