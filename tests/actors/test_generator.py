"""A replica is as alive as its engine, and what it holds is what was sent, or nobody hears a token of it."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from troupe.actors import transfer
from troupe.actors.generator import Generator
from troupe.actors.simulated import Simulation
from troupe.protocol.checksum import checksum_of
from troupe.protocol.errors import ActorLost, CheckpointError, NotReady, RemoteError, TimedOut
from troupe.protocol.messages import Drain, Generate, Generated, Ping, Sampling, Weights

W = {"w": np.arange(4, dtype=np.float32)}


class Slow:
    """A token a second. A load takes effect after two seconds and is summed for two more, as on an engine that samples
    meanwhile; `damage` is added to what it then holds."""

    def __init__(self, damage: dict[int, float]) -> None:
        self.version, self.damage = -1, damage

    async def start(self) -> None:
        return

    async def generate(self, request: Generate) -> Generated:
        versions = []
        for _ in range(request.sampling.max_tokens):
            await asyncio.sleep(1.0)
            versions.append(self.version)
        n = len(versions)
        return Generated(np.zeros(n, np.int32), np.zeros(n, np.float32), np.asarray(versions, np.int32), "stop")

    async def load_weights(self, version: int, tensors: Any) -> str:
        await asyncio.sleep(2.0)
        held = {name: array + np.float32(self.damage.get(version, 0.0)) for name, array in tensors.items()}
        self.version = version
        await asyncio.sleep(2.0)
        return checksum_of(held)

    def stats(self) -> dict[str, float]:
        return {}


def play(
    work: Callable[[Any, Callable[[int], Weights]], Awaitable[Any]],
    damage: dict[int, float] | None = None,
    kind: type[Slow] = Slow,
) -> Any:
    """Lets `work(generator, weights)` play with one replica; `weights(version)` are the learner's."""
    with Simulation(1) as simulation:

        async def main(context: Any) -> Any:
            await context.spawn("generator-0", Generator, make_engine=lambda name: kind(damage or {}))
            way = transfer.ObjectStore(context.blobs, "")
            generator = context.ref("generator-0", Generator)
            return await work(generator, lambda v: Weights(v, checksum_of(W), way.send(v, W)))

        return simulation.run(main)


def ask(tokens: int) -> Generate:
    return Generate("r", "s", np.zeros(3, np.int32), Sampling(max_tokens=tokens))


def test_a_replica_takes_no_work_before_it_has_proved_weights():
    async def work(generator: Any, weights: Any) -> None:
        with pytest.raises(NotReady, match="generator-0 has not proved its weights"):
            await generator.generate(ask(1))
        await generator.load_weights(weights(0))
        assert (await generator.generate(ask(1))).versions.tolist() == [0]
        with pytest.raises(CheckpointError, match="the replica must be replaced"):
            await generator.load_weights(weights(1))
        with pytest.raises(NotReady, match="generator-0 has not proved its weights"):
            await generator.generate(ask(1))

    play(work, damage={1: 0.5})


@pytest.mark.parametrize("later", [1, 2])
def test_a_proof_that_failed_is_not_made_good_by_a_later_one(later: int) -> None:
    """Its answer may be lost, and whoever waits for it then asks again; a turn has tokens of the damaged weights by then."""

    class Once(Slow):
        async def load_weights(self, version: int, tensors: Any) -> str:
            held = await super().load_weights(version, tensors)
            self.damage.pop(version, None)
            return held

    async def work(generator: Any, weights: Any) -> None:
        await generator.load_weights(weights(0))
        lost = asyncio.ensure_future(generator.load_weights(weights(1)))
        across = asyncio.ensure_future(generator.generate(ask(9)))
        with pytest.raises(CheckpointError):
            await lost
        with pytest.raises(CheckpointError, match="the replica must be replaced"):
            await generator.load_weights(weights(later))
        with pytest.raises(NotReady, match="weights that it could not prove"):
            await across

    play(work, damage={1: 0.5}, kind=Once)


@pytest.mark.parametrize("held", ["the one", "another"])
def test_an_adapter_is_proved_over_the_base_that_it_was_trained_over(held: str) -> None:
    class Based(Slow):
        base = held

    async def work(generator: Any, weights: Any) -> None:
        sent = replace(weights(0), base="the one")
        if held == "the one":
            await generator.load_weights(sent)
        else:
            with pytest.raises(CheckpointError, match=r"an adapter over the base another .* the one"):
                await generator.load_weights(sent)

    play(work, kind=Based)


@pytest.mark.parametrize("holds", ["what was sent", "one wrong tensor"])
def test_what_is_sampled_before_the_proof_waits_for_it_and_is_lost_with_it(holds):
    async def work(generator: Any, weights: Any) -> None:
        await generator.load_weights(weights(0))
        loading = asyncio.ensure_future(generator.load_weights(weights(1)))
        across = asyncio.ensure_future(generator.generate(ask(3)))  # its last token is of version 1, which is not proved then
        await asyncio.sleep(3.6)
        assert not across.done() and not loading.done()
        if holds == "what was sent":
            assert (await across).versions.tolist() == [0, 0, 1] and (await loading).version == 1
        else:
            with pytest.raises(CheckpointError):
                await loading
            with pytest.raises(NotReady, match="'r' with weights that it could not prove"):
                await across

    play(work, damage={1: 0.5} if holds == "one wrong tensor" else None)


def test_an_answer_of_proved_weights_does_not_wait_for_a_proof():
    async def work(generator: Any, weights: Any) -> None:
        await generator.load_weights(weights(0))
        loading = asyncio.ensure_future(generator.load_weights(weights(1)))
        assert (await generator.generate(ask(1))).versions.tolist() == [0] and not loading.done()
        await loading

    play(work)


def test_a_replica_that_drains_finishes_what_it_runs_and_takes_nothing_new():
    async def work(generator: Any, weights: Any) -> None:
        await generator.load_weights(weights(0))
        running = asyncio.ensure_future(generator.generate(ask(5)))
        await asyncio.sleep(1.0)
        assert (await generator.drain(Drain())).load == 1
        with pytest.raises(NotReady, match="generator-0 takes no more requests"):
            await generator.generate(ask(1))
        assert (await running).finish == "stop"
        assert (await generator.health(Ping())).load == 0

    play(work)


class GoneEngine:
    """Finds its server gone in one of its methods."""

    def __init__(self, method: str, error: Exception) -> None:
        self.version, self._gone, self._error = -1, method, error

    async def start(self) -> None:
        return

    async def generate(self, request: Generate) -> Generated:
        raise self._error

    async def load_weights(self, version: int, tensors: Any) -> str:
        if self._gone == "load_weights":
            raise self._error
        self.version = version
        return checksum_of(tensors)


@pytest.mark.parametrize(
    ("method", "error"),
    [
        ("generate", ActorLost("the server was killed")),
        ("generate", RemoteError("the server was killed")),
        ("load_weights", ActorLost("the server was killed")),
        ("load_weights", RemoteError("the server was killed")),
        ("load_weights", TimedOut("the server was killed")),
    ],
)
def test_an_engine_that_is_gone_takes_its_generator_with_it(method: str, error: Exception) -> None:
    with Simulation(3) as simulation:

        async def main(context: Any) -> str:
            await context.spawn("generator-0", Generator, make_engine=lambda name: GoneEngine(method, error))
            generator = context.ref("generator-0", Generator)
            weights = Weights(1, checksum_of(W), transfer.ObjectStore(context.blobs, "").send(1, W))
            if method == "load_weights":
                with pytest.raises(ActorLost):
                    await generator.load_weights(weights)
            else:
                await generator.load_weights(weights)
                with pytest.raises(ActorLost):
                    await generator.generate(ask(1))
            assert not await context.exists("generator-0")
            return str(await context.watch("generator-0"))

        simulation.run(main)
