"""What the embedded engine keeps and shares: never more than it may, never of other weights, and never fed twice."""

import asyncio
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch

from tests.actors.engines.suite import ENGINES, Running, assert_true, llama, random_ids, request
from troupe.actors.engines.kv import KVCache
from troupe.actors.engines.local import LocalEngine
from troupe.learner.model import tensors_of
from troupe.protocol.messages import Generated

KIND = ENGINES["local"]
PROMPT = random_ids(np.random.default_rng(0), 200)


async def ready(**limits: Any) -> LocalEngine:
    engine = LocalEngine(lambda: llama(3), **limits)
    await engine.start()
    await engine.load_weights(1, tensors_of(llama(1)))
    return engine


async def group(engine: LocalEngine, prompts: Sequence[Any], name: str = "", max_tokens: int = 5) -> list[Generated]:
    return await asyncio.gather(
        *(
            engine.generate(request(p, name=f"{name}{i}", session=f"{name}{i}", seed=i, max_tokens=max_tokens))
            for i, p in enumerate(prompts)
        )
    )


def fed(engine: LocalEngine) -> int:
    return int(engine.stats()["fed"])


async def test_a_group_that_comes_at_once_computes_its_common_prompt_once() -> None:
    plain, engine = await ready(min_shared=0), await ready()
    apart = await group(plain, [PROMPT] * 8)
    assert fed(plain) == 8 * (200 + 4)
    together = await group(engine, [PROMPT] * 8)
    assert fed(engine) == 200 + 7 + 8 * 4  # the last token of each prompt is fed: its logits are wanted
    for one, other in zip(apart, together, strict=True):
        assert one.tokens.tolist() == other.tokens.tolist()
        np.testing.assert_allclose(one.logprobs, other.logprobs, atol=1e-4)
    # Later ones begin from what is kept, those that begin otherwise from nothing, and so do those with little in common.
    before = fed(engine)
    prompts = [PROMPT[:150], np.concatenate([PROMPT[:100], PROMPT[:60]]), PROMPT[1:], np.concatenate([PROMPT[:31], PROMPT])]
    for prompt, got in zip(prompts, await group(engine, prompts, "later"), strict=True):
        assert_true(KIND, llama(1), prompt, got)
    assert fed(engine) == before + 1 + 60 + 199 + 231 + 4 * 4
    await plain.close()
    await engine.close()


async def test_keys_of_older_weights_serve_nobody() -> None:
    engine = await ready()
    running = Running(engine, request(PROMPT, name="old", session="old", max_tokens=3000))
    await running.has(3)
    await group(engine, [PROMPT] * 2)
    await engine.load_weights(2, tensors_of(llama(2)))
    await engine.pause("in_place")
    before = fed(engine)
    calls = asyncio.ensure_future(group(engine, [PROMPT] * 3, "new"))
    await asyncio.sleep(0)
    await engine.abort("old")
    await engine.resume()
    for got in await calls:
        assert got.versions.tolist() == [2] * 5
        assert_true(KIND, llama(2), PROMPT, got)
    assert fed(engine) == before + 200 + 2 + 3 * 4
    await engine.close()


@pytest.mark.parametrize("happens", ["weights change", "the first is aborted"])
async def test_those_who_wait_for_a_common_prompt_do_not_depend_on_the_first(happens: str) -> None:
    long = random_ids(np.random.default_rng(1), 3500)  # several steps
    engine = await ready()
    calls = asyncio.ensure_future(group(engine, [long] * 4))
    while not fed(engine):
        await asyncio.sleep(0)
    await engine.pause("in_place")
    assert 0 < fed(engine) < 3500, "the first was through: the test proves nothing"
    if happens == "weights change":
        await engine.load_weights(2, tensors_of(llama(2)))
    else:
        await engine.abort("0")
    begun = fed(engine)
    await engine.resume()
    first, *others = await calls
    assert first.finish == ("length" if happens == "weights change" else "abort")
    for got in others:
        assert got.finish == "length"
        assert_true(KIND, llama(int(got.versions[0])), long, got)
    if happens == "weights change":  # the first goes on with what it had, which is nothing for the others
        assert others[0].versions.tolist() == [2] * 5
        assert fed(engine) == (3500 + 4) + (3500 + 4) + 2 * (1 + 4)
    else:
        assert fed(engine) == 3500 + 2 + 3 * 4  # it left what it had
    assert begun < 3500
    await engine.close()


def test_rows_stay_within_their_bound_and_hold_what_they_claim_however_they_are_moved_and_shared() -> None:
    rng = np.random.default_rng(0)
    cache = KVCache(max_tokens=8192, min_shared=20)
    begins = rng.integers(1, 4, (5, 600))
    said = begins[rng.integers(0, 5, 30)]  # what each session says in the end; some begin alike
    for words in said:
        cut = int(rng.integers(0, 600))
        words[cut:] = rng.integers(1, 4, 600 - cut)
    like = torch.zeros(1, 2, 1, 4)
    running: list[Any] = []
    version, waited, took = 0, 0, 0

    def held(row: Any) -> Any:
        """What lies in the place of `row`, a number a token: `feed` would have put the ids there."""
        keys, values = (tensor[row.at, :, : row.fed] for tensor in cache.layer(0, like, like))
        assert (keys == -values).all() and (keys[:1, :, :1] == keys).all()
        return keys[0, :, 0].numpy()

    def forward() -> None:
        """Feeds every row a part of what it lacks, as its ids and ten times the version."""
        parts = []
        for row in running:
            missing = min(len(row.ids), row.prompt + 5) - row.fed
            if row.source is None and missing:
                parts.append((row, int(rng.integers(1, missing + 1))))
        if not parts:
            return
        feed = cache.feed(parts, torch.device("cpu"))  # may move rows
        for tensor, sign in zip(cache.layer(0, like, like), (1, -1), strict=True):
            tensor.view(-1, 4)[feed.index(2)] = sign * (10 * version + feed.ids[0].repeat(2)[:, None]).float()
        for row, n in parts:
            row.fed += n
        cache.share()

    for step in range(700):
        dice = rng.random()
        if dice < 0.4:
            session = int(rng.integers(30))
            prompt = said[session, : int(rng.integers(1, 600))].copy()
            prompt[-1] = rng.integers(1, 4)
            limit = len(prompt) + (int(rng.integers(1, 900)) if step % 7 == 0 else 10)
            row = cache.acquire(str(session), prompt, limit)
            if row is not None:
                row.ids[len(prompt) :] = 1
                assert row.fed < len(prompt) and (row.ids[: len(prompt)] == prompt).all()
                np.testing.assert_array_equal(held(row), prompt[: row.fed] + 10 * version)
                running.append(row)
                waited += row.source is not None
                took += row.source is None and row.fed > 0
        elif dice < 0.6:
            forward()
        elif dice < 0.62:
            version += 1
            cache.weights_changed()
        elif running:
            cache.release(running.pop(int(rng.integers(len(running)))), keep=True)
        keys, _ = cache.layer(0, like, like)
        assert keys.shape[0] * keys.shape[2] <= 8192 and len({row.at for row in running}) == len(running)
        for row in running:
            assert row.source is None or (row.source in running and row.source.source is None)
            there = held(row)
            np.testing.assert_array_equal(there % 10, row.ids[: row.fed])
            assert row.stale or (there // 10 == version).all()
    assert waited > 20 and took > 20, "too little was shared to prove anything"
