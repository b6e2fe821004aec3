"""What the proof of a server's weights promises, on a model that fuses what it is sent, as servers do."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
import torch

from troupe.actors.engines.landing import SCALE, Weights
from troupe.learner.model import arrays_of
from troupe.protocol.checksum import checksum_of

Named = dict[str, torch.Tensor]


class Fused(torch.nn.Module):
    """q and k in one matrix, and a norm."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.qk = torch.nn.Parameter(torch.zeros(8, 6, dtype=dtype), requires_grad=False)
        self.norm = torch.nn.Parameter(torch.zeros(6, dtype=dtype), requires_grad=False)

    def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        places = {"q.weight": self.qk[:4], "k.weight": self.qk[4:], "norm.weight": self.norm}
        for name, tensor in weights:
            places[name].copy_(tensor)


def _held(model: Fused) -> Weights:
    return Weights(model, model.load_weights, checksum_of)


def _base(dtype: torch.dtype = torch.float32) -> Named:
    return {
        name: torch.randn(*shape).to(dtype)
        for name, shape in (("q.weight", (4, 6)), ("k.weight", (4, 6)), ("norm.weight", (6,)))
    }


def _adapter(*targets: str) -> Named:
    return {
        f"base_model.model.{target}.lora_{side}.weight": torch.randn(*shape)
        for target in targets
        for side, shape in (("A", (2, 6)), ("B", (4, 2)))
    }


def _scale(scale: float) -> Named:
    return {SCALE: torch.tensor([scale], dtype=torch.float64)}


def _merged(base: Named, adapter: Named, target: str, scale: float) -> torch.Tensor:
    down, up = (adapter[f"base_model.model.{target}.lora_{side}.weight"] for side in "AB")
    whole = base[f"{target}.weight"]
    return (whole.float() + scale * (up @ down)).to(whole.dtype)


def _sum(tensors: Named) -> str:
    return checksum_of(arrays_of(tensors))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_an_adapter_that_comes_in_parts_is_merged_into_the_base_and_not_into_the_one_before(dtype: torch.dtype) -> None:
    model, base = Fused(dtype), _base(dtype)
    held = _held(model)
    held.load(base.items())
    assert held.checksum() == _sum(base)
    for scale in (2.0, 0.5):
        adapter = _adapter("q")
        parts = list((adapter | _scale(scale)).items())
        held.load(parts[:1])
        held.load(parts[1:])
        assert held.checksum() == _sum(adapter) + " over " + _sum(base)
        torch.testing.assert_close(model.qk[:4], _merged(base, adapter, "q", scale))
        assert torch.equal(model.qk[4:], base["k.weight"]) and torch.equal(model.norm, base["norm.weight"])


def test_a_module_that_the_next_adapter_leaves_out_is_the_base_again() -> None:
    model, base = Fused(), _base()
    held = _held(model)
    held.load(base.items())
    held.load((_adapter("q", "k") | _scale(1.0)).items())
    adapter = _adapter("k")
    held.load((adapter | _scale(1.0)).items())
    assert held.checksum() == _sum(adapter) + " over " + _sum(base)
    assert torch.equal(model.qk[:4], base["q.weight"])


def test_one_bit_in_the_memory_of_the_model_or_of_what_is_kept_beside_it_denies_the_proof() -> None:
    model, base, adapter = Fused(), _base(), _adapter("q")
    held = _held(model)
    held.load(base.items())
    held.load((adapter | _scale(1.0)).items())
    proof = held.checksum()
    for memory in (model.qk[0], model.qk[7], model.norm, held._base["q.weight"][0]):
        memory.view(torch.int32)[1] ^= 1 << 22
        try:
            assert held.checksum().partition(" over ")[2] != _sum(base)
        except ValueError as error:
            assert "'q.weight' is not its base with the adapter" in str(error)
        memory.view(torch.int32)[1] ^= 1 << 22
        assert held.checksum() == proof
    held._adapter["base_model.model.q.lora_A.weight"].view(torch.int32)[0, 0] ^= 1 << 22
    with pytest.raises(ValueError, match="not its base"):
        held.checksum()
    model.load_weights([("q.weight", held._merged("q.weight"))])
    assert held.checksum().partition(" over ")[0] != _sum(adapter)


def test_whole_weights_after_an_adapter_are_whole_weights() -> None:
    model, base, other = Fused(), _base(), _base()
    held = _held(model)
    held.load(base.items())
    held.load((_adapter("q") | _scale(1.0)).items())
    held.load(other.items())
    assert held.checksum() == _sum(other)
    assert torch.equal(model.qk[:4], other["q.weight"])


def test_an_adapter_without_its_base_is_refused() -> None:
    with pytest.raises(ValueError, match=r"'q\.weight', of which no base was sent"):
        _held(Fused()).load((_adapter("q") | _scale(1.0)).items())
