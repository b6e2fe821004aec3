"""What the contract tests share: the engines under test, small models, and what plain transformers says of them.

A new engine joins by an entry in `ENGINES`. The tests assume nothing of it but `base.Engine`: no private attribute, no
timing, no number of tokens in a piece.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model
from transformers import DynamicCache, LlamaConfig, LlamaForCausalLM, Qwen3Config, Qwen3ForCausalLM

from tests.actors.engines.servers import SGLANG, VLLM, SharedSGLang, SharedVLLM
from troupe.actors.engines.base import Engine, Piece
from troupe.actors.engines.local import LocalEngine
from troupe.learner.model import tensors_of
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
PATIENCE_S = 120.0


@dataclass(frozen=True)
class Kind:
    """An engine under test.

    make: from a function that makes the model, and limits by the names that `LocalEngine` has, to an engine that is not
    started; a limit that it does not know it ignores. atol: of a float32 logprob, against plain transformers. rough: how many
    times as far as transformers' bfloat16 logprobs may be from the exact ones, in root mean square. marks: of its tests.
    elsewhere: why a test (its pytest node) is not one for this engine; "" where it is.
    """

    make: Callable[..., Engine]
    atol: float = 1e-4
    rough: float = 2.0
    marks: tuple[pytest.MarkDecorator, ...] = ()
    elsewhere: Callable[[Any], str] = lambda node: ""


def llama(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).eval()


def qwen3(seed: int) -> torch.nn.Module:
    torch.manual_seed(seed)
    return Qwen3ForCausalLM(Qwen3Config(**SIZES)).eval()


def llama_with_lora(seed: int) -> torch.nn.Module:
    base = llama(99)
    torch.manual_seed(seed)
    model = get_peft_model(base, LoraConfig(r=4, target_modules=["q_proj", "v_proj"], init_lora_weights=False))
    return model.eval()


def cast(model: torch.nn.Module, dtype: torch.dtype) -> torch.nn.Module:
    """The model in another dtype; adapters stay in float32 over any base, as the learner has them."""
    model.to(dtype)
    for name, parameter in model.named_parameters():
        if ".lora_" in name:
            parameter.data = parameter.data.float()
    return model


MODELS: dict[str, Callable[[int], torch.nn.Module]] = {"llama": llama, "qwen3": qwen3, "llama_with_lora": llama_with_lora}

_SERVED_ELSEWHERE = {
    "sglang": {
        "top_k_and_top_p": "SGLang means another distribution by both together; test_sglang.py: they are refused",
        "test_weights_that_diverged_are_an_error_not_a_token": "it ends the server, which others share; see test_sglang.py",
    },
    "vllm": {
        "test_weights_that_diverged_are_an_error_not_a_token": "its keys and values keep what is no number, which others "
        "share; see test_vllm.py",
    },
}


def _elsewhere(engine: str, node: Any) -> str:
    """Why this promise is not checked here for an engine in another process."""
    params = node.callspec.params
    both = {"top_k", "top_p"} <= set(params.get("sampling", ()))
    what = "top_k_and_top_p" if both else node.originalname
    return _SERVED_ELSEWHERE[engine].get(what, "")


ENGINES: dict[str, Kind] = {
    "local": Kind(LocalEngine),
    "sglang": Kind(SharedSGLang, marks=SGLANG.alone, elsewhere=partial(_elsewhere, "sglang")),
    # Its attention for CPUs rounds more the more keys there are.
    "vllm": Kind(SharedVLLM, rough=8.0, marks=VLLM.alone, elsewhere=partial(_elsewhere, "vllm")),
}


# -- an engine and its requests ----------------------------------------------------------------------------------------


@asynccontextmanager
async def started(kind: Kind, model: torch.nn.Module | None = None, build: Any = llama, **limits: Any) -> AsyncIterator[Engine]:
    """An engine that has `model` as version 1; its own copy began as another one."""
    engine = kind.make(lambda: build(12345), **limits)
    await engine.start()
    try:
        if model is not None:
            await engine.load_weights(1, tensors_of(model))
        yield engine
    finally:
        await engine.close()


def must(engine: Engine, able: bool, what: str) -> None:
    """Skips the test if the engine does not claim to be able to do `what`."""
    if not able:
        pytest.skip(f"engine '{engine.capabilities.name}' does not claim to {what}")


def request(prompt: Any, *, name: str = "r", session: str = "", seed: int = 0, **sampling: Any) -> Generate:
    return Generate(name, session, np.asarray(prompt, np.int32), Sampling(**sampling), seed)


async def sampled(engine: Engine, n: int) -> None:
    """Returns when the engine has sampled `n` tokens more."""
    goal = engine.stats()["tokens"] + n
    while engine.stats()["tokens"] < goal:
        await asyncio.sleep(0.001)


def random_ids(rng: np.random.Generator, n: int) -> np.ndarray[Any, Any]:
    return rng.integers(0, VOCABULARY, n).astype(np.int32)


def joined(pieces: Sequence[Piece]) -> Generated:
    """What `generate` would have returned."""
    assert [piece.finish for piece in pieces[:-1]] == [None] * (len(pieces) - 1) and pieces[-1].finish is not None
    return Generated(
        np.concatenate([piece.tokens for piece in pieces]),
        np.concatenate([piece.logprobs for piece in pieces]),
        np.concatenate([piece.versions for piece in pieces]),
        pieces[-1].finish,
    )


class Running:
    """A request that is streamed from now on."""

    def __init__(self, engine: Engine, asked: Generate) -> None:
        self.prompt = asked.prompt
        self.versions: list[int] = []
        self._more = asyncio.Event()
        self._task = asyncio.ensure_future(self._collect(engine.stream(asked)))
        self._task.add_done_callback(lambda _: self._more.set())

    @property
    def sampled(self) -> int:
        """Tokens that have come."""
        return len(self.versions)

    @property
    def over(self) -> bool:
        return self._task.done()

    async def has(self, n: int, version: int | None = None) -> None:
        """Returns when `n` tokens (of that version) have come, or the end."""
        while not self._task.done() and (self.sampled if version is None else self.versions.count(version)) < n:
            self._more.clear()
            await asyncio.wait_for(self._more.wait(), PATIENCE_S)

    async def end(self) -> Generated:
        return await asyncio.wait_for(self._task, PATIENCE_S)

    async def _collect(self, stream: AsyncIterator[Piece]) -> Generated:
        pieces = []
        async for piece in stream:
            pieces.append(piece)
            self.versions += piece.versions.tolist()
            self._more.set()
        return joined(pieces)


# -- what plain transformers says --------------------------------------------------------------------------------------


@torch.no_grad()
def logits_of(model: torch.nn.Module, prompt: Any, tokens: Any) -> torch.Tensor:
    """Logits that plain transformers gives for the distribution of each of `tokens`, shape [k, vocabulary]."""
    ids = torch.tensor(np.concatenate([prompt, tokens]), dtype=torch.int64)
    return model(input_ids=ids[None]).logits[0, len(prompt) - 1 : -1].float()


@torch.no_grad()
def logits_across(models: Mapping[int, torch.nn.Module], prompt: Any, got: Generated) -> torch.Tensor:
    """The same where weights change under a request that keeps its keys and values: each id is fed to the weights that
    sample what comes after it, on top of what the earlier weights computed for the ids before it."""
    ids = torch.tensor(np.concatenate([prompt, got.tokens[:-1]]), dtype=torch.int64)
    versions = np.concatenate([np.repeat(got.versions[:1], len(prompt) - 1), got.versions])  # of the weights that read each
    cuts = [0, *(np.flatnonzero(np.diff(versions)) + 1), len(ids)]
    cache, logits = DynamicCache(), []
    for begin, end in pairwise(cuts):
        model = models[int(versions[begin])]
        logits.append(model(input_ids=ids[None, begin:end], past_key_values=cache, use_cache=True).logits[0].float())
    return torch.cat(logits)[len(prompt) - 1 :]


def logprobs_of(logits: torch.Tensor, tokens: Any, temperature: float = 1.0) -> np.ndarray[Any, Any]:
    chosen = (logits / temperature).log_softmax(-1).gather(-1, torch.tensor(tokens, dtype=torch.int64)[:, None])
    logprobs: np.ndarray[Any, Any] = chosen[:, 0].numpy()
    return logprobs


def assert_true(kind: Kind, model: torch.nn.Module, prompt: Any, got: Generated, temperature: float = 1.0) -> None:
    assert len(got.tokens) == len(got.logprobs) == len(got.versions)
    expected = logprobs_of(logits_of(model, prompt, got.tokens), got.tokens, temperature)
    np.testing.assert_allclose(got.logprobs, expected, atol=kind.atol)
