"""What every generation engine promises of its weights: proved by checksum, named by each token, changed between two."""

import asyncio
import copy
from typing import Any

import numpy as np
import pytest
import torch

from tests.actors.engines.suite import (
    Kind,
    Running,
    assert_true,
    cast,
    llama,
    llama_with_lora,
    logits_across,
    logits_of,
    logprobs_of,
    must,
    random_ids,
    request,
    started,
)
from troupe.actors.engines.base import Pause
from troupe.learner.model import tensors_of
from troupe.protocol.checksum import checksum_of
from troupe.protocol.errors import CheckpointError, RemoteError
from troupe.protocol.messages import Generated


@pytest.mark.parametrize(
    ("build", "dtype"),
    [(llama, torch.float32), (llama, torch.bfloat16), (llama_with_lora, torch.float32)],
    ids=["float32", "bfloat16", "lora"],
)
@pytest.mark.parametrize("mode", ["in_place", "retract"])
async def test_weights_that_change_under_64_requests_part_their_tokens_exactly(
    kind: Kind, mode: Pause, build: Any, dtype: torch.dtype
) -> None:
    """Each token is scored against both weights: it is its own version's to the last digit, and not the other's."""
    models = {version: cast(build(version), dtype) for version in (1, 2)}
    rng = np.random.default_rng(14)
    shared = random_ids(rng, 40)
    prompts = [np.concatenate([shared[: 40 * (i % 2)], random_ids(rng, 5 + i % 7)]) for i in range(64)]

    async with started(kind, models[1], lambda seed: cast(build(seed), dtype)) as engine:
        must(engine, mode in engine.capabilities.pauses, f"pause in mode '{mode}'")
        running = [Running(engine, request(p, name=str(i), seed=i, max_tokens=900)) for i, p in enumerate(prompts)]
        for i, one in enumerate(running):
            await one.has(1 + i % 16)
        await engine.pause(mode)
        await engine.load_weights(2, tensors_of(models[2]))
        await engine.resume()
        for one in running:
            await one.has(8, version=2)
        for i in range(64):
            await engine.abort(str(i))
        made = [await one.end() for one in running]

    changed = [int((got.versions == 1).sum()) for got in made]
    assert all(0 < k < len(got.tokens) for k, got in zip(changed, made, strict=True)), "not all requests saw the change"
    errors, theirs, wrong = [], [], []
    for prompt, got, k in zip(prompts, made, changed, strict=True):
        assert got.versions.tolist() == [1] * k + [2] * (len(got.tokens) - k) and len(got.tokens) == len(got.logprobs)
        for span in ({1, 2} if mode == "retract" else {0}) & {0, *got.versions.tolist()}:
            chosen = got.versions == span if span else slice(None)
            true, rough = (
                (logits_of(of[span], prompt, got.tokens) if span else logits_across(of, prompt, got))[chosen]
                for of in (_exactly(models), models)
            )
            said, tokens = got.logprobs[chosen], got.tokens[chosen]
            errors.append(said - logprobs_of(true, tokens))
            theirs.append(logprobs_of(rough, tokens) - logprobs_of(true, tokens))
        for version in {*got.versions.tolist()}:
            chosen = got.versions == version
            other = logprobs_of(logits_of(models[3 - version], prompt, got.tokens)[chosen], got.tokens[chosen])
            wrong.append(got.logprobs[chosen] - other)
    off, rounded = np.concatenate(errors), np.concatenate(theirs)
    if dtype == torch.float32:
        assert np.abs(off).max() <= kind.atol
    else:  # transformers rounds, too; the largest of a sample says little, so it may be twice as large again
        assert _size(off) <= kind.rough * _size(rounded) and np.abs(off).max() <= 2 * kind.rough * np.abs(rounded).max()
    assert np.median(np.abs(np.concatenate(wrong))) > 100 * kind.atol, "the two weights say the same: nothing is proved"


def _size(errors: Any) -> float:
    """Root mean square."""
    return float(np.sqrt(np.square(errors).mean()))


def _exactly(models: dict[int, torch.nn.Module]) -> dict[int, torch.nn.Module]:
    return {version: copy.deepcopy(model).float() for version, model in models.items()}


async def test_weights_change_without_a_pause_and_each_token_names_its_version(kind: Kind) -> None:
    old, new = llama(1), llama(2)
    prompt = random_ids(np.random.default_rng(8), 10)
    async with started(kind, old) as engine:
        first = await engine.generate(request(prompt, session="s", max_tokens=5))
        running = Running(engine, request(prompt, name="t", session="t", max_tokens=4000))
        await running.has(5)
        await engine.load_weights(2, tensors_of(new))
        assert engine.version == 2
        fresh = await engine.generate(request(prompt, session="s", max_tokens=5))
        await engine.abort("t")
        across = await running.end()

    assert first.versions.tolist() == [1] * 5
    assert_true(kind, old, prompt, first)
    changed = int((across.versions == 1).sum())
    assert 0 < changed < len(across.versions) < 4000
    assert across.versions.tolist() == [1] * changed + [2] * (len(across.versions) - changed)
    before = Generated(across.tokens[:changed], across.logprobs[:changed], across.versions[:changed], "abort")
    assert_true(kind, old, prompt, before)
    assert fresh.versions.tolist() == [2] * 5
    assert_true(kind, new, prompt, fresh)  # nothing that the old weights computed was used, for this session or the other


async def test_a_turn_that_saw_two_versions_leaves_nothing_to_the_next(kind: Kind) -> None:
    old, new = llama(1), llama(2)
    prompt = random_ids(np.random.default_rng(9), 10)
    async with started(kind, old) as engine:
        running = Running(engine, request(prompt, name="r", session="s", max_tokens=4000))
        await running.has(5)
        await engine.load_weights(2, tensors_of(new))
        await running.has(5, version=2)
        await engine.abort("r")
        said = await running.end()
        assert set(said.versions.tolist()) == {1, 2}
        longer = np.concatenate([prompt, said.tokens, [3, 4]])
        for session in "s", "t":
            assert_true(kind, new, longer, await engine.generate(request(longer, session=session, max_tokens=8)))


@pytest.mark.parametrize("build", [llama, llama_with_lora])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_the_checksum_is_of_what_the_engine_holds(kind: Kind, build: Any, dtype: torch.dtype) -> None:
    model = cast(build(1), dtype)

    async def go() -> None:
        async with started(kind, build=lambda seed: cast(build(seed), dtype)) as engine:
            shared = {name: array.copy() for name, array in tensors_of(model).items()}
            for array in shared.values():
                array.flags.writeable = False  # as from shared memory
            assert await engine.load_weights(4, shared) == checksum_of(tensors_of(model))
            assert engine.version == 4

    asyncio.run(go())


def test_weights_of_another_model_are_refused_and_the_old_ones_stay(kind: Kind) -> None:
    model = llama(1)

    async def go() -> Generated:
        async with started(kind, model) as engine:
            wrong = {name: array for name, array in tensors_of(llama(2)).items() if "norm" not in name}
            with pytest.raises(CheckpointError, match=r"norm\.weight"):
                await engine.load_weights(2, wrong)
            assert engine.version == 1
            return await engine.generate(request([5, 6, 7], max_tokens=5))

    got = asyncio.run(go())
    assert got.versions.tolist() == [1] * 5
    assert_true(kind, model, [5, 6, 7], got)


def test_weights_that_diverged_are_an_error_not_a_token(kind: Kind) -> None:
    model = llama(1)
    with torch.no_grad():
        model.get_input_embeddings().weight.fill_(float("nan"))

    async def go() -> None:
        async with started(kind, model) as engine:
            with pytest.raises(RemoteError, match="diverged"):
                await engine.generate(request([1, 2]))

    asyncio.run(go())
