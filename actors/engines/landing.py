"""The weights that a server's model holds, and the proof of them from its own memory. Runs in the server's interpreter,
without Troupe.

It is loaded from its file by what runs inside of the servers (`sglang_inside.py`, `vllm_inside.py`).

Promises:
- where a sent tensor lies within the model (servers fuse q, k and v, and gate and up) is not looked up by name: the copies
  that the model's own loader makes are watched, and the memory they went to is read;
- a tensor that is held in parts, turned, or was turned into something else later is an error, not a checksum;
- a LoRA adapter that is sent alone is merged here: the model then holds, to the bit, base + scale · B A, computed in float32
  and rounded once. The checksum is then the adapter's, and is told only if every matrix in the model's memory is what its base
  and that adapter give; with it comes the checksum of the base, all of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

SCALE = "troupe.lora.scale"
"""Name of the tensor [1] that is sent after an adapter's last one."""
OVER = " over "
"""Between the checksum of an adapter and that of its base."""
_TOGETHER = 32
"""Merged matrices that exist beside the model at a time."""
_PREFIX, _DOWN, _UP = "base_model.model.", ".lora_A.weight", ".lora_B.weight"


def adapted(name: str) -> str:
    """The weight that a tensor of an adapter (by its name in peft's files) is for; "" if it is none."""
    for end in (_DOWN, _UP):
        if name.startswith(_PREFIX) and name.endswith(end):
            return name[len(_PREFIX) : -len(end)] + ".weight"
    return ""


class Landing(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Notes which memory of the model each loaded tensor is copied to. landed: name to what aliases the model's memory."""

    def __init__(self, landed: dict[str, torch.Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._landed = landed
        self._sent: dict[int, tuple[str, torch.Tensor]] = {}  # by storage; held, so that nobody else gets that memory

    def passing(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in weights:
            if tensor.untyped_storage().nbytes() != tensor.nbytes:
                tensor = tensor.clone()  # a storage of its own, by which its copies are recognised
            self._sent[tensor.untyped_storage().data_ptr()] = name, tensor
            yield name, tensor

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = function(*args, **(kwargs or {}))
        if function is torch.ops.aten.copy_.default:
            target, source = args[0], args[1]
            name, sent = self._sent.get(source.untyped_storage().data_ptr(), ("", None))
            if sent is not None:
                if source.shape != sent.shape or source.stride() != sent.stride():
                    raise ValueError(f"'{name}' is held in parts or turned: its checksum cannot be told")
                self._landed[name] = target.detach()
        return result


class Weights:
    """What a model holds of what it was sent. load: the model's own loader. checksum_of: `protocol.checksum`."""

    def __init__(
        self, model: torch.nn.Module, load: Callable[[Iterable[tuple[str, torch.Tensor]]], Any], checksum_of: Callable[..., str]
    ) -> None:
        self._model, self._load, self._checksum_of = model, load, checksum_of
        self._landed: dict[str, torch.Tensor] = {}
        self._base: dict[str, torch.Tensor] = {}  # on the CPU, of what an adapter changes; the rest lies in the model
        self._adapter: dict[str, torch.Tensor] = {}
        self._coming: dict[str, torch.Tensor] = {}
        self._scale = 1.0

    @torch.no_grad()
    def load(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        """Whole weights into the model, or some of them; or an adapter's, in one call or several, for those it holds."""
        result = self._take(self._sorted(weights))
        if SCALE in self._coming:
            self._scale = float(self._coming.pop(SCALE))
            self._adapter, self._coming = self._coming, {}
            targets = {adapted(name) for name in self._adapter}
            if unknown := targets - self._landed.keys():
                raise ValueError(f"the adapter is for '{min(unknown)}', of which no base was sent")
            self._base |= {name: tensor.cpu().clone() for name, tensor in self._memory(targets - self._base.keys()).items()}
            names = list(self._base)
            for i in range(0, len(names), _TOGETHER):
                self._take((name, self._merged(name)) for name in names[i : i + _TOGETHER])
        return result

    def checksum(self) -> str:
        """Of what was sent last, from memory; of an adapter "its checksum over that of the base". Raises ValueError if that
        cannot be told, or is not what the model holds."""
        memory = self._memory(self._landed)
        base_sum = self._checksum_of({name: _array(tensor) for name, tensor in (memory | self._base).items()})
        if not self._adapter:
            return base_sum
        for name in self._base:
            if not torch.equal(memory[name], self._merged(name)):
                raise ValueError(f"'{name}' is not its base with the adapter")
        return self._checksum_of({name: _array(tensor) for name, tensor in self._adapter.items()}) + OVER + base_sum

    def _sorted(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Keeps what is an adapter's; passes on what the model's loader knows, and with it forgets the adapter."""
        for name, tensor in weights:
            if name == SCALE or adapted(name):
                self._coming[name] = tensor.to("cpu", copy=True)
            else:
                self._base, self._adapter = {}, {}
                yield name, tensor

    def _take(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Any:
        with Landing(self._landed) as mode:
            return self._load(mode.passing(weights))

    def _merged(self, name: str) -> torch.Tensor:
        """On the model's device: the same numbers each time."""
        base, stem = self._base[name], _PREFIX + name.removesuffix(".weight")
        device = self._landed[name].device
        if stem + _UP not in self._adapter:  # an adapter before this one had it
            return base.to(device)
        up, down = (self._adapter[stem + end].to(device, torch.float32) for end in (_UP, _DOWN))
        return torch.add(base.to(device, torch.float32), up @ down, alpha=self._scale).to(base.dtype)

    def _memory(self, names: Iterable[str]) -> dict[str, torch.Tensor]:
        in_use = {parameter.untyped_storage().data_ptr() for parameter in self._model.parameters()}
        for name in names:
            if self._landed[name].untyped_storage().data_ptr() not in in_use:
                raise ValueError(f"'{name}' was turned into something else after it was loaded: its checksum cannot be told")
        return {name: self._landed[name] for name in names}


def _array(tensor: torch.Tensor) -> Any:
    plain = tensor.contiguous().cpu()
    return (plain.view(torch.int16) if plain.dtype == torch.bfloat16 else plain).numpy()
