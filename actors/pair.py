"""A group of two over torch.distributed: the learner, which sends, and one replica, which receives.

Promises:
- it stands beside whatever other groups a process is in, and needs none of them;
- every wait ends: with what was waited for, with ActorLost if the other is gone, or with TimedOut if nothing has moved for
  `limit_s` (one wait is NCCL's own: for another process that dies just before the two first connect); after an error the
  group is of no use, and closing it never waits for the other.

Two and no more: a group fails as a whole, so a replica that dies in a group of all would take the weights of all with it.
SGLang makes its side of such a group itself (`init_custom_process_group`); names of keys in the store are as it makes them.
"""

from __future__ import annotations

import os
import socket
import threading
import time
from collections import deque
from collections.abc import Callable, Iterable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import PrefixStore, TCPStore

from troupe.actors.line import own_address
from troupe.protocol.errors import ActorLost, ConfigError, TimedOut

SENDER, RECEIVER = 0, 1
DEVICES = {"gloo": "cpu", "nccl": "cuda"}
"""Where the tensors lie that a backend moves."""

_AHEAD = 16
"""Tensors on their way at a time."""
_LOOK_S = 0.001
_WATCHDOG = ("TORCH_NCCL_ASYNC_ERROR_HANDLING", "TORCH_NCCL_DUMP_ON_TIMEOUT", "TORCH_NCCL_ENABLE_MONITORING")
"""Parts of NCCL's watchdog in torch, each of which ends this process, or by the shared store all that use it, when another
one is lost. Read when a group is made."""
_making = threading.Lock()


def store(host: str, port: int, limit_s: float, door: socket.socket | None = None) -> Any:
    """The store where the two meet. door: the bound socket of the one that serves it."""
    limit = timedelta(seconds=limit_s)
    try:
        if door is None:
            return TCPStore(host, port, None, False, timeout=limit, wait_for_workers=False)
        fd = door.detach()
        return TCPStore(host, port, None, True, timeout=limit, wait_for_workers=False, master_listen_fd=fd)
    except RuntimeError as error:
        raise ActorLost(f"the store at {host}:{port} cannot be reached: {_first_line(error)}") from error


def check(backend: str) -> None:
    """Raises ConfigError if this process cannot use `backend`."""
    if backend == "nccl" and not (dist.is_nccl_available() and torch.cuda.is_available()):
        raise ConfigError(
            f"generator.transfer = 'nccl': the torch of this process ({torch.__version__}) has no NCCL, or sees no CUDA GPU; "
            "install one for CUDA, or set generator.transfer = 'gloo'"
        )


class Pair:
    """Made on both sides at the same time, under the same name.

    other: how the other one is called in errors. rank: SENDER or RECEIVER. limit_s: seconds of every wait.
    """

    def __init__(self, backend: str, meeting: Any, name: str, rank: int, other: str, limit_s: float) -> None:
        check(backend)
        self._other, self._limit_s = other, limit_s
        self._options = dist.BroadcastOptions()
        self._options.rootRank = SENDER
        self._nccl = backend == "nccl"
        if not self._nccl:
            self._options.timeout = timedelta(seconds=limit_s)
        place = PrefixStore(f"{DEVICES[backend]}/", PrefixStore(f"{name}/", PrefixStore(name, meeting)))
        try:
            self._group = _nccl(place, rank, limit_s) if self._nccl else _gloo(place, rank, limit_s)
        except RuntimeError as error:
            raise _lost(other, error) from error

    def broadcast(self, tensors: Iterable[torch.Tensor], gone: Callable[[float], bool]) -> None:
        """Moves them, in their order, from the sender's memory into the receiver's: contiguous, on the backend's device.

        gone: told how many seconds it may wait for it, says whether the other is gone.
        """
        flying: deque[tuple[Any, torch.Tensor]] = deque()  # the tensors are held for as long as they are being moved
        try:
            for tensor in tensors:
                flying.append((self._group.broadcast([tensor], self._options), tensor))
                if len(flying) == _AHEAD:
                    self._land(flying, gone)
            while flying:
                self._land(flying, gone)
            if self._nccl:
                torch.cuda.synchronize()
        except BaseException:
            self._give_up(flying)
            raise

    def close(self) -> None:
        """Leaves the group."""
        if self._group is not None and self._nccl:
            self._group.abort()
        self._group = None

    def _land(self, flying: deque[tuple[Any, torch.Tensor]], gone: Callable[[float], bool]) -> None:
        """Waits for the first of them."""
        work, deadline = flying[0][0], time.monotonic() + self._limit_s + 5.0  # gloo keeps the limit by itself, and says more
        try:
            while not work.is_completed():
                if gone(_LOOK_S):
                    raise ActorLost(f"{self._other} was lost while weights were moved")
                if time.monotonic() > deadline:
                    raise TimedOut(f"{self._other} has moved no weights for {self._limit_s:g} s")
            work.wait()
        except RuntimeError as error:
            raise _lost(self._other, error) from error
        flying.popleft()

    def _give_up(self, flying: deque[tuple[Any, torch.Tensor]]) -> None:
        """Gloo's destructor waits for what is under way, and would stop the whole process: so here, on this thread, first."""
        if self._nccl:
            self.close()
        deadline = time.monotonic() + self._limit_s + 5.0
        while not all(work.is_completed() for work, _ in flying) and time.monotonic() < deadline:
            time.sleep(0.01)


def _gloo(place: Any, rank: int, limit_s: float) -> Any:
    gloo: Any = dist.ProcessGroupGloo
    interface, options = os.environ.get("GLOO_SOCKET_IFNAME", "").partition(",")[0], gloo._Options()
    # By itself it takes the address of the machine's name, which on many machines is 127.0.1.1.
    device = gloo.create_device(interface=interface) if interface else gloo.create_device(hostname=own_address())
    options._devices, options._timeout = [device], timedelta(seconds=limit_s)
    return gloo(place, rank, 2, options)


def _nccl(place: Any, rank: int, limit_s: float) -> Any:
    options = dist.ProcessGroupNCCL.Options()
    options._timeout = timedelta(seconds=10 * limit_s)  # `_land` is the one that looks at the clock
    with _making:
        before = {name: os.environ.get(name) for name in _WATCHDOG}
        os.environ.update(dict.fromkeys(_WATCHDOG, "0"))
        try:
            return dist.ProcessGroupNCCL(place, rank, 2, options)
        finally:
            for name, value in before.items():
                os.environ.pop(name)
                if value is not None:
                    os.environ[name] = value


def _lost(other: str, error: Exception) -> ActorLost | TimedOut:
    text = _first_line(error)
    if "timed out" in text.lower() or "timeout" in text.lower():
        return TimedOut(f"{other} has moved no weights in time: {text}")
    return ActorLost(f"{other} was lost while weights were moved: {text}")


def _first_line(error: Exception) -> str:
    return str(error).partition("\n")[0][:200]
