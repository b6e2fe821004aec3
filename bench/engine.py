"""How fast the embedded engine samples, beside transformers' own `generate`, in one process and one run.

    python bench/engine.py [--quick] [--sglang-python PATH] [--vllm-python PATH]

One JSON line a case: {"name", "value", "unit", "compared_with", "context"}.

speedup_vs_generate_32: 32 requests of unequal length (prompt and answer), the same prompts, weights, number of sampled
tokens and threads for both. `generate` gets them as one left-padded batch and stops a row at its own length; it does not
report logprobs, which the engine does.
group_prefix_speedup: 8 groups, one after the other, of 8 requests that share a prompt of 400 tokens and sample 16 each: the
engine as it is, beside one that shares nothing between requests (`min_shared=0`).
turns_per_second_64: what a training step asks for: 64 sessions at once, each turn ~40 new prompt tokens and ~10 sampled.
turns_per_second_64_sglang, turns_per_second_64_vllm: the same of a server on the CPU, of the interpreter that is given.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
import typer
from transformers import StoppingCriteria

from troupe.actors.engines.base import Engine
from troupe.actors.engines.local import LocalEngine
from troupe.actors.engines.sglang import SGLangEngine
from troupe.actors.engines.vllm import VLLMEngine
from troupe.learner.config import ModelConfig
from troupe.learner.model import load, tensors_of
from troupe.learner.tiny import make_tiny
from troupe.protocol.messages import Generate, Sampling


def main(
    quick: bool = typer.Option(False, help="fewer repetitions"),
    sglang_python: str = typer.Option("", help="interpreter in which SGLang is installed"),
    vllm_python: str = typer.Option("", help="interpreter in which vLLM is installed"),
) -> None:
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        config = ModelConfig(path=str(make_tiny(Path(folder) / "model", ["the quick brown fox"])))
        model = load(config, seed=0)
        repetitions = 3 if quick else 9
        turns = asyncio.run(_run(model, lambda: load(config, seed=1), repetitions))
        if sglang_python:
            asyncio.run(_run_served("sglang", SGLangEngine(config, python=sglang_python), model, turns, repetitions))
        if vllm_python:
            asyncio.run(_run_served("vllm", VLLMEngine(config, python=vllm_python), model, turns, repetitions))


async def _run(model: Any, load_model: Any, repetitions: int) -> float:
    """Turns a second of the embedded engine."""
    engine, apart = LocalEngine(load_model), LocalEngine(load_model, min_shared=0)
    try:
        for each in engine, apart:
            await each.start()
            await each.load_weights(1, tensors_of(model))
        _print(**await _speedup(engine, model, repetitions))
        _print(**await _groups(engine, apart, model, repetitions))
        turns = await _turns(engine, model, repetitions)
        _print(**turns)
        return float(turns["value"])
    finally:
        await engine.close()
        await apart.close()


async def _run_served(name: str, engine: Engine, model: Any, embedded: float, repetitions: int) -> None:
    await engine.start()
    try:
        await engine.load_weights(1, tensors_of(model))
        line = await _turns(engine, model, repetitions)
        line["context"]["embedded_turns_per_s"] = embedded
        _print(**line | {"name": f"turns_per_second_64_{name}", "compared_with": "the embedded engine"})
    finally:
        await engine.close()


async def _speedup(engine: LocalEngine, model: Any, repetitions: int) -> dict[str, Any]:
    rng = np.random.default_rng(0)
    prompts = [rng.integers(5, model.config.vocab_size, n).astype(np.int32) for n in rng.integers(20, 300, 32)]
    lengths = rng.integers(8, 65, 32)
    tokens = int(lengths.sum())

    async def ours() -> None:
        results = await asyncio.gather(
            *(
                engine.generate(Generate(str(i), "", prompt, Sampling(max_tokens=int(n)), seed=i))
                for i, (prompt, n) in enumerate(zip(prompts, lengths, strict=True))
            )
        )
        assert sum(len(got.tokens) for got in results) == tokens

    longest = max(map(len, prompts))
    ids = torch.tensor(np.stack([np.pad(p, (longest - len(p), 0)) for p in prompts]), dtype=torch.int64)
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    ends = torch.tensor(longest + lengths)

    class AtItsLength(StoppingCriteria):
        def __call__(self, input_ids: torch.Tensor, scores: Any, **_: Any) -> Any:
            return input_ids.shape[1] >= ends

    def theirs() -> None:
        with torch.inference_mode():
            model.generate(
                input_ids=ids,
                attention_mask=mask,
                do_sample=True,
                top_k=0,
                max_new_tokens=int(lengths.max()),
                eos_token_id=None,
                pad_token_id=0,
                stopping_criteria=[AtItsLength()],
            )

    # Alternately, so that whatever else the machine does weighs on both; the best of each is what it can do.
    seconds: dict[str, list[float]] = {"ours": [], "theirs": []}
    for _ in range(repetitions + 1):
        began = time.perf_counter()
        await ours()
        between = time.perf_counter()
        theirs()
        seconds["ours"].append(between - began)
        seconds["theirs"].append(time.perf_counter() - between)
    best = {name: min(times[1:]) for name, times in seconds.items()}
    return {
        "name": "speedup_vs_generate_32",
        "value": round(best["theirs"] / best["ours"], 2),
        "unit": "x",
        "compared_with": "transformers generate, one left-padded batch",
        "context": {
            "tokens": tokens,
            "ours_tokens_per_s": round(tokens / best["ours"]),
            "generate_tokens_per_s": round(tokens / best["theirs"]),
            **_about(model),
        },
    }


async def _groups(shared: LocalEngine, apart: LocalEngine, model: Any, repetitions: int) -> dict[str, Any]:
    groups, members, prompt, answer = 8, 8, 400, 16
    rng = np.random.default_rng(0)
    best = {shared: float("inf"), apart: float("inf")}
    fed = dict.fromkeys(best, 0.0)
    for _ in range(repetitions + 1):  # the first of them warms up
        prompts = [rng.integers(5, model.config.vocab_size, prompt).astype(np.int32) for _ in range(groups)]
        for engine in best:
            fed[engine] = engine.stats()["fed"]
            began = time.perf_counter()
            for ids in prompts:
                asked = (Generate(str(i), "", ids, Sampling(max_tokens=answer), seed=i) for i in range(members))
                await asyncio.gather(*map(engine.generate, asked))
            best[engine] = min(best[engine], time.perf_counter() - began)
            fed[engine] = engine.stats()["fed"] - fed[engine]
    return {
        "name": "group_prefix_speedup",
        "value": round(best[apart] / best[shared], 2),
        "unit": "x",
        "compared_with": "the same engine without reuse between requests",
        "context": {
            "groups": groups,
            "members": members,
            "prompt": prompt,
            "answer": answer,
            "tokens_fed": round(fed[shared]),
            "tokens_fed_without": round(fed[apart]),
            "tokens_per_s": round(groups * members * answer / best[shared]),
            "tokens_per_s_without": round(groups * members * answer / best[apart]),
            **_about(model),
        },
    }


async def _turns(engine: Engine, model: Any, repetitions: int) -> dict[str, Any]:
    turns, sessions = 7, 64

    async def episode(name: str, seed: int) -> int:
        rng = np.random.default_rng(seed)
        prompt, sampled = rng.integers(5, model.config.vocab_size, 40).astype(np.int32), 0
        for turn in range(turns):
            settings = Sampling(max_tokens=int(rng.integers(8, 13)))
            got = await engine.generate(Generate(f"{name}/{turn}", name, prompt, settings, seed))
            sampled += len(got.tokens)
            prompt = np.concatenate([prompt, got.tokens, rng.integers(5, model.config.vocab_size, 40)]).astype(np.int32)
        await engine.end_session(name)
        return sampled

    best, sampled = float("inf"), 0
    for repetition in range(repetitions):
        began = time.perf_counter()
        counts = await asyncio.gather(*(episode(f"{repetition}-{i}", i) for i in range(sessions)))
        best, sampled = min(best, time.perf_counter() - began), sum(counts)
    return {
        "name": "turns_per_second_64",
        "value": round(sessions * turns / best),
        "unit": "turns/s",
        "compared_with": "",
        "context": {"sampled_tokens_per_s": round(sampled / best), "turns": turns, "longest": 350, **_about(model)},
    }


def _about(model: Any) -> dict[str, Any]:
    return {"parameters": model.num_parameters(), "dtype": str(model.dtype), "threads": torch.get_num_threads()}


def _print(**line: Any) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    typer.run(main)
