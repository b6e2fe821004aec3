"""The ranks of a learner: processes that each hold a share of every weight and do a share of the work (FSDP2).

All that is distributed in `learner/` is here. Promises:
- alone, each function gives back what it was given: nothing is sent and nothing changes;
- gradients are summed over ranks, never averaged: a loss is divided by what all ranks have, before (law 5);
- an error that one rank meets in `together` is raised on all of them, and a rank that is gone fails the others.

Every rank is given the same calls with the same data. It computes for its own sequences and sends what it found, so all
ranks know the same per-token numbers. Weights, moments and gradients are sharded; checkpoints are not, and fit any number
of ranks.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from datetime import timedelta
from functools import cache
from hashlib import blake2b
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh

from troupe.learner.errors import BatchError
from troupe.learner.settings import check_present
from troupe.protocol.errors import ConfigError, pack, unpack

TIMEOUT = timedelta(minutes=30)
"""How long a rank waits for the others."""


def size() -> int:
    """Number of ranks; 1 if this process is alone."""
    return dist.get_world_size() if dist.is_available() and dist.is_initialized() else 1


def rank() -> int:
    """Of this process, from 0."""
    return dist.get_rank() if size() > 1 else 0


def first() -> bool:
    """Whether this is the rank that speaks and writes files."""
    return rank() == 0


@contextmanager
def joined(port: int | None = None, door: int | None = None) -> Iterator[None]:
    """Within, this process is one of the ranks that `torchrun` (or `ranked`) started; alone if it was not started so.

    Each rank of a machine gets a GPU of its own, if there are enough. port: of 127.0.0.1 where ranks meet, if not where
    torchrun says; door: the first rank's descriptor of a socket that is bound to it.
    """
    count = int(os.environ.get("WORLD_SIZE", "1"))
    if count == 1:
        yield
        return
    local = int(os.environ.get("LOCAL_RANK", "0"))
    if local < torch.cuda.device_count():
        torch.cuda.set_device(local)
    dist.init_process_group(
        "cpu:gloo,cuda:nccl" if torch.cuda.is_available() else "gloo",
        store=None if port is None else _meeting(port, door, count),
        rank=int(os.environ["RANK"]),
        world_size=count,
        timeout=TIMEOUT,
    )
    try:
        yield
    finally:
        _mesh.cache_clear()
        dist.destroy_process_group()


def _meeting(port: int, door: int | None, count: int) -> Any:
    from torch._C._distributed_c10d import TCPStore

    return TCPStore("127.0.0.1", port, count, is_master=door is not None, timeout=TIMEOUT, master_listen_fd=door)


def device(name: str) -> torch.device:
    """The device called `name`, or chosen if it is "auto". Raises ConfigError if it, or one for each rank, is not there."""
    gpus = torch.cuda.device_count()
    name = ("cuda" if gpus else "cpu") if name == "auto" else name
    check_present(name, "learner.device")
    chosen = torch.device(name)
    here = int(os.environ.get("LOCAL_WORLD_SIZE", size())) if size() > 1 else 1
    if chosen.type == "cuda" and here > max(gpus, 1):
        raise ConfigError(
            f"{here} ranks of the learner on a machine with {gpus} GPUs: each needs one; start fewer, or set "
            "learner.device = 'cpu'"
        )
    return chosen


# -- shares of a model -----------------------------------------------------------------------------------------------


@cache
def _mesh(kind: str) -> Any:
    return init_device_mesh(kind, (size(),))


def spread(module: torch.nn.Module, layers: Sequence[torch.nn.Module], device: torch.device) -> bool:
    """Moves `module` to `device`, of several ranks only this one's share; returns whether there are several.

    Its weights are then whole during its forward and backward pass only, those of `layers` during theirs. Gradients arrive
    in the type of the weights, summed over ranks in float32.
    """
    if size() == 1:
        module.to(device)
        return False
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard

    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32, cast_forward_inputs=False)
    for part in [*layers, module]:
        sharded: Any = fully_shard(part, mesh=_mesh(device.type), reshard_after_forward=True, mp_policy=policy)
        sharded.set_gradient_divide_factor(1.0)
        sharded.set_force_sum_reduction_for_comms(True)  # gloo knows no other
    return True


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """All of `tensor`, of which this rank holds a share. All ranks must ask."""
    full: torch.Tensor = tensor.full_tensor() if _shared(tensor) else tensor  # type: ignore[attr-defined]
    return full


def share(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This rank's share of `whole`, cut as `like` is. Nothing is sent."""
    if not _shared(like) or whole.shape != like.shape:
        return whole
    from torch.distributed.tensor import distribute_tensor

    cut: Any = like
    return distribute_tensor(whole.to(like.device), cut.device_mesh, cut.placements, src_data_rank=None)


def gathered(state: Any) -> Any:
    """`state`, of nested dicts and lists, with all that ranks share whole and on the CPU; None in its place on other ranks
    than the first. Alone: `state`."""
    return _gathered(state, {}) if size() > 1 else state


def _gathered(state: Any, seen: dict[int, Any]) -> Any:
    if isinstance(state, dict):
        return {name: _gathered(value, seen) for name, value in state.items()}
    if isinstance(state, list | tuple):
        return [_gathered(value, seen) for value in state]
    if not (isinstance(state, torch.Tensor) and _shared(state)):
        return state
    if id(state) not in seen:  # tied weights stay tied
        full = whole(state.detach())
        seen[id(state)] = full.cpu() if first() else None
    return seen[id(state)]


def fill(module: torch.nn.Module, state: dict[str, torch.Tensor]) -> None:
    """`module.load_state_dict`, of whole tensors."""
    own = module.state_dict()
    module.load_state_dict({name: share(t, own[name]) if name in own else t for name, t in state.items()})


def _shared(tensor: torch.Tensor) -> bool:
    return hasattr(tensor, "full_tensor")


# -- what ranks tell each other --------------------------------------------------------------------------------------


def total(values: Sequence[float]) -> list[float]:
    """Sums over ranks, the same on all."""
    if size() == 1:
        return list(values)
    sums = torch.tensor(values, dtype=torch.float64)
    dist.all_reduce(sums)
    found: list[float] = sums.tolist()
    return found


def merge(*tensors: torch.Tensor) -> None:
    """Puts together, in place, what each rank wrote at places of its own into tensors of zeros."""
    if size() > 1:
        for tensor in tensors:
            dist.all_reduce(tensor)


def of_first(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """The first rank's `array`; the others' must have its shape. So a last bit that another processor rounds otherwise
    cannot part the ranks."""
    if size() == 1 or not array.size:
        return array
    tensor = torch.from_numpy(array.copy())
    dist.broadcast(tensor, 0)
    return tensor.numpy()


@contextmanager
def together() -> Iterator[None]:
    """An error of any rank within is raised on all ranks at the end. Nothing may be sent within."""
    if size() == 1:
        yield
        return
    mine: Exception | None = None
    try:
        yield
    except Exception as error:
        mine = error
    found: list[Any] = [None] * size()
    dist.all_gather_object(found, None if mine is None else pack(mine, where=f"rank {rank()}"))
    if mine is not None:
        raise mine
    for packed in found:
        if packed is not None:
            raise unpack(packed)


def same(what: str, *arrays: np.ndarray[Any, Any]) -> None:
    """Raises BatchError on all ranks if they were not given the same `arrays`."""
    if size() == 1:
        return
    digest = blake2b(digest_size=16)
    for array in arrays:
        digest.update(repr(array.shape).encode() + np.ascontiguousarray(array).tobytes())
    found: list[Any] = [None] * size()
    dist.all_gather_object(found, digest.hexdigest())
    if others := [r for r, seen in enumerate(found) if seen != found[0]]:
        raise BatchError(f"rank {others[0]} was given another {what} than rank 0: give all ranks the same")
