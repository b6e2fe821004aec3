"""New weights from this process straight into a real SGLang server's, and what becomes of both when the learner is lost."""

import asyncio
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.actors.engines.servers import SGLANG, SharedSGLang
from tests.actors.engines.suite import ENGINES, assert_true, llama, random_ids, request, sampled
from troupe.actors import collective
from troupe.actors.collective import Collective
from troupe.actors.line import Offer
from troupe.learner.model import tensors_of
from troupe.protocol.checksum import checksum_of
from troupe.protocol.errors import CheckpointError, NotReady, TroupeError
from troupe.protocol.messages import Blob, Generated

KIND = ENGINES["sglang"]


class Put:
    def put(self, value: Any) -> Blob:
        return Blob(value)

    async def get(self, blob: Blob) -> Any:
        return blob.ref


class Sender:
    """A learner's end of the way, in this process."""

    def __init__(self) -> None:
        self.way = Collective("gloo", Put())

    async def offer(self, version: int, model: Any) -> Offer:
        return await self.offered(version, {name: array.copy() for name, array in tensors_of(model).items()})

    async def offered(self, version: int, tensors: Any) -> Offer:
        offer = (await asyncio.to_thread(self.way.send, version, tensors)).ref
        assert isinstance(offer, Offer)
        return offer


@pytest.fixture
def sender() -> Iterator[Sender]:
    made = Sender()
    yield made
    made.way.close()


@SGLANG
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
async def test_the_learner_sends_into_the_servers_own_process_amid_requests(sender: Sender, dtype: torch.dtype) -> None:
    old, new = llama(1).to(dtype), llama(2).to(dtype)
    exact = dtype == torch.float32
    engine = SharedSGLang(lambda: llama(0).to(dtype), transport="distributed")
    assert engine.capabilities.pulls
    await engine.start()
    try:
        prompt = random_ids(np.random.default_rng(3), 20)
        assert await engine.load_weights(1, await sender.offer(1, old)) == checksum_of(tensors_of(old))
        asked = [request(prompt, name=str(i), seed=i, max_tokens=100) for i in range(8)]
        calls = [asyncio.ensure_future(engine.generate(each)) for each in asked]
        await sampled(engine, 8 * 30)
        assert await engine.load_weights(2, await sender.offer(2, new)) == checksum_of(tensors_of(new))
        for got in await asyncio.gather(*calls):
            changed = int((got.versions == 1).sum())
            assert got.versions.tolist() == [1] * changed + [2] * (100 - changed) and changed >= 10
            if exact:
                first = Generated(got.tokens[:changed], got.logprobs[:changed], got.versions[:changed], got.finish)
                assert_true(KIND, old, prompt, first)
        got = await engine.generate(request(prompt, max_tokens=20))
        assert set(got.versions.tolist()) == {2}
        if exact:
            assert_true(KIND, new, prompt, got)
    finally:
        await engine.close()


@SGLANG
async def test_a_learner_that_is_gone_costs_the_engine_nothing_and_its_successor_gets_a_group_of_its_own(
    sender: Sender,
) -> None:
    old, new, other = llama(1), llama(2), llama(0)
    prompt = random_ids(np.random.default_rng(4), 20)
    engine = SharedSGLang(lambda: llama(0), transport="distributed")
    await engine.start()
    try:
        await engine.load_weights(1, await sender.offer(1, old))
        stale = await sender.offer(2, new)
        await sender.offer(3, new)
        with pytest.raises(NotReady, match="has no version 2: it is at version 3"):
            await engine.load_weights(2, stale)
        late = await sender.offer(4, new)
        sender.way.close()
        with pytest.raises(NotReady, match="cannot be reached"):
            await engine.load_weights(4, late)
        assert_true(KIND, old, prompt, await engine.generate(request(prompt, max_tokens=10)))
        assert engine.version == 1

        sender.way = Collective("gloo", Put())
        assert await engine.load_weights(5, await sender.offer(5, other)) == checksum_of(tensors_of(other))
        with pytest.raises(CheckpointError, match="weights are of another model"):
            await engine.load_weights(6, await sender.offered(6, {"w": np.zeros(3, np.float32)}))
        assert_true(KIND, other, prompt, await engine.generate(request(prompt, max_tokens=10)))
    finally:
        await engine.close()


@SGLANG
async def test_a_learner_that_dies_amid_its_sending_ends_the_engine_and_nobody_waits(sender: Sender, monkeypatch: Any) -> None:
    outgoing, engine = collective._outgoing, SharedSGLang(lambda: llama(0), transport="distributed")

    def half(tensors: Any, backend: str) -> Any:
        for n, tensor in enumerate(outgoing(tensors, backend)):
            if n == 5:
                raise NotReady("killed")
            yield tensor

    await engine.start()
    try:
        await engine.load_weights(1, await sender.offer(1, llama(1)))
        monkeypatch.setattr(collective, "_outgoing", half)
        async with asyncio.timeout(60):
            with pytest.raises(TroupeError):
                await engine.load_weights(2, await sender.offer(2, llama(2)))
        with pytest.raises(TroupeError):
            await engine.generate(request(random_ids(np.random.default_rng(4), 20), max_tokens=10))
    finally:
        await engine.close()
