"""The embedded engine serves models of which it says what plain transformers says; the rest is refused at its start."""

import numpy as np
import pytest
import torch

from tests.actors.engines.suite import ENGINES, assert_true
from tests.learner.kinds import RIGHT, VOCABULARY, WRONG, maker
from troupe.actors.engines.local import LocalEngine
from troupe.learner import ranks
from troupe.learner.model import tensors_of
from troupe.protocol.errors import ConfigError, TaskFailed
from troupe.protocol.messages import Generate, Sampling

ELSEWHERE = {"diffllama"}
"""Right when packed, but not on top of kept keys and values: its attention asks for those of a layer twice."""


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", [*WRONG, *ELSEWHERE])
async def test_a_model_that_would_be_sampled_wrongly_is_refused_at_the_start(kind: str, dtype: torch.dtype) -> None:
    engine = LocalEngine(lambda: maker(kind, dtype)(0))
    fix = "set generator.engine = 'sglang' or 'vllm'"
    with pytest.raises(
        ConfigError, match=f"a {kind} model cannot be sampled by the embedded engine: {fix}.*\\(.+\\)"
    ) as refused:
        await engine.start()
    assert "\n" not in str(refused.value)
    await engine.close()


@pytest.mark.parametrize("kind", RIGHT)
async def test_a_model_that_is_served_says_what_plain_transformers_says(kind: str) -> None:
    make = maker(kind)
    engine = LocalEngine(lambda: make(0))
    await engine.start()
    await engine.load_weights(1, tensors_of(make(1)))
    rng = np.random.default_rng(0)
    for n in (3, 50):
        prompt = rng.integers(3, VOCABULARY, n).astype(np.int32)
        said = await engine.generate(Generate("r", "", prompt, Sampling(max_tokens=10)))
        assert_true(ENGINES["local"], make(1), prompt, said)
    await engine.close()


@pytest.mark.parametrize(
    ("kind", "context"), [("llama", 512), ("gpt2", 512), ("mistral", 300), ("gemma3_text", 300), ("phi3", 64)]
)
async def test_nothing_is_longer_than_what_a_model_reads_whole_and_in_any_company(kind: str, context: int) -> None:
    engine = LocalEngine(lambda: maker(kind)(0))
    await engine.start()
    await engine.load_weights(1, tensors_of(maker(kind)(1)))
    prompt = np.full(context - 1, 5, np.int32)
    said = await engine.generate(Generate("r", "", prompt, Sampling(max_tokens=10)))
    assert (len(said.tokens), said.finish) == (1, "length")
    with pytest.raises(TaskFailed, match=f"context of {context}"):
        await engine.generate(Generate("r", "", np.full(context, 5, np.int32), Sampling(max_tokens=10)))
    await engine.close()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU here: nothing is missing")
@pytest.mark.parametrize("device", ["cuda", "cuda:7"])
async def test_a_gpu_that_is_not_there_is_named_by_its_setting(device: str) -> None:
    engine = LocalEngine(lambda: maker("llama")(0), device=device)
    with pytest.raises(ConfigError, match=f"generator.device = '{device}', but torch sees 0 GPUs"):
        await engine.start()
    await engine.close()
    with pytest.raises(ConfigError, match=f"learner.device = '{device}', but torch sees 0 GPUs"):
        ranks.device(device)
