"""A trainer whose work several processes of this machine share (`learner.ranks`): starts them, calls them, ends them.

Promises:
- each call reaches all ranks; its answer is the first rank's, and an error that all of them raise keeps its type;
- a rank that dies, hangs or fails in a way of its own ends all of them, and the call raises ActorLost naming it, soon after;
- the ranks end with their owner, however it ends; they meet at a port of 127.0.0.1, and nothing is written to disk.

The owner takes no part in the work and imports no torch. Elsewhere, start the ranks with `torchrun` (see `ranks.joined`).
"""

from __future__ import annotations

import contextlib
import json
import os
import pickle
import queue
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

from troupe.learner.config import LearnerConfig, ModelConfig
from troupe.learner.errors import BatchError, Diverged  # noqa: F401  (what ranks raise, `unpack` must know)
from troupe.protocol.errors import ActorLost, PackedError, RemoteError, TroupeError, pack, unpack
from troupe.protocol.messages import Span

LIMIT_S = 3600.0
"""How long a call may take, from one sign of life to the next."""

_GRACE_S = 30.0
"""How long the other ranks may take to answer once one of them has failed."""

_BOOT = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); import troupe.learner.ranked as r; r._follow(int(sys.argv[1]))"
)


class Ranked:
    """`count` processes; each makes an object of its own by `make(*arguments)` and then follows the calls made here."""

    def __init__(self, count: int, make: Callable[..., Any], *arguments: Any, limit_s: float = LIMIT_S) -> None:
        """`make` must be importable. Raises what it raises, and ActorLost if a rank does not come up."""
        self._limit_s = limit_s
        self._processes: list[subprocess.Popen[bytes]] = []
        self._lines: list[Connection] = []
        self._end = weakref.finalize(self, _end, self._processes, self._lines)
        try:
            with socket.socket() as door:
                door.bind(("127.0.0.1", 0))
                for rank in range(count):
                    self._start(rank, count, door)
            self.call("", make, arguments)
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        """Process ids, by rank."""
        return [process.pid for process in self._processes]

    def call(self, method: str, *args: Any, progress: Callable[..., None] | None = None, **kwargs: Any) -> Any:
        """`object.method(*args, **kwargs)` on all ranks; returns the first one's result.

        progress: called here with what the first rank's `progress` was called with; methods without one take none.
        Raises the ranks' TroupeError, or ActorLost, after which all ranks are ended.
        """
        if not self._end.alive:
            raise ActorLost("the ranks of the learner have ended: start them anew")
        if progress is not None:
            kwargs["progress"] = None
        try:
            for line in self._lines:
                with contextlib.suppress(OSError):  # whoever is gone is found below
                    _send(line, (method, args, kwargs))
            answer = self._answer(progress)
        except BaseException:  # an interrupted call leaves answers behind
            self.close()
            raise
        if isinstance(answer, PackedError):
            raise unpack(answer)
        return answer

    def get(self, name: str) -> Any:
        """An attribute of the first rank's object."""
        return self.call("__getattribute__", name)

    def close(self) -> None:
        """Ends the ranks."""
        self._end()

    def _start(self, rank: int, count: int, door: socket.socket) -> None:
        ours, theirs = socket.socketpair()
        limit = struct.pack("ll", int(self._limit_s) + 1, 0)
        for option in (socket.SO_SNDTIMEO, socket.SO_RCVTIMEO):  # a rank that is stopped takes nothing
            ours.setsockopt(socket.SOL_SOCKET, option, limit)
        here = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": count, "LOCAL_WORLD_SIZE": count}
        loopback = "lo0" if sys.platform == "darwin" else "lo"
        with theirs:
            self._lines.append(Connection(ours.detach()))
            self._processes.append(
                subprocess.Popen(
                    [sys.executable, "-c", _BOOT, str(theirs.fileno()), json.dumps(sys.path)],
                    pass_fds=[theirs.fileno(), *([door.fileno()] if rank == 0 else [])],
                    stdin=subprocess.DEVNULL,
                    env={**os.environ, **{k: str(v) for k, v in here.items()}, "GLOO_SOCKET_IFNAME": loopback},
                    start_new_session=True,  # Ctrl-C is the owner's
                )
            )
        _send(self._lines[-1], (door.getsockname()[1], door.fileno() if rank == 0 else None))

    def _answer(self, progress: Callable[..., None] | None) -> Any:
        """What the first rank answers; a PackedError if all ranks agree on it. Raises ActorLost if one of them ended, failed
        alone or said nothing for too long."""
        answers: dict[int, Any] = {}
        lost: list[int] = []
        failed_at: float | None = None
        while len(answers) + len(lost) < len(self._lines):
            waiting = {line: rank for rank, line in enumerate(self._lines) if rank not in answers and rank not in lost}
            limit = self._limit_s if failed_at is None else max(0.0, failed_at + _GRACE_S - time.monotonic())
            ready = wait(list(waiting), limit)
            if not ready and failed_at is None:
                raise ActorLost(f"rank {min(waiting.values())} of the learner said nothing for {self._limit_s:g} s")
            if not ready:
                break
            for line in ready:
                assert isinstance(line, Connection)
                rank = waiting[line]
                try:
                    kind, said = _receive(line)
                except (EOFError, OSError):
                    lost.append(rank)
                else:
                    if kind == "answer":
                        answers[rank] = said
                    elif progress is not None:
                        progress(*said)
                if failed_at is None and (rank in lost or isinstance(answers.get(rank), PackedError)):
                    failed_at = time.monotonic()
        if lost:
            raise ActorLost(f"rank {lost[0]} of the learner (process {self.pids[lost[0]]}) {self._fate(lost[0])}")
        errors = [said for said in answers.values() if isinstance(said, PackedError)]
        if errors and (len(errors) < len(self._lines) or any(error.type == RemoteError.__name__ for error in errors)):
            raise ActorLost(f"the ranks of the learner had to end: {errors[0].message}")  # the first is the cause
        return answers[0]

    def _fate(self, rank: int) -> str:
        try:
            code = self._processes[rank].wait(5.0)
        except subprocess.TimeoutExpired:
            return "does not answer any more"
        return f"was killed by {signal.Signals(-code).name}" if code < 0 else f"ended with exit status {code}"


class RankedTrainer:
    """`learner.trainer.Trainer` with `config.ranks` ranks. The same seed and number of ranks give the same weights."""

    def __init__(self, config: LearnerConfig, model: ModelConfig, *, seed: int) -> None:
        """Starts the ranks. Raises ConfigError as `Trainer` does, and ActorLost."""
        self._ranks = Ranked(config.ranks, _trainer, config, model, seed)
        self.config = config
        self.step = 0
        self.base: str = self._ranks.get("base")

    def cold_start(self, tokens: Sequence[Any], supervised: Sequence[Any], **settings: Any) -> dict[str, float]:
        """See `Trainer.cold_start`."""
        told: dict[str, float] = self._ranks.call("cold_start", tokens, supervised, **settings)
        return told

    def train(self, trajectories: list[Any], teacher: Any = None) -> dict[str, float]:
        """See `Trainer.train`."""
        return self._stepped("train", trajectories, teacher)

    def prefer(self, trajectories: list[Any]) -> dict[str, float]:
        """See `Trainer.prefer`."""
        return self._stepped("prefer", trajectories)

    def tensors(self) -> dict[str, Any]:
        """See `Trainer.tensors`."""
        found: dict[str, Any] = self._ranks.call("tensors")
        return found

    def save(self, folder: str | Path) -> None:
        """See `Trainer.save`."""
        self._ranks.call("save", os.path.abspath(folder))

    def restore(self, folder: str | Path) -> None:
        """See `Trainer.restore`."""
        self._ranks.call("restore", os.path.abspath(folder))
        self.step = self._ranks.get("step")

    def adjust(self, changes: Mapping[str, Any]) -> None:
        """See `Trainer.adjust`."""
        self._ranks.call("adjust", dict(changes))

    def roll_back(self, folder: str | Path) -> None:
        """See `Trainer.roll_back`."""
        self._ranks.call("roll_back", os.path.abspath(folder))

    def timings(self) -> list[Span]:
        """See `Trainer.timings`; of the first rank."""
        found: list[Span] = self._ranks.call("timings")
        return found

    def close(self) -> None:
        """Ends the ranks."""
        self._ranks.close()

    def _stepped(self, method: str, *args: Any) -> dict[str, float]:
        told: dict[str, float] = self._ranks.call(method, *args)
        self.step += 1
        return told


def _trainer(config: LearnerConfig, model: ModelConfig, seed: int) -> Any:
    from troupe.learner.trainer import Trainer

    return Trainer(config, model, seed=seed)


# -- the wire: pickles, with large arrays beside them ----------------------------------------------------------------


def _send(line: Connection, message: Any) -> None:
    beside: list[memoryview] = []

    def small(buffer: pickle.PickleBuffer) -> bool:
        raw = buffer.raw()
        if raw.nbytes >= 1 << 16:
            beside.append(raw)
        return raw.nbytes < 1 << 16

    body = pickle.dumps((message,), protocol=5, buffer_callback=small)
    line.send_bytes(struct.pack("q", len(beside)))
    line.send_bytes(body)
    for raw in beside:
        line.send_bytes(raw)


def _receive(line: Connection) -> Any:
    (count,) = struct.unpack("q", line.recv_bytes())
    body = line.recv_bytes()
    (message,) = pickle.loads(body, buffers=[line.recv_bytes() for _ in range(count)])
    return message


def _end(processes: list[subprocess.Popen[bytes]], lines: list[Connection]) -> None:
    for line in lines:
        line.close()
    for process in processes:
        process.kill()
        process.wait()


# -- in a rank's process ---------------------------------------------------------------------------------------------


def _follow(descriptor: int) -> None:
    """Makes what the first call says, then does what the others say, until the owner is gone."""
    line = Connection(descriptor)
    port, door = _receive(line)
    calls: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_listen, args=(line, calls), daemon=True).start()
    from troupe.learner import ranks

    with ranks.joined(port=port, door=door):
        made: Any = None
        while True:
            method, args, kwargs = calls.get()
            if "progress" in kwargs and ranks.first():
                kwargs["progress"] = lambda *said: _send(line, ("progress", said))
            try:
                if method:
                    answer = getattr(made, method)(*args, **kwargs)
                else:
                    make, arguments = args
                    made, answer = make(*arguments), None
            except BaseException as error:
                _send(line, ("answer", pack(error, where=f"rank {ranks.rank()}")))
                if not isinstance(error, TroupeError):  # where the others are now, nobody knows
                    os._exit(1)
            else:
                _send(line, ("answer", answer if ranks.first() else None))


def _listen(line: Connection, calls: queue.SimpleQueue[Any]) -> None:
    """Reads also while the rank works, so that the owner's end is seen at once."""
    try:
        while True:
            calls.put(_receive(line))
    except (EOFError, OSError):
        os._exit(0)
