"""What every generation engine promises to whoever controls it: stream, abort, pause, score, and what it refuses."""

import asyncio
from dataclasses import replace
from typing import Any, get_args

import numpy as np
import pytest
import torch

from tests.actors.engines.suite import (
    CONTEXT,
    MODELS,
    VOCABULARY,
    Kind,
    Running,
    assert_true,
    joined,
    llama,
    logits_of,
    logprobs_of,
    must,
    random_ids,
    request,
    started,
)
from troupe.actors.engines.base import Pause
from troupe.learner.model import tensors_of
from troupe.protocol.errors import ActorLost, ConfigError, NotReady, Overloaded, TaskFailed
from troupe.protocol.messages import Generate


async def test_abort_returns_what_was_sampled_and_leaves_the_others_alone(kind: Kind) -> None:
    model = llama(1)
    prompt = random_ids(np.random.default_rng(7), 10)
    async with started(kind, model, max_running=2) as engine:
        long = Running(engine, request(prompt, name="long", max_tokens=4000))
        other = Running(engine, request(prompt, name="other", max_tokens=4000))
        await long.has(3)
        await other.has(3)
        queued = asyncio.ensure_future(engine.generate(request(prompt, name="queued", max_tokens=4)))
        await asyncio.sleep(0)
        await engine.abort("nobody")
        await engine.abort("queued")
        await engine.abort("long")
        ended = await long.end()
        await other.has(other.sampled + 5)
        await engine.abort("other")
        for got in ended, await other.end():
            assert got.finish == "abort" and 0 < len(got.tokens) < 4000
            assert_true(kind, model, prompt, got)
        never = await queued
        assert never.finish == "abort" and len(never.tokens) == 0


async def test_a_cancelled_call_leaves_nothing_running(kind: Kind) -> None:
    async with started(kind, llama(1), max_running=2) as engine:
        other = Running(engine, request([1, 2], name="other", max_tokens=4000))
        call = asyncio.ensure_future(engine.generate(request([1, 2], name="call", max_tokens=4000)))
        await other.has(3)
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await engine.abort("other")
        await other.end()
        assert (await engine.generate(request([1, 2], max_tokens=1))).finish == "length"
        assert engine.stats()["tokens"] < 4000  # the place came free before the cancelled request was through
        assert engine.stats()["load"] == 0


# -- stream ------------------------------------------------------------------------------------------------------------


async def test_the_pieces_of_a_stream_are_together_what_generate_returns(kind: Kind) -> None:
    model = llama(1)
    prompt = random_ids(np.random.default_rng(10), 12)
    async with started(kind, model, steady=True) as engine:
        free = await engine.generate(request(prompt, seed=3, max_tokens=40))
        for settings in {"max_tokens": 40}, {"max_tokens": 40, "stop_ids": [int(free.tokens[9])]}, {"max_tokens": 1}:
            whole = await engine.generate(request(prompt, seed=3, **settings))
            pieces = [piece async for piece in engine.stream(request(prompt, seed=3, **settings))]
            got = joined(pieces)
            assert_true(kind, model, prompt, got)
            assert got.versions.tolist() == [1] * len(got.tokens)
            if engine.capabilities.repeatable:
                assert (got.tokens.tolist(), got.finish) == (whole.tokens.tolist(), whole.finish)
                np.testing.assert_allclose(got.logprobs, whole.logprobs, atol=kind.atol)


async def test_a_stream_speaks_before_its_request_is_through(kind: Kind) -> None:
    async with started(kind, llama(1)) as engine:
        running = Running(engine, request([1, 2], name="r", max_tokens=4000))
        await running.has(1)
        assert 0 < running.sampled < 4000
        await engine.abort("r")
        got = await running.end()
        assert got.finish == "abort" and 0 < len(got.tokens) < 4000


async def test_leaving_a_stream_early_aborts_its_request(kind: Kind) -> None:
    async with started(kind, llama(1), max_running=1) as engine:
        async for piece in engine.stream(request([1, 2], max_tokens=4000)):
            assert piece.finish is None
            break
        assert (await engine.generate(request([1, 2], max_tokens=1))).finish == "length"
        assert engine.stats()["tokens"] < 4000
        assert engine.stats()["load"] == 0


async def test_a_stream_refuses_what_generate_refuses(kind: Kind) -> None:
    async with started(kind) as engine:
        with pytest.raises(NotReady, match="no weights"):
            await anext(engine.stream(request([1, 2])))
        await engine.load_weights(1, tensors_of(llama(1)))
        with pytest.raises(TaskFailed, match="empty"):
            await anext(engine.stream(request([])))


# -- pause -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", get_args(Pause))
async def test_nothing_is_sampled_in_a_pause_and_what_comes_meanwhile_waits(kind: Kind, mode: Pause) -> None:
    model = llama(1)
    prompts = [random_ids(np.random.default_rng(n), 8 + n) for n in range(4)]
    async with started(kind, model) as engine:
        must(engine, mode in engine.capabilities.pauses, f"pause in mode '{mode}'")
        running = [Running(engine, request(p, name=str(i), max_tokens=4000)) for i, p in enumerate(prompts)]
        for one in running:
            await one.has(3)
        await engine.pause(mode)
        late = asyncio.ensure_future(engine.generate(request(prompts[0], name="late", max_tokens=5)))
        sampled: list[int] = []
        while sampled != (sampled := [one.sampled for one in running]):
            await asyncio.sleep(0.2)  # what was sampled before may still be under way
        assert max(sampled) < 4000 and not late.done()
        await engine.resume()
        for i, (one, n) in enumerate(zip(running, sampled, strict=True)):
            await one.has(n + 5)
            await engine.abort(str(i))
        for prompt, one, n in zip(prompts, running, sampled, strict=True):
            got = await one.end()
            assert got.finish == "abort" and (len(got.tokens) == n if mode == "abort" else n < len(got.tokens) < 4000)
            assert_true(kind, model, prompt, got)
        got = await late
        assert got.finish == "length"
        assert_true(kind, model, prompts[0], got)


@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_in_a_pause_a_request_can_be_aborted_and_weights_can_change(kind: Kind, mode: Pause) -> None:
    old, new = llama(1), llama(2)
    prompt = random_ids(np.random.default_rng(15), 12)
    async with started(kind, old) as engine:
        must(engine, mode in engine.capabilities.pauses, f"pause in mode '{mode}'")
        going, left = (Running(engine, request(prompt, name=name, max_tokens=4000)) for name in ("going", "left"))
        for one in going, left:
            await one.has(3)
        await engine.pause(mode)
        late = asyncio.ensure_future(engine.generate(request(prompt, name="late", max_tokens=5)))
        await engine.check()
        await engine.abort("left")
        cut = await left.end()
        assert cut.finish == "abort" and 3 <= len(cut.tokens) < 4000
        assert_true(kind, old, prompt, cut)
        await engine.load_weights(2, tensors_of(new))
        await asyncio.sleep(0.5)
        assert going.versions.count(2) == 0 and not going.over and not late.done()
        await engine.resume()
        await going.has(5, version=2)
        await engine.abort("going")
        assert set((await going.end()).versions.tolist()) == {1, 2}
        got = await late
        assert got.versions.tolist() == [2] * 5
        assert_true(kind, new, prompt, got)


async def test_going_on_without_a_pause_does_nothing_and_pausing_twice_is_one_pause(kind: Kind) -> None:
    async with started(kind, llama(1)) as engine:
        must(engine, "in_place" in engine.capabilities.pauses, "pause in mode 'in_place'")
        await engine.resume()
        await engine.pause("in_place")
        await engine.pause("in_place")
        await engine.resume()
        assert (await engine.generate(request([1, 2], max_tokens=3))).finish == "length"


# -- score -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS.keys())
async def test_scores_are_the_logprobs_of_transformers_at_any_length(kind: Kind, build: Any) -> None:
    model, other = build(1), build(2)
    rng = np.random.default_rng(11)
    sequences = [random_ids(rng, n) for n in (2, 700, 3, 40, 257, 256, *[5] * 30)]
    async with started(kind, model, build) as engine:
        must(engine, engine.capabilities.score, "score given ids")
        busy = Running(engine, request([1, 2], name="busy", max_tokens=4000))
        await busy.has(1)
        for now in model, other:
            if now is other:
                await engine.load_weights(2, tensors_of(other))
            told = await asyncio.gather(*(engine.score(sequences, temperature) for temperature in (1.0, 0.7)))
            for temperature, scores in zip((1.0, 0.7), told, strict=True):
                for ids, got in zip(sequences, scores, strict=True):
                    assert got.dtype == np.float32
                    expected = logprobs_of(logits_of(now, ids[:1], ids[1:]), ids[1:], temperature)
                    np.testing.assert_allclose(got, expected, atol=kind.atol)
        await engine.abort("busy")
        assert await engine.score([]) == []


async def test_what_was_sampled_scores_what_its_sampling_said(kind: Kind) -> None:
    prompt = random_ids(np.random.default_rng(13), 30)
    async with started(kind, llama(1)) as engine:
        must(engine, engine.capabilities.score, "score given ids")
        got = await engine.generate(request(prompt, max_tokens=50, temperature=0.8))
        (scores,) = await engine.score([np.concatenate([prompt, got.tokens])], 0.8)
        np.testing.assert_allclose(scores[len(prompt) - 1 :], got.logprobs, atol=kind.atol)


async def test_ids_that_cannot_be_scored_are_refused_and_harm_nobody(kind: Kind) -> None:
    async with started(kind) as engine:
        must(engine, engine.capabilities.score, "score given ids")
        with pytest.raises(NotReady, match="no weights"):
            await engine.score([np.array([1, 2])])
        await engine.load_weights(1, tensors_of(llama(1)))
        for bad, says in ([1], "two"), ([1, VOCABULARY], "0 to 60"), ([1] * (CONTEXT + 1), "4096"):
            with pytest.raises(TaskFailed, match=says):
                await engine.score([np.array([1, 2]), np.array(bad)])
        for cold in 0.0, 1e-40, float("nan"):
            with pytest.raises(ConfigError, match="temperature"):
                await engine.score([np.array([1, 2])], cold)
        assert len((await engine.score([np.array([1] * CONTEXT)]))[0]) == CONTEXT - 1


# -- what it says of itself --------------------------------------------------------------------------------------------


async def test_capabilities_are_known_before_the_start_and_do_not_change(kind: Kind) -> None:
    engine = kind.make(lambda: llama(1))
    told = engine.capabilities
    assert told.name and told.pauses <= set(get_args(Pause))
    async with started(kind, llama(1)) as other:
        assert other.capabilities == told


async def test_check_is_silent_while_the_engine_works_and_tells_when_it_is_gone(kind: Kind) -> None:
    async with started(kind, llama(1)) as engine:
        await engine.check()
        await engine.generate(request([1, 2], max_tokens=1))
        await engine.check()
        await engine.close()
        with pytest.raises(ActorLost, match="closed"):
            await engine.check()


# -- refusals and ends -------------------------------------------------------------------------------------------------


def test_no_weights_no_answer(kind: Kind) -> None:
    async def go() -> None:
        async with started(kind) as engine:
            assert engine.version == -1
            with pytest.raises(NotReady, match="no weights"):
                await engine.generate(request([1, 2]))

    asyncio.run(go())


def test_a_full_queue_pushes_back_and_takes_work_again_later(kind: Kind) -> None:
    async def go() -> None:
        async with started(kind, llama(1), max_running=2, max_waiting=3) as engine:
            calls = [asyncio.ensure_future(engine.generate(request([1, 2], max_tokens=20))) for _ in range(5)]
            await asyncio.sleep(0)
            with pytest.raises(Overloaded, match="5 requests"):
                await engine.generate(request([1, 2], max_tokens=20))
            assert [got.finish for got in await asyncio.gather(*calls)] == ["length"] * 5
            await engine.generate(request([1, 2], max_tokens=1))

    asyncio.run(go())


@pytest.mark.parametrize(
    ("bad", "error", "says"),
    [
        (request([]), TaskFailed, "empty"),
        (request([1] * CONTEXT), TaskFailed, "4096"),
        (request([1, VOCABULARY]), TaskFailed, "0 to 60"),
        (request([1], max_tokens=0), ConfigError, "max_tokens"),
        (request([1], top_p=0.0), ConfigError, "top_p"),
        (request([1], top_k=-1), ConfigError, "top_k"),
        (request([1], temperature=-1.0), ConfigError, "temperature"),
        (request([1], temperature=float("nan")), ConfigError, "temperature"),
        (request([1], temperature=float("inf")), ConfigError, "temperature"),
        (request([1], temperature=1e-300), ConfigError, "temperature"),
        (request([1], temperature=0.009), ConfigError, "temperature"),
        (request(np.ones((1, 3), np.int32)), TaskFailed, r"shape \[n\]"),
        (replace(request([1]), prompt=np.ones(3, np.float32)), TaskFailed, "float32"),
    ],
)
def test_a_request_that_makes_no_sense_is_refused_and_harms_nobody(
    kind: Kind, bad: Generate, error: type[Exception], says: str
) -> None:
    async def go() -> None:
        async with started(kind, llama(1)) as engine:
            with pytest.raises(error, match=says):
                await engine.generate(bad)
            assert (await engine.generate(request([1], max_tokens=2))).finish == "length"

    asyncio.run(go())


async def test_close_ends_requests_in_flight_and_refuses_later_ones(kind: Kind) -> None:
    async with started(kind, llama(1), max_running=2) as engine:
        running = Running(engine, request([1, 2], name="running", max_tokens=4000))
        await running.has(3)
        calls = [asyncio.ensure_future(engine.generate(request([1, 2], name=f"{i}", max_tokens=4000))) for i in range(3)]
        await asyncio.sleep(0)
        await engine.close()
        assert [got.finish for got in await asyncio.gather(*calls, running.end())] == ["abort"] * 4
        with pytest.raises(ActorLost, match="closed"):
            await engine.generate(request([1, 2]))


def test_a_model_that_cannot_be_loaded_fails_the_start(kind: Kind) -> None:
    def build() -> torch.nn.Module:
        raise ConfigError("model folder 'x' does not exist")

    async def go() -> None:
        engine = kind.make(build)
        with pytest.raises(ConfigError, match="'x' does not exist"):
            await engine.start()
        with pytest.raises(ConfigError, match="'x' does not exist"):
            await engine.generate(request([1]))
        await engine.close()

    asyncio.run(go())
