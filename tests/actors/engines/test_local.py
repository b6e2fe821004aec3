"""What the embedded engine adds to the contract: reuse between turns, bounded memory, and models that it refuses."""

import asyncio
from typing import Any

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM, MistralConfig, MistralForCausalLM

from troupe.actors.engines import sampling
from troupe.actors.engines.kv import KVCache
from troupe.actors.engines.local import LocalEngine
from troupe.learner.model import tensors_of
from troupe.protocol.errors import ConfigError, TaskFailed
from troupe.protocol.messages import Generate, Generated, Sampling

SIZES: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "max_position_embeddings": 1024,
}


def build() -> torch.nn.Module:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()


async def ready(load: Any = build, **limits: Any) -> LocalEngine:
    engine = LocalEngine(load, **limits)
    await engine.start()
    await engine.load_weights(0, tensors_of(load()))
    return engine


def turn(engine: LocalEngine, session: str, prompt: Any, max_tokens: int = 5) -> Any:
    return engine.generate(Generate("r", session, np.asarray(prompt, np.int32), Sampling(max_tokens=max_tokens)))


def fed(engine: LocalEngine) -> int:
    return int(engine.stats()["fed"])


def test_a_session_feeds_only_what_is_new_until_it_ends() -> None:
    async def go() -> None:
        engine = await ready()
        first = list(range(30))
        said = await turn(engine, "s", first)
        assert fed(engine) == 30 + 4  # the last token sampled was never fed
        second = [*first, *said.tokens, 7, 8, 9]
        said = await turn(engine, "s", second)
        assert fed(engine) == 34 + (1 + 3) + 4
        await engine.end_session("s")
        before = fed(engine)
        await turn(engine, "s", second)
        assert fed(engine) == before + 38 + 4
        before = fed(engine)
        await turn(engine, "", second)
        await turn(engine, "", second)
        assert fed(engine) == before + 2 * (38 + 4)  # no session, nothing kept
        await engine.close()

    asyncio.run(go())


def test_a_session_that_ends_during_its_turn_is_not_kept() -> None:
    async def go() -> None:
        engine = await ready()
        call = asyncio.ensure_future(turn(engine, "s", [1, 2, 3], max_tokens=50))
        await asyncio.sleep(0)
        await engine.end_session("s")
        await call
        assert engine.stats()["sessions"] == 0
        await engine.close()

    asyncio.run(go())


def test_the_session_used_least_recently_makes_room() -> None:
    async def go() -> None:
        engine = await ready(max_cached_tokens=4 * 256)
        prompts = {name: [i] * 40 for i, name in enumerate("abcd")}
        for name, prompt in prompts.items():
            await turn(engine, name, prompt)
        await turn(engine, "a", prompts["a"])
        await turn(engine, "e", [9] * 40)
        assert engine.stats()["sessions"] == 4
        before = fed(engine)
        await turn(engine, "a", prompts["a"])
        assert fed(engine) == before + 1 + 4  # kept: only the last token of the prompt is computed again
        before = fed(engine)
        await turn(engine, "b", prompts["b"])
        assert fed(engine) == before + 40 + 4  # went for e
        await engine.close()

    asyncio.run(go())


def test_more_work_than_memory_waits_its_turn() -> None:
    async def go() -> list[Generated]:
        engine = await ready(max_cached_tokens=600, max_running=64)
        prompts = [[i % 50] * (20 + 30 * (i % 15)) for i in range(30)]
        results = await asyncio.gather(*(turn(engine, str(i), p, max_tokens=8) for i, p in enumerate(prompts)))
        with pytest.raises(TaskFailed, match="600"):
            await turn(engine, "", [1] * 600)
        await engine.close()
        return results

    assert [len(got.tokens) for got in asyncio.run(go())] == [8] * 30


def test_rows_never_hold_more_than_their_bound_nor_two_sequences_in_one_place() -> None:
    rng = np.random.default_rng(0)
    cache = KVCache(max_tokens=8192)
    like = torch.zeros(1, 2, 1, 4)
    running: dict[int, Any] = {}
    for step in range(2000):
        if rng.random() < 0.5:
            prompt = rng.integers(0, 3, rng.integers(1, 600))
            limit = len(prompt) + int(rng.integers(1, 900)) if step % 7 == 0 else len(prompt) + 10
            row = cache.acquire(str(rng.integers(0, 30)), prompt, limit)
            if row is not None:
                assert row.fed < len(prompt) and (row.ids[: len(prompt)] == prompt).all()
                keys, _ = cache.layer(0, like)
                # What the row claims to hold is what was written for exactly these ids.
                np.testing.assert_array_equal(keys[row.at, 0, : row.fed, 0].numpy(), row.ids[: row.fed])
                feed = cache.feed([(row, len(prompt) - row.fed)], torch.device("cpu"))
                place, start = feed.rows[0].at, row.fed
                keys, _ = cache.layer(0, like)
                keys[place, :, start : len(prompt)] = torch.from_numpy(prompt[start:])[:, None].float()
                row.fed = len(prompt)
                running[step] = row
        elif running:
            row = running.pop(int(rng.choice(list(running))))
            cache.release(row, keep=True)
        keys, values = cache.layer(0, like)
        assert keys.shape[0] * keys.shape[2] <= 8192 and keys.shape == values.shape
        places = [row.at for row in running.values()]
        assert len(set(places)) == len(places)
        for row in running.values():
            np.testing.assert_array_equal(keys[row.at, 0, : row.fed, 0].numpy(), row.ids[: row.fed])


def test_a_model_with_a_sliding_window_is_refused() -> None:
    def mistral() -> torch.nn.Module:
        return MistralForCausalLM(MistralConfig(**SIZES, sliding_window=16)).eval()

    async def go() -> None:
        engine = await ready(mistral)
        with pytest.raises(ConfigError, match="sliding"):
            await turn(engine, "", [1, 2, 3])
        await engine.close()

    asyncio.run(go())


def test_the_top_uniform_number_still_draws_a_token_of_the_support() -> None:
    logits = torch.full((1, 7), -1e30)
    logits[0, 2], logits[0, 4] = 3.0, 1.0
    for u in (0.0, 1 - 2.0**-32):
        (token,), (logprob,) = sampling.sample(logits, [Sampling()], np.array([u]))
        assert token == (2 if u == 0 else 4)
        assert logprob == pytest.approx(float(logits[0, [2, 4]].log_softmax(-1)[0 if u == 0 else 1]))


def test_uniform_numbers_are_those_of_the_seed_and_any_integer_is_a_seed() -> None:
    for seed in (0, -5, 2**63, 2**70):
        one, two = sampling.uniforms(seed, 10, 8), sampling.uniforms(seed, 10, 8)
        assert (one == two).all() and (one >= 0).all() and (one < 1).all()
    assert (sampling.uniforms(1, 10, 8) != sampling.uniforms(1, 11, 8)).all()
    assert (sampling.uniforms(1, 10, 8) == sampling.uniforms(1, 10, 20)[:8]).all()  # max_tokens changes no draw
