"""Proof of the weights that a server's model holds, from its own memory. Runs in the server's interpreter, without Troupe.

It is loaded from its file by what runs inside of the servers (`sglang_inside.py`, `vllm_inside.py`).

Promises:
- where a sent tensor lies within the model (servers fuse q, k and v, and gate and up) is not looked up by name: the copies
  that the model's own loader makes are watched, and the memory they went to is read;
- a tensor that is held in parts, turned, or was turned into something else later is an error, not a checksum.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


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


def held(model: torch.nn.Module, landed: Mapping[str, torch.Tensor], checksum_of: Callable[[dict[str, Any]], str]) -> str:
    """The checksum (`protocol.checksum`) of what landed in `model`, under the names by which it was sent."""
    in_use = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
    tensors = {}
    for name, tensor in landed.items():
        if tensor.untyped_storage().data_ptr() not in in_use:
            raise ValueError(f"'{name}' was turned into something else after it was loaded: its checksum cannot be told")
        plain = tensor.contiguous().cpu()
        tensors[name] = (plain.view(torch.int16) if plain.dtype == torch.bfloat16 else plain).numpy()
    return checksum_of(tensors)
