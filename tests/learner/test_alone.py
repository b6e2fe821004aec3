"""In which models sequences can be laid end to end: where they do not change each other; the rest is refused at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from peft import LoraConfig, get_peft_model

from tests.learner.kinds import LONGROPE, RIGHT, VOCABULARY, WRONG, maker
from troupe.learner import packing
from troupe.learner.packing import Trainable, logprobs, prepare, rows_of
from troupe.protocol.errors import ConfigError

DTYPES = [torch.float32, torch.bfloat16]


def grown(model: torch.nn.Module) -> torch.nn.Module:
    """With weights that make attention sharp."""
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10)
    return model


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", WRONG)
def test_a_model_whose_sequences_would_change_each_other_is_refused_before_it_learns(kind: str, dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError, match=f"a {kind} model cannot be trained on packed rows: train one .*\\(.+\\)") as refused:
        prepare(maker(kind, dtype)(0))
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("kind", RIGHT)
def test_a_model_that_is_taken_says_the_same_packed_and_alone(kind: str) -> None:
    make, rng = maker(kind), np.random.default_rng(0)
    longest = 64 if kind == "phi3" else 400  # longer than windows
    tokens = [rng.integers(3, VOCABULARY, n).astype(np.int32) for n in (20, longest, 7)]
    first, sequences = 0, []
    for t in tokens:
        sequences.append(Trainable(t, np.arange(1, len(t)), first))
        first += len(t) - 1
    plain, parts = make(3), prepare(make(3))
    found = torch.zeros(first)
    with torch.no_grad():
        for row in rows_of(sequences, 1000, torch.device("cpu")):
            found[row.where] = logprobs(parts, row)[0]
        for s in sequences:
            ids = torch.from_numpy(s.tokens).long()[None]
            expected = plain(input_ids=ids, use_cache=False).logits[0, :-1].float().log_softmax(-1)
            torch.testing.assert_close(found[s.where], expected.gather(1, ids[0, 1:, None])[:, 0], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("kind", ["llama", "qwen3_moe", "mixtral"])
def test_roundings_of_bfloat16_and_adapters_are_no_reason_to_refuse(kind: str) -> None:
    """Nor is an expert chosen otherwise."""
    make = maker(kind, torch.bfloat16)
    prepare(make(0))
    prepare(grown(make(1)))
    prepare(get_peft_model(make(0), LoraConfig(r=2, target_modules=["q_proj"])))


def test_a_neighbour_at_the_end_of_the_context_is_tried_too(monkeypatch: pytest.MonkeyPatch) -> None:
    """Were longrope's bound unknown, the short sequences would get the factors of the long one."""
    prepare(grown(maker("phi3")(0)))
    monkeypatch.setattr(packing, "reach", lambda config: config.max_position_embeddings)
    with pytest.raises(ConfigError, match="a phi3 model cannot be trained on packed rows"):
        prepare(grown(maker("phi3")(0)))


@pytest.mark.parametrize(
    ("config", "tokens"),
    [
        ({"max_position_embeddings": 512}, 512),
        ({"n_positions": 1024}, 1024),
        ({"max_position_embeddings": 512, "rope_parameters": LONGROPE}, 64),
        ({"max_position_embeddings": 512, "rope_scaling": {"type": "su"}, "original_max_position_embeddings": 128}, 128),
        ({"max_position_embeddings": 512, "rope_parameters": {"full_attention": LONGROPE}}, 64),
        ({"max_position_embeddings": 512, "rope_parameters": LONGROPE | {"rope_type": "yarn"}}, 512),
        ({"max_position_embeddings": 512, "attention_chunk_size": 256}, 256),
        ({}, None),
    ],
)
def test_how_far_a_model_reaches_is_said_by_its_config(config: dict[str, Any], tokens: int | None) -> None:
    assert packing.reach(config) == tokens
