"""How long new weights take from the learner to the generators, and how long sampling stands still for them.

    python bench/weights.py [--quick] [--only CASE]

One JSON line a case: {"name", "value", "unit", "compared_with", "context"}. Medians over the rounds; the ways take turns.

sync_seconds_500mb: 538 MB of float32 from one learner process to two generator processes on real Ray, from the learner's call
until both have answered with the checksum of what they hold. Beside it the same with a dict of torch tensors through the object
store and `load_state_dict`, summed likewise, with files (`generator.transfer = "disk"`), and from process to process ("gloo").
generation_pause_ms_small, generation_pause_ms_500mb: the embedded engine with 64 requests that sample; the time between the two
tokens of a request between which the weights change, beside the median time between two tokens, and beside what it takes to
copy and sum the weights, which a change in place would stand still for. One thread. Memory: below 6 GB.
"""

from __future__ import annotations

import asyncio
import json
import logging
import os
import statistics
import sys
import tempfile
import time
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, cast

os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import typer
from transformers import LlamaConfig

from troupe.actors import transfer
from troupe.actors.context import Context
from troupe.actors.engines.local import LocalEngine
from troupe.actors.generator import Generator
from troupe.cluster.launch import ray_session
from troupe.learner.config import ModelConfig
from troupe.learner.model import load, load_tensors, tensors_of
from troupe.protocol.checksum import checksum_of
from troupe.protocol.messages import Announce, Generate, Sampling, Weights, WeightsHeld

SIZES: dict[str, dict[str, int]] = {
    "small": {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 344, "num_hidden_layers": 4},
    "500mb": {"vocab_size": 49_152, "hidden_size": 576, "intermediate_size": 1536, "num_hidden_layers": 30},
}
HEADS = {"small": (4, 4), "500mb": (9, 3)}
RUNNING, PROMPT, TOKENS = 64, 8, 240
CASES = ("sync_seconds_500mb", "generation_pause_ms_small", "generation_pause_ms_500mb")


def main(quick: bool = typer.Option(False, help="fewer repetitions"), only: str = typer.Option("", help="one case")) -> None:
    if only not in ("", *CASES):
        raise typer.BadParameter(f"no case '{only}': choose one of {', '.join(CASES)}")
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        for case in [name for name in CASES if only in ("", name)]:
            size = case.rpartition("_")[2]
            config = ModelConfig(path=str(_model(Path(folder) / size, size)))
            print(f"{case} …", file=sys.stderr)
            before = os.getloadavg()[0]
            run = (
                _sync(config, Path(folder), 2 if quick else 7) if case.startswith("sync") else _pause(config, 2 if quick else 7)
            )
            line = {"name": case, **asyncio.run(run)}
            line["context"] |= {"load_before": round(before, 1)}
            print(json.dumps(line), flush=True)


def _model(folder: Path, size: str) -> Path:
    """A folder from which the model is made with random weights."""
    heads, shared = HEADS[size]
    tied = size == "500mb"
    sizes = {**SIZES[size], "num_attention_heads": heads, "num_key_value_heads": shared, "max_position_embeddings": 1024}
    LlamaConfig(**sizes, tie_word_embeddings=tied).save_pretrained(folder)
    return folder


# -- how long they take ----------------------------------------------------------------------------------------------


class Source:
    """The learner's end. Each version differs from the one before in every tensor."""

    def __init__(self, context: Context, config: ModelConfig, outbox: str) -> None:
        self._context = context
        self._tensors = {name: array.copy() for name, array in tensors_of(load(config, seed=0)).items()}
        self._ways = {name: make(context.blobs, outbox) for name, make in transfer.WAYS.items()}
        self._sent: Weights | None = None

    async def object_store(self, message: Announce) -> Weights:
        return await self._send("object_store", message.version)

    async def disk(self, message: Announce) -> Weights:
        return await self._send("disk", message.version)

    async def gloo(self, message: Announce) -> Weights:
        return await self._send("gloo", message.version)

    async def torch_dict(self, message: Announce) -> Weights:
        self._sent = None
        checksum = await asyncio.to_thread(checksum_of, self._tensors)
        tensors = {name: torch.from_numpy(array) for name, array in self._tensors.items()}
        self._sent = Weights(message.version, checksum, await asyncio.to_thread(self._context.blobs.put, tensors))
        return self._sent

    async def _send(self, way: str, version: int) -> Weights:
        self._sent = None
        self._sent = await transfer.pack(self._context.blobs, self._ways[way], version, self._tensors)
        return self._sent

    async def change(self, message: Announce) -> None:
        for array in self._tensors.values():
            array.flat[0] = message.version


class Replica(Generator):
    """A generator that can also load as one would without Troupe."""

    async def load_torch(self, message: Weights) -> WeightsHeld:
        model = cast("Any", self._engine)._stepper.model
        state = await self._context.blobs.get(message.tensors)

        def take() -> str:
            model.load_state_dict(state, strict=False)  # tied ones are sent once
            return checksum_of(tensors_of(model))

        held = await asyncio.to_thread(take)
        assert held == message.checksum
        return WeightsHeld(self._context.name, message.version, held)


def _engine(name: str, config: ModelConfig) -> LocalEngine:
    return LocalEngine(partial(load, config, seed=1), generator_name=name)


async def _sync(config: ModelConfig, folder: Path, rounds: int) -> dict[str, Any]:
    from troupe.actors.host import RayContext

    logging.getLogger("ray").setLevel(logging.ERROR)
    seconds: dict[str, list[float]] = {"object_store": [], "torch_dict": [], "disk": [], "gloo": []}
    with ray_session(None, "bench-weights"):
        context = RayContext.launch("bench-weights", seed=0)
        replicas: list[Any] = [context.ref(f"generator-{n}", Replica) for n in range(2)]
        source: Any = context.ref("learner", Source)
        await context.spawn("learner", Source, config=config, outbox=str(folder / "weights"))
        for replica in ("generator-0", "generator-1"):
            await context.spawn(replica, Replica, make_engine=partial(_engine, config=config))
        size = version = 0
        for number in range(rounds + 1):
            for way, taken in seconds.items():
                version += 1
                await source.change(Announce(version))
                began = time.perf_counter()
                weights = await getattr(source, way)(Announce(version))
                await asyncio.gather(*((r.load_torch if way == "torch_dict" else r.load_weights)(weights) for r in replicas))
                if number:  # the first is for warming up
                    taken.append(time.perf_counter() - began)
                size = weights.size or size
                del weights
    median = {way: round(statistics.median(taken), 2) for way, taken in seconds.items()}
    spread = {f"{way}_spread_s": [round(min(taken), 2), round(max(taken), 2)] for way, taken in seconds.items()}
    return {
        "value": median["object_store"],
        "unit": "s",
        "compared_with": "a dict of torch tensors through the object store",
        "context": {
            "torch_dict_s": median["torch_dict"],
            "disk_s": median["disk"],
            "gloo_s": median["gloo"],
            **spread,
            "mb": round(size / 1e6),
            "tensors": len(tensors_of(load(config, seed=0))),
            "generators": 2,
            "rounds": rounds,
            "cores": os.cpu_count(),
        },
    }


# -- how long sampling stands still ----------------------------------------------------------------------------------


async def _pause(config: ModelConfig, rounds: int) -> dict[str, Any]:
    steps: list[tuple[float, int]] = []  # when a forward pass was done, and the version in use by then
    model = load(config, seed=1)
    engine = LocalEngine(lambda: model, max_running=RUNNING, max_cached_tokens=RUNNING * (PROMPT + TOKENS))
    model.register_forward_hook(lambda *_: steps.append((time.perf_counter(), engine.version)))
    await engine.start()
    tensors = {name: array.copy() for name, array in tensors_of(load(config, seed=2)).items()}
    await engine.load_weights(0, tensors)
    dice = np.random.default_rng(0)
    alone, loads = await asyncio.to_thread(_in_place, load(config, seed=3), tensors, rounds), []

    async def sample() -> None:
        while True:
            await asyncio.gather(
                *(
                    engine.generate(
                        Generate(
                            f"r{i}", "", dice.integers(1, 500, PROMPT).astype(np.int32), Sampling(max_tokens=TOKENS), seed=i
                        )
                    )
                    for i in range(RUNNING)
                )
            )

    async def stepped(count: int) -> None:
        until = len(steps) + count
        while len(steps) < until:
            await asyncio.sleep(0.0005)

    sampling = asyncio.ensure_future(sample())
    for version in range(1, rounds + 1):
        await stepped(8)
        began = time.perf_counter()
        await engine.load_weights(version, tensors)
        loads.append((began, time.perf_counter()))
        await stepped(3)
    sampling.cancel()
    await asyncio.gather(sampling, return_exceptions=True)
    await engine.close()

    gaps = [(at - before, at, old, new) for (before, old), (at, new) in pairwise(steps)]
    changes = [gap for gap, _, old, new in gaps if 0 <= old < new]
    during = [gap for gap, at, old, new in gaps if old == new and any(began < at <= ended for began, ended in loads)]
    calm = [gap for gap, at, *_ in gaps if not any(began < at <= ended + gap for began, ended in loads)]
    assert len(changes) == rounds
    ms = {
        name: round(1000 * statistics.median(values), 2)
        for name, values in {"pause": changes, "gap": calm, "alone": alone, "during": during or calm}.items()
    }
    return {
        "value": ms["pause"],
        "unit": "ms",
        "compared_with": "median time between two tokens",
        "context": {
            "median_gap_ms": ms["gap"],
            "longest_change_ms": round(1000 * max(changes), 2),
            "median_gap_while_weights_are_copied_ms": ms["during"],
            "copy_and_sum_ms": ms["alone"],
            "mb": round(sum(array.nbytes for array in tensors.values()) / 1e6, 1),
            "running": RUNNING,
            "changes": rounds,
            "cores": os.cpu_count(),
        },
    }


def _in_place(model: torch.nn.Module, tensors: dict[str, np.ndarray[Any, Any]], rounds: int) -> list[float]:
    """Seconds to copy into the model's own parameters and sum them: what a change in place stands still for."""
    taken = []
    for _ in range(rounds):
        began = time.perf_counter()
        load_tensors(model, tensors)
        checksum_of(tensors_of(model))
        taken.append(time.perf_counter() - began)
    return taken


if __name__ == "__main__":
    typer.run(main)
