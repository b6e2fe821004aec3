"""What every generation engine promises (`actors/engines/base.py`), checked against plain transformers.

A new engine joins by an entry in `ENGINES`: a function from (load_model, limits) to an engine that is not started.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tests.actors.engines.servers import SGLANG, VLLM, SharedSGLang, SharedVLLM
from troupe.actors.engines.base import Engine
from troupe.actors.engines.local import LocalEngine
from troupe.learner.model import tensors_of
from troupe.protocol.checksum import checksum_of
from troupe.protocol.errors import (
    ActorLost,
    CheckpointError,
    ConfigError,
    NotReady,
    Overloaded,
    RemoteError,
    TaskFailed,
)
from troupe.protocol.messages import Generate, Generated, Sampling

VOCABULARY = 61
CONTEXT = 4096
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,  # the least of which vLLM has an attention for CPUs
    "max_position_embeddings": CONTEXT,
    "initializer_range": 0.3,  # sharp enough that a wrong key or position shows
    "tie_word_embeddings": True,
}

ENGINES: dict[str, Callable[..., Engine]] = {"local": LocalEngine, "sglang": SharedSGLang, "vllm": SharedVLLM}
MARKS: dict[str, Any] = {"sglang": SGLANG.alone, "vllm": VLLM.alone}


def _llama(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()


def _qwen3(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(**SIZES)).eval()


def _llama_with_lora(seed: int) -> torch.nn.Module:
    base = _llama(99)
    torch.manual_seed(seed)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    return model.eval()


MODELS = {"llama": _llama, "qwen3": _qwen3, "llama_with_lora": _llama_with_lora}


BROKEN = "test_a_model_that_breaks_fails_every_request_and_all_later_calls"
ELSEWHERE = {
    "sglang": {
        "llama_with_lora": "SGLang takes whole weights only",
        "top_k_and_top_p": "SGLang means another distribution by both together; test_sglang.py: they are refused",
        BROKEN: "the model is the server's; test_sglang.py kills it",
        "test_weights_that_diverged_are_an_error_not_a_token": "it ends the server, which others share; see test_sglang.py",
    },
    "vllm": {
        "llama_with_lora": "the engine sends vLLM whole weights only",
        BROKEN: "the model is the server's; test_vllm.py kills it",
    },
}
"""What is not checked here of an engine in another process, and why."""


def _elsewhere(engine: str, node: Any) -> str:
    params = node.callspec.params
    both = {"top_k", "top_p"} <= set(params.get("sampling", ()))
    lora = params.get("build") is _llama_with_lora
    what = "llama_with_lora" if lora else "top_k_and_top_p" if both else node.originalname
    return ELSEWHERE.get(engine, {}).get(what, "")


@pytest.fixture(params=[pytest.param(name, marks=MARKS.get(name, ())) for name in ENGINES])
def make(request: pytest.FixtureRequest) -> Callable[..., Engine]:
    if reason := _elsewhere(request.param, request.node):
        pytest.skip(reason)
    return ENGINES[request.param]


@asynccontextmanager
async def started(
    make: Callable[..., Engine], model: torch.nn.Module | None = None, build: Any = _llama, **limits: Any
) -> AsyncIterator[Engine]:
    """An engine that has `model` as version 1; its own copy began as another one."""
    engine = make(lambda: build(12345), **limits)
    await engine.start()
    try:
        if model is not None:
            await engine.load_weights(1, tensors_of(model))
        yield engine
    finally:
        await engine.close()


def request(prompt: Any, *, name: str = "r", session: str = "", seed: int = 0, **sampling: Any) -> Generate:
    return Generate(name, session, np.asarray(prompt, np.int32), Sampling(**sampling), seed)


async def sampled(engine: Engine, n: int) -> None:
    """Returns when the engine has sampled `n` tokens more."""
    goal = engine.stats()["tokens"] + n
    while engine.stats()["tokens"] < goal:
        await asyncio.sleep(0.001)


def random_ids(rng: np.random.Generator, n: int) -> np.ndarray[Any, Any]:
    return rng.integers(0, VOCABULARY, n).astype(np.int32)


@torch.no_grad()
def logits_of(model: torch.nn.Module, prompt: Any, tokens: Any) -> torch.Tensor:
    """Logits that plain transformers gives for the distribution of each of `tokens`, shape [k, vocabulary]."""
    ids = torch.tensor(np.concatenate([prompt, tokens]), dtype=torch.int64)
    return model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1].float()


def assert_true(model: torch.nn.Module, prompt: Any, got: Generated, temperature: float = 1.0) -> None:
    expected = (logits_of(model, prompt, got.tokens) / temperature).log_softmax(-1)
    expected = expected.gather(-1, torch.tensor(got.tokens, dtype=torch.int64)[:, None])[:, 0].numpy()
    assert len(got.tokens) == len(got.logprobs) == len(got.versions)
    np.testing.assert_allclose(got.logprobs, expected, atol=1e-4)


@pytest.mark.parametrize("build", MODELS.values(), ids=MODELS.keys())
def test_logprobs_are_those_of_transformers_for_ragged_requests_that_join_at_any_token(
    make: Callable[..., Engine], build: Any
) -> None:
    model = build(1)
    rng = np.random.default_rng(0)
    prompts = [random_ids(rng, n) for n in rng.integers(1, 300, 24)]

    async def go() -> list[Generated]:
        async with started(make, model, build, max_running=16) as engine:

            async def one(i: int) -> Generated:
                await asyncio.sleep(0.001 * i)
                return await engine.generate(request(prompts[i], name=str(i), seed=i, max_tokens=5 + i, temperature=0.7))

            return await asyncio.gather(*(one(i) for i in range(len(prompts))))

    for i, (prompt, got) in enumerate(zip(prompts, asyncio.run(go()), strict=True)):
        assert (got.finish, len(got.tokens)) == ("length", 5 + i)
        assert_true(model, prompt, got, temperature=0.7)


@pytest.mark.parametrize("max_cached_tokens", [131_072, 2048], ids=["roomy", "sessions_evict_each_other"])
def test_logprobs_stay_true_over_the_turns_of_many_sessions(make: Callable[..., Engine], max_cached_tokens: int) -> None:
    model = _llama(1)

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
        async with started(make, model, max_running=8, max_cached_tokens=max_cached_tokens) as engine:
            return await asyncio.gather(*(episode(engine, i) for i in range(20)))

    for turns in asyncio.run(go()):
        for prompt, got in turns:
            assert_true(model, prompt, got)


def test_one_sequence_much_longer_than_the_rest_changes_nothing(make: Callable[..., Engine]) -> None:
    model = _llama(1)
    rng = np.random.default_rng(1)
    prompts = [random_ids(rng, n) for n in [450, *[6] * 12]]

    async def go() -> list[Generated]:
        async with started(make, model) as engine:
            return await asyncio.gather(*(engine.generate(request(p, max_tokens=9)) for p in prompts))

    for prompt, got in zip(prompts, asyncio.run(go()), strict=True):
        assert_true(model, prompt, got)


def test_the_same_seed_draws_the_same_tokens_alone_or_in_company(make: Callable[..., Engine]) -> None:
    model = _llama(1)
    prompt = random_ids(np.random.default_rng(2), 20)

    async def go() -> tuple[Generated, list[Generated]]:
        async with started(make, model) as engine:
            alone = await engine.generate(request(prompt, seed=7, max_tokens=24))
            return alone, await asyncio.gather(
                *(engine.generate(request(prompt, seed=seed, max_tokens=24)) for seed in (7, 8, 9, 7))
            )

    alone, company = asyncio.run(go())
    drawn = [got.tokens.tolist() for got in company]
    assert drawn[0] == drawn[3] == alone.tokens.tolist()
    assert drawn[1] != drawn[0] and drawn[2] != drawn[0] and drawn[1] != drawn[2]


def test_drawn_tokens_have_the_frequencies_of_the_distribution(make: Callable[..., Engine]) -> None:
    model = _llama(1)
    prompt = random_ids(np.random.default_rng(3), 5)

    async def go() -> list[Generated]:
        async with started(make, model, max_running=256) as engine:
            return await asyncio.gather(*(engine.generate(request(prompt, seed=s, max_tokens=1)) for s in range(1000)))

    counts = np.bincount([got.tokens[0] for got in asyncio.run(go())], minlength=VOCABULARY)
    p = logits_of(model, prompt, [0]).softmax(-1)[0].numpy()
    assert np.abs(counts / 1000 - p).sum() < 0.25  # total variation; a uniform or greedy draw is far beyond


def test_temperature_zero_is_the_greedy_decoding_of_transformers(make: Callable[..., Engine]) -> None:
    model: Any = _llama(1)
    model.generation_config.eos_token_id = None  # it would stop there; our requests name their own stops
    prompts = [random_ids(np.random.default_rng(4), n) for n in (3, 40, 11)]

    async def go() -> list[Generated]:
        async with started(make, model) as engine:
            return await asyncio.gather(*(engine.generate(request(p, temperature=0, max_tokens=20)) for p in prompts))

    for prompt, got in zip(prompts, asyncio.run(go()), strict=True):
        ids = torch.tensor(prompt[None], dtype=torch.int64)
        reference = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=20, pad_token_id=0)
        assert got.tokens.tolist() == reference[0, len(prompt) :].tolist()
        assert_true(model, prompt, got)


def test_a_stop_id_ends_the_turn_and_is_kept(make: Callable[..., Engine]) -> None:
    model = _llama(1)
    prompt = random_ids(np.random.default_rng(5), 10)

    async def go() -> tuple[Generated, Generated]:
        async with started(make, model) as engine:
            free = await engine.generate(request(prompt, max_tokens=30))
            stop = int(free.tokens[12])
            return free, await engine.generate(request(prompt, max_tokens=30, stop_ids=[stop, VOCABULARY + 5]))

    free, stopped = asyncio.run(go())
    first = free.tokens.tolist().index(free.tokens[12])
    assert stopped.tokens.tolist() == free.tokens[: first + 1].tolist()
    assert stopped.finish == "stop"
    assert_true(model, prompt, stopped)


def test_a_full_context_ends_the_turn_with_length(make: Callable[..., Engine]) -> None:
    async def go() -> Generated:
        async with started(make, _llama(1)) as engine:
            return await engine.generate(request(random_ids(np.random.default_rng(6), CONTEXT - 4), max_tokens=100))

    got = asyncio.run(go())
    assert (got.finish, len(got.tokens)) == ("length", 4)


def test_abort_returns_what_was_sampled_and_leaves_the_others_alone(make: Callable[..., Engine]) -> None:
    model = _llama(1)
    prompt = random_ids(np.random.default_rng(7), 10)

    async def go() -> tuple[Generated, Generated, Generated]:
        async with started(make, model, max_running=2) as engine:
            long = asyncio.ensure_future(engine.generate(request(prompt, name="long", max_tokens=4000)))
            other = asyncio.ensure_future(engine.generate(request(prompt, name="other", max_tokens=4000)))
            queued = asyncio.ensure_future(engine.generate(request(prompt, name="queued", max_tokens=4)))
            await sampled(engine, 6)
            await engine.abort("nobody")
            await engine.abort("queued")
            await engine.abort("long")
            ended = await long
            await sampled(engine, 5)
            await engine.abort("other")
            return ended, await other, await queued

    long, other, queued = asyncio.run(go())
    assert long.finish == other.finish == "abort" and 0 < len(long.tokens) < len(other.tokens) < 4000
    assert_true(model, prompt, long)
    assert_true(model, prompt, other)
    assert queued.finish == "abort" and len(queued.tokens) == 0


def test_a_cancelled_call_leaves_nothing_running(make: Callable[..., Engine]) -> None:
    async def go() -> None:
        async with started(make, _llama(1), max_running=1) as engine:
            call = asyncio.ensure_future(engine.generate(request([1, 2], max_tokens=4000)))
            await sampled(engine, 3)
            call.cancel()
            with pytest.raises(asyncio.CancelledError):
                await call
            assert (await engine.generate(request([1, 2], max_tokens=1))).finish == "length"
            assert engine.stats()["tokens"] < 4000  # the place came free before the cancelled request was through
            assert engine.stats()["load"] == 0

    asyncio.run(go())


def test_weights_change_between_two_tokens_and_each_token_names_its_version(make: Callable[..., Engine]) -> None:
    old, new = _llama(1), _llama(2)
    prompt = random_ids(np.random.default_rng(8), 10)

    async def go() -> tuple[Generated, Generated, Generated]:
        async with started(make, old) as engine:
            first = await engine.generate(request(prompt, session="s", max_tokens=5))
            across = asyncio.ensure_future(engine.generate(request(prompt, name="t", session="t", max_tokens=4000)))
            await sampled(engine, 5)
            await engine.load_weights(2, tensors_of(new))
            assert engine.version == 2
            fresh = await engine.generate(request(prompt, session="s", max_tokens=5))
            await engine.abort("t")
            return first, await across, fresh

    first, across, fresh = asyncio.run(go())
    assert first.versions.tolist() == [1] * 5
    assert_true(old, prompt, first)
    changed = int((across.versions == 1).sum())
    assert 0 < changed < len(across.versions) < 4000
    assert across.versions.tolist() == [1] * changed + [2] * (len(across.versions) - changed)
    before = Generated(across.tokens[:changed], across.logprobs[:changed], across.versions[:changed], "abort")
    assert_true(old, prompt, before)
    assert fresh.versions.tolist() == [2] * 5
    assert_true(new, prompt, fresh)  # nothing that the old weights computed for this session was used


def test_a_turn_that_saw_two_versions_leaves_nothing_to_the_next(make: Callable[..., Engine]) -> None:
    old, new = _llama(1), _llama(2)
    prompt = random_ids(np.random.default_rng(9), 10)

    async def go() -> tuple[Any, Generated]:
        async with started(make, old) as engine:
            across = asyncio.ensure_future(engine.generate(request(prompt, name="r", session="s", max_tokens=4000)))
            await sampled(engine, 5)
            await engine.load_weights(2, tensors_of(new))
            await sampled(engine, 5)
            await engine.abort("r")
            said = await across
            assert set(said.versions.tolist()) == {1, 2}
            longer = np.concatenate([prompt, said.tokens, [3, 4]])
            return longer, await engine.generate(request(longer, session="s", max_tokens=8))

    prompt, got = asyncio.run(go())
    assert_true(new, prompt, got)


@pytest.mark.parametrize("build", [_llama, _llama_with_lora])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_checksum_is_of_what_the_engine_holds(make: Callable[..., Engine], build: Any, dtype: torch.dtype) -> None:
    model = build(1).to(dtype)

    async def go() -> None:
        async with started(make, build=lambda seed: build(seed).to(dtype)) as engine:
            shared = {name: array.copy() for name, array in tensors_of(model).items()}
            for array in shared.values():
                array.flags.writeable = False  # as from shared memory
            assert await engine.load_weights(4, shared) == checksum_of(tensors_of(model))
            assert engine.version == 4

    asyncio.run(go())


def test_weights_of_another_model_are_refused_and_the_old_ones_stay(make: Callable[..., Engine]) -> None:
    model = _llama(1)

    async def go() -> Generated:
        async with started(make, model) as engine:
            wrong = {name: array for name, array in tensors_of(_llama(2)).items() if "norm" not in name}
            with pytest.raises(CheckpointError, match=r"norm\.weight"):
                await engine.load_weights(2, wrong)
            assert engine.version == 1
            return await engine.generate(request([5, 6, 7], max_tokens=5))

    got = asyncio.run(go())
    assert got.versions.tolist() == [1] * 5
    assert_true(model, [5, 6, 7], got)


@pytest.mark.parametrize("sampling", [{"top_k": 3}, {"top_p": 0.6}, {"top_k": 8, "top_p": 0.7, "temperature": 1.5}], ids=str)
def test_top_k_and_top_p_draw_only_what_they_leave_with_its_renormalised_logprob(
    make: Callable[..., Engine], sampling: dict[str, Any]
) -> None:
    from transformers import TopKLogitsWarper, TopPLogitsWarper

    model = _llama(1)
    prompts = [random_ids(np.random.default_rng(n), 5 + n) for n in range(12)]

    async def go() -> list[Generated]:
        async with started(make, model) as engine:
            return await asyncio.gather(
                *(engine.generate(request(p, seed=i, max_tokens=20, **sampling)) for i, p in enumerate(prompts)),
                engine.generate(request([1], max_tokens=20)),  # a neighbour without limits
            )

    results = asyncio.run(go())
    assert_true(model, [1], results.pop())
    for prompt, got in zip(prompts, results, strict=True):
        scores = logits_of(model, prompt, got.tokens) / sampling.get("temperature", 1.0)
        if "top_k" in sampling:
            scores = TopKLogitsWarper(sampling["top_k"])(None, scores)
        if "top_p" in sampling:
            scores = TopPLogitsWarper(sampling["top_p"])(None, scores)
        expected = scores.log_softmax(-1).gather(-1, torch.tensor(got.tokens, dtype=torch.int64)[:, None])[:, 0].numpy()
        assert np.isfinite(expected).all(), "a token outside of the support was drawn"
        np.testing.assert_allclose(got.logprobs, expected, atol=1e-4)


def test_no_weights_no_answer(make: Callable[..., Engine]) -> None:
    async def go() -> None:
        async with started(make) as engine:
            assert engine.version == -1
            with pytest.raises(NotReady, match="no weights"):
                await engine.generate(request([1, 2]))

    asyncio.run(go())


def test_a_full_queue_pushes_back_and_takes_work_again_later(make: Callable[..., Engine]) -> None:
    async def go() -> None:
        async with started(make, _llama(1), max_running=2, max_waiting=3) as engine:
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
    ],
)
def test_a_request_that_makes_no_sense_is_refused_and_harms_nobody(
    make: Callable[..., Engine], bad: Generate, error: type[Exception], says: str
) -> None:
    async def go() -> None:
        async with started(make, _llama(1)) as engine:
            with pytest.raises(error, match=says):
                await engine.generate(bad)
            assert (await engine.generate(request([1], max_tokens=2))).finish == "length"

    asyncio.run(go())


def test_close_ends_requests_in_flight_and_refuses_later_ones(make: Callable[..., Engine]) -> None:
    async def go() -> None:
        async with started(make, _llama(1), max_running=2) as engine:
            calls = [asyncio.ensure_future(engine.generate(request([1, 2], max_tokens=4000))) for _ in range(4)]
            await sampled(engine, 3)
            await engine.close()
            assert [got.finish for got in await asyncio.gather(*calls)] == ["abort"] * 4
            with pytest.raises(ActorLost, match="closed"):
                await engine.generate(request([1, 2]))

    asyncio.run(go())


def test_a_model_that_breaks_fails_every_request_and_all_later_calls(make: Callable[..., Engine]) -> None:
    class Breaks(LlamaForCausalLM):
        calls = 0

        def forward(self, *args: Any, **kwargs: Any) -> Any:
            self.calls += 1
            if self.calls > 3:
                raise ZeroDivisionError("a bit flipped")
            return super().forward(*args, **kwargs)

    def build(_: int) -> torch.nn.Module:
        torch.manual_seed(0)
        return Breaks(LlamaConfig(**SIZES))

    async def go() -> None:
        async with started(make, _llama(1), build, generator_name="generator-3", max_running=4) as engine:
            calls = [engine.generate(request([1, 2], max_tokens=4000)) for _ in range(8)]
            for outcome in await asyncio.gather(*calls, return_exceptions=True):
                assert isinstance(outcome, RemoteError)
                assert "generator-3" in str(outcome) and "ZeroDivisionError: a bit flipped" in str(outcome)
            with pytest.raises(RemoteError, match="a bit flipped"):
                await engine.generate(request([1, 2]))
            with pytest.raises(RemoteError, match="a bit flipped"):
                await engine.load_weights(2, tensors_of(_llama(2)))

    asyncio.run(go())


def test_weights_that_diverged_are_an_error_not_a_token(make: Callable[..., Engine]) -> None:
    model = _llama(1)
    with torch.no_grad():
        model.get_input_embeddings().weight.fill_(float("nan"))

    async def go() -> None:
        async with started(make, model) as engine:
            with pytest.raises(RemoteError, match="diverged"):
                await engine.generate(request([1, 2]))

    asyncio.run(go())


def test_a_model_that_cannot_be_loaded_fails_the_start(make: Callable[..., Engine]) -> None:
    def build() -> torch.nn.Module:
        raise ConfigError("model folder 'x' does not exist")

    async def go() -> None:
        engine = make(build)
        with pytest.raises(ConfigError, match="'x' does not exist"):
            await engine.start()
        with pytest.raises(ConfigError, match="'x' does not exist"):
            await engine.generate(request([1]))
        await engine.close()

    asyncio.run(go())
