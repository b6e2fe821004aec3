"""What every generation engine promises of the tokens it samples, checked against plain transformers.

`suite.py` has the engines; see also `test_contract_control.py` and `test_contract_weights.py`.
"""

import asyncio
from typing import Any

import numpy as np
import pytest
import torch

from tests.actors.engines.suite import (
    CONTEXT,
    MODELS,
    VOCABULARY,
    Kind,
    assert_true,
    llama,
    logits_of,
    logprobs_of,
    must,
    random_ids,
    request,
    started,
)
from troupe.actors.engines.base import Engine
from troupe.protocol.messages import Generated


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS.keys())
def test_logprobs_are_those_of_transformers_for_ragged_requests_that_join_at_any_token(kind: Kind, build: Any) -> None:
    model = build(1)
    rng = np.random.default_rng(0)
    prompts = [random_ids(rng, n) for n in rng.integers(1, 300, 24)]

    async def go() -> list[Generated]:
        async with started(kind, model, build, max_running=16) as engine:

            async def one(i: int) -> Generated:
                await asyncio.sleep(0.001 * i)
                return await engine.generate(request(prompts[i], name=str(i), seed=i, max_tokens=5 + i, temperature=0.7))

            return await asyncio.gather(*(one(i) for i in range(len(prompts))))

    for i, (prompt, got) in enumerate(zip(prompts, asyncio.run(go()), strict=True)):
        assert (got.finish, len(got.tokens)) == ("length", 5 + i)
        assert_true(kind, model, prompt, got, temperature=0.7)


@pytest.mark.parametrize("max_cached_tokens", [131_072, 2048], ids=["roomy", "sessions_evict_each_other"])
def test_logprobs_stay_true_over_the_turns_of_many_sessions(kind: Kind, max_cached_tokens: int) -> None:
    model = llama(1)

    async def episode(engine: Engine, i: int) -> list[tuple[Any, Generated]]:
        rng = np.random.default_rng(i)
        prompt = random_ids(rng, int(rng.integers(5, 60)))
        turns = []
        for turn in range(5):
            got = await engine.generate(
                request(prompt, name=f"{i}/{turn}", session=str(i), seed=turn, max_tokens=int(rng.integers(1, 12)))
            )
            turns.append((prompt, got))
            keep = len(got.tokens) if turn != 2 else len(got.tokens) // 2  # once the harness rewrites what was said
            prompt = np.concatenate([prompt, got.tokens[:keep], random_ids(rng, int(rng.integers(1, 30)))])
            await asyncio.sleep(0.002 * int(rng.integers(0, 4)))
        await engine.end_session(str(i))
        return turns

    async def go() -> list[list[tuple[Any, Generated]]]:
        async with started(kind, model, max_running=8, max_cached_tokens=max_cached_tokens) as engine:
            return await asyncio.gather(*(episode(engine, i) for i in range(20)))

    for turns in asyncio.run(go()):
        for prompt, got in turns:
            assert_true(kind, model, prompt, got)


def test_one_sequence_much_longer_than_the_rest_changes_nothing(kind: Kind) -> None:
    model = llama(1)
    rng = np.random.default_rng(1)
    prompts = [random_ids(rng, n) for n in [450, *[6] * 12]]

    async def go() -> list[Generated]:
        async with started(kind, model) as engine:
            return await asyncio.gather(*(engine.generate(request(p, max_tokens=9)) for p in prompts))

    for prompt, got in zip(prompts, asyncio.run(go()), strict=True):
        assert_true(kind, model, prompt, got)


def test_the_same_seed_draws_the_same_tokens_alone_or_in_company(kind: Kind) -> None:
    model = llama(1)
    prompt = random_ids(np.random.default_rng(2), 20)

    async def go() -> tuple[Generated, list[Generated]]:
        async with started(kind, model, steady=True) as engine:
            must(engine, engine.capabilities.repeatable, "draw the same in any company")
            alone = await engine.generate(request(prompt, seed=7, max_tokens=24))
            return alone, await asyncio.gather(
                *(engine.generate(request(prompt, seed=seed, max_tokens=24)) for seed in (7, 8, 9, 7))
            )

    alone, company = asyncio.run(go())
    drawn = [got.tokens.tolist() for got in company]
    assert drawn[0] == drawn[3] == alone.tokens.tolist()
    assert drawn[1] != drawn[0] and drawn[2] != drawn[0] and drawn[1] != drawn[2]


def test_drawn_tokens_have_the_frequencies_of_the_distribution(kind: Kind) -> None:
    model = llama(1)
    prompt = random_ids(np.random.default_rng(3), 5)

    async def go() -> list[Generated]:
        async with started(kind, model, max_running=256) as engine:
            return await asyncio.gather(*(engine.generate(request(prompt, seed=s, max_tokens=1)) for s in range(1000)))

    counts = np.bincount([got.tokens[0] for got in asyncio.run(go())], minlength=VOCABULARY)
    p = logits_of(model, prompt, [0]).softmax(-1)[0].numpy()
    assert np.abs(counts / 1000 - p).sum() < 0.25  # total variation; a uniform or greedy draw is far beyond


def test_temperature_zero_is_the_greedy_decoding_of_transformers(kind: Kind) -> None:
    model: Any = llama(1)
    model.generation_config.eos_token_id = None  # it would stop there; our requests name their own stops
    prompts = [random_ids(np.random.default_rng(4), n) for n in (3, 40, 11)]

    async def go() -> list[Generated]:
        async with started(kind, model) as engine:
            return await asyncio.gather(*(engine.generate(request(p, temperature=0, max_tokens=20)) for p in prompts))

    for prompt, got in zip(prompts, asyncio.run(go()), strict=True):
        ids = torch.tensor(prompt[None], dtype=torch.int64)
        reference = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20, pad_token_id=0)
        assert got.tokens.tolist() == reference[0, len(prompt) :].tolist()
        assert_true(kind, model, prompt, got)


def test_a_stop_id_ends_the_turn_and_is_kept(kind: Kind) -> None:
    model = llama(1)
    prompt = random_ids(np.random.default_rng(5), 10)

    async def go() -> tuple[Generated, Generated]:
        async with started(kind, model) as engine:
            free = await engine.generate(request(prompt, max_tokens=30))
            stop = int(free.tokens[12])
            return free, await engine.generate(request(prompt, max_tokens=30, stop_ids=[stop, VOCABULARY + 5]))

    free, stopped = asyncio.run(go())
    first = free.tokens.tolist().index(free.tokens[12])
    assert stopped.tokens.tolist() == free.tokens[: first + 1].tolist()
    assert stopped.finish == "stop"
    assert_true(kind, model, prompt, stopped)


def test_a_full_context_ends_the_turn_with_length(kind: Kind) -> None:
    async def go() -> Generated:
        async with started(kind, llama(1)) as engine:
            return await engine.generate(request(random_ids(np.random.default_rng(6), CONTEXT - 4), max_tokens=100))

    got = asyncio.run(go())
    assert (got.finish, len(got.tokens)) == ("length", 4)


@pytest.mark.parametrize("sampling", [{"top_k": 3}, {"top_p": 0.6}, {"top_k": 8, "top_p": 0.7, "temperature": 1.5}], ids=str)
def test_top_k_and_top_p_draw_only_what_they_leave_with_its_renormalised_logprob(kind: Kind, sampling: dict[str, Any]) -> None:
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    model = llama(1)
    prompts = [random_ids(np.random.default_rng(n), 5 + n) for n in range(12)]

    async def go() -> list[Generated]:
        async with started(kind, model) as engine:
            return await asyncio.gather(
                *(engine.generate(request(p, seed=i, max_tokens=20, **sampling)) for i, p in enumerate(prompts)),
                engine.generate(request([1], max_tokens=20)),  # a neighbour without limits
            )

    results = asyncio.run(go())
    assert_true(kind, model, [1], results.pop())
    for prompt, got in zip(prompts, results, strict=True):
        scores = logits_of(model, prompt, got.tokens) / sampling.get("temperature", 1.0)
        if "top_k" in sampling:
            scores = TopKLogitsWarper(sampling["top_k"])(None, scores)
        if "top_p" in sampling:
            scores = TopPLogitsWarper(sampling["top_p"])(None, scores)
        expected = logprobs_of(scores, got.tokens)
        assert np.isfinite(expected).all(), "a token outside of the support was drawn"
        np.testing.assert_allclose(got.logprobs, expected, atol=kind.atol)


@pytest.mark.parametrize("common", [90, 700])
async def test_requests_that_begin_alike_and_come_at_once_are_as_true_as_any(kind: Kind, common: int) -> None:
    model = llama(1)
    rng = np.random.default_rng(12)
    shared = random_ids(rng, common)
    prompts = [shared] * 4 + [np.concatenate([shared[: common - 10 * i], random_ids(rng, 20 * i)]) for i in range(1, 5)]
    async with started(kind, model, max_running=6) as engine:
        for session in "", "s":  # then once more, beside what the first left
            made = await asyncio.gather(
                *(
                    engine.generate(request(p, name=f"{session}{i}", session=session and f"{i}", seed=i, max_tokens=3 + 4 * i))
                    for i, p in enumerate(prompts)
                )
            )
            for prompt, got in zip(prompts, made, strict=True):
                assert_true(kind, model, prompt, got)
