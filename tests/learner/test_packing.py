"""Packed rows say the same as each sequence alone, for any model family we can try, and rows are filled well."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from troupe.learner import packing
from troupe.learner.config import LoraSettings, ModelConfig
from troupe.learner.errors import BatchError
from troupe.learner.model import load
from troupe.learner.packing import logprobs, pack, prepare, rows_of, trainable

CPU = torch.device("cpu")
LENGTHS = (7, 1, 30, 2, 12, 50)


def sequences(temperature: float = 1.0) -> list[packing.Trainable]:
    rng = np.random.default_rng(0)
    made, first = [], 0
    for n in LENGTHS:
        mask = rng.random(n) < 0.5
        mask[0] = False
        made.append(trainable(rng.integers(0, 260, n), mask, first=first, temperature=temperature))
        first += len(made[-1].at)
    return made


def alone(model: torch.nn.Module, temperature: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Logprobs and entropies from the library's own forward pass, one sequence at a time."""
    lps, entropies = [], []
    for s in sequences():
        ids = torch.from_numpy(s.tokens).long()[None]
        logits = model(input_ids=ids).logits[0].float()
        lp = (logits / temperature).log_softmax(-1)
        whole = logits.log_softmax(-1)
        lps.append(lp[s.at - 1, ids[0, s.at]])
        entropies.append(-(whole.exp() * whole).sum(-1)[s.at - 1])
    return torch.cat(lps), torch.cat(entropies)


@pytest.mark.parametrize("lora", [None, LoraSettings(rank=4)])
@pytest.mark.parametrize("change", [{}, {"num_key_value_heads": 1}, {"model_type": "mistral", "sliding_window": 5}])
def test_packed_logprobs_equal_those_of_single_sequences(
    tiny: str, tmp_path: Path, change: dict[str, object], lora: LoraSettings | None
) -> None:
    config = json.loads((Path(tiny) / "config.json").read_text())
    config.update(change)
    config["architectures"] = ["MistralForCausalLM" if "model_type" in change else "LlamaForCausalLM"]
    (tmp_path / "config.json").write_text(json.dumps(config))
    model = load(ModelConfig(path=str(tmp_path), lora=lora), seed=3)
    with torch.no_grad():
        for p in model.parameters():
            p.add_(torch.randn(p.shape, generator=torch.Generator().manual_seed(1)) * 0.1)  # larger logits, live adapters
        expected, spread = alone(model, 0.7)
        parts = prepare(model)
        for capacity in (1, 40, 1000):
            got, entropy = torch.zeros_like(expected), torch.zeros_like(expected)
            for row in rows_of(sequences(0.7), capacity, CPU):
                got[row.where], entropy[row.where] = logprobs(parts, row, entropy="measure")
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)
            torch.testing.assert_close(entropy, spread, rtol=1e-4, atol=1e-5)


def test_chunked_logits_have_the_same_gradients(tiny: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def gradient() -> torch.Tensor:
        model = load(ModelConfig(path=tiny), seed=3)
        parts = prepare(model)
        for row in rows_of(sequences(), 1000, CPU):
            lp, entropy = logprobs(parts, row, entropy="train")
            (lp.sum() + entropy.sum()).backward()
        return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])

    whole = gradient()
    monkeypatch.setattr(packing, "_LOGITS_AT_ONCE", 300 * 7)
    torch.testing.assert_close(gradient(), whole, rtol=1e-4, atol=1e-6)


@settings(deadline=None)
@given(st.lists(st.integers(1, 300), max_size=60), st.integers(1, 256))
def test_rows_hold_each_sequence_once_and_no_more_than_fits(lengths: list[int], capacity: int) -> None:
    rows = pack(lengths, capacity)
    assert sorted(i for row in rows for i in row) == list(range(len(lengths)))
    for row in rows:
        assert len(row) == 1 or sum(lengths[i] for i in row) <= capacity
    sums = sorted(sum(lengths[i] for i in row) for row in rows)
    assert len(sums) < 2 or sums[0] + sums[1] > capacity  # no two rows could have been one


def test_positions_restart_with_each_sequence() -> None:
    """Rotary embeddings would not notice, but the context's length and scaled embeddings would."""
    (row,) = rows_of(sequences(), 1000, CPU)
    expected = np.concatenate([np.arange(n) for n in row.lengths])
    np.testing.assert_array_equal(row.positions[0].numpy(), expected)


def test_a_token_that_nothing_predicts_is_refused() -> None:
    with pytest.raises(BatchError, match="nothing comes before it"):
        trainable([1, 2], [True, False])
