"""Weights straight from the learner's process into the replicas', by torch.distributed: `gloo` over the network, `nccl` from
GPU to GPU.

Who wants a version connects to the learner (`line.py`), and the two enter a group of their own (`pair.py`), which they keep
for later versions. Nobody is sent what he did not ask for. Promises:
- a replica that joins, dies, hangs or is replaced is a matter between the learner's one thread for it and itself: neither
  the learner's work nor any other replica waits for it;
- a replica that failed asks again by a new connection, for a new group; so does everybody after the learner was replaced;
- what arrives are tensors of their own, which the engine may make its parameters without another copy.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import time
import uuid
from collections.abc import Iterator, Mapping
from socket import SHUT_RDWR, socket
from typing import TYPE_CHECKING, Any

import numpy as np

from troupe.actors.context import Blobs
from troupe.actors.line import CONNECT_S, Line, Offer, own_address
from troupe.protocol.errors import TroupeError
from troupe.protocol.messages import Blob

if TYPE_CHECKING:
    import torch

    from troupe.actors.pair import Pair

LIMIT_S = 60.0
"""Seconds without any movement after which one side takes the other for lost."""


class Collective:
    """The learner's end. It keeps the newest version, which is what it may be asked for."""

    def __init__(self, backend: str, blobs: Blobs, limit_s: float = LIMIT_S) -> None:
        self._backend, self._blobs, self._limit_s = backend, blobs, limit_s
        self._token = uuid.uuid4().hex
        self._newest: tuple[int, Mapping[str, np.ndarray[Any, Any]]] = (-1, {})
        self._door: socket | None = None
        self._lines: set[Line] = set()
        self._closed = False

    def send(self, version: int, tensors: Mapping[str, np.ndarray[Any, Any]]) -> Blob:
        """Offers the tensors, which must not change as long as they may be asked for. See `transfer.Way`. Raises ConfigError
        if this process cannot use the backend."""
        if self._door is None:
            self._open()
        assert self._door is not None
        layout = tuple((name, array.dtype.str, array.shape) for name, array in tensors.items())
        self._newest = version, tensors
        port = self._door.getsockname()[1]
        return self._blobs.put(
            Offer(version, self._backend, self._host, port, self._store_port, self._token, layout, self._limit_s)
        )

    def close(self) -> None:
        """Sends nobody anything any more. Closing again does nothing."""
        self._closed = True
        for line in list(self._lines):
            line.close()
        if self._door is not None:
            with contextlib.suppress(OSError):
                self._door.shutdown(SHUT_RDWR)  # which wakes whoever waits at it
            self._door.close()

    def _open(self) -> None:
        from troupe.actors import pair

        pair.check(self._backend)
        self._host = own_address()
        door, meeting = socket(), socket()
        for each in (door, meeting):
            each.bind((self._host, 0))
            each.listen(128)
        self._store_port = meeting.getsockname()[1]
        self._store = pair.store(self._host, self._store_port, self._limit_s, meeting)
        self._door = door
        threading.Thread(target=self._welcome, args=(door,), daemon=True, name="weights").start()

    def _welcome(self, door: socket) -> None:
        while not self._closed:
            try:
                connection, (host, port) = door.accept()
            except OSError as error:
                if self._closed:
                    return
                print(f"a replica that asks for weights cannot be let in: {error}", file=sys.stderr, flush=True)
                time.sleep(1.0)  # out of descriptors, say: others may be closed meanwhile
                continue
            place = f"the replica at {host}:{port}"
            threading.Thread(target=self._serve, args=(connection, place), daemon=True, name=f"weights {port}").start()

    def _serve(self, connection: socket, place: str) -> None:
        """One replica, until it leaves."""
        doing, pair = "", None
        try:
            line = Line(connection, place)
        except OSError:  # it is gone already
            connection.close()
            return
        self._lines.add(line)
        try:
            told = line.hear(CONNECT_S)
            if told.get("token") != self._token:
                return
            doing = "entering a group"
            pair = self._enter(str(told["group"]), str(told["name"]))
            while True:
                doing = ""
                version = line.hear(None).get("version")
                newest, tensors = self._newest
                if version != newest:
                    line.say({"gone": f"it is at version {newest}"})
                    continue
                line.say({"sending": version})
                doing = f"sending version {version}"
                pair.broadcast(_outgoing(tensors, self._backend), line.gone)
                line.say({"sent": version})
        except TroupeError as error:
            if doing and not self._closed:
                print(f"weights did not get to a replica, while {doing}: {error}", file=sys.stderr, flush=True)
        finally:
            self._lines.discard(line)
            line.close()
            if pair is not None:
                pair.close()

    def _enter(self, group: str, name: str) -> Pair:
        from troupe.actors import pair

        # A connection of its own to the store: on one, all would wait for the one whose replica does not come.
        meeting = pair.store(self._host, self._store_port, self._limit_s)
        return pair.Pair(self._backend, meeting, group, pair.SENDER, name, self._limit_s)


class Receiver:
    """A generator's end: one for each generator, which keeps its group from version to version. name: of the generator."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._line: Line | None = None
        self._pair: Pair | None = None
        self._token = ""

    def receive(self, offer: Offer) -> dict[str, torch.Tensor]:
        """The tensors: whoever gets them may keep them. Blocks. Raises ActorLost if the learner, or its version, is gone, and
        TimedOut if nothing has moved for `offer.limit_s`."""
        import torch

        from troupe.actors.pair import DEVICES

        try:
            if self._token != offer.token:
                self.close()
                self._join(offer)
            assert self._line is not None and self._pair is not None
            self._line.ask(offer.version)
            device = DEVICES[offer.backend]
            empty = ((name, torch.empty(shape, dtype=dtype_of(dtype), device=device)) for name, dtype, shape in offer.layout)
            tensors = dict(empty)
            self._pair.broadcast(tensors.values(), self._line.gone)
            self._line.sent(offer.version, offer.limit_s)
            return tensors
        except BaseException:
            self.close()
            raise

    def close(self) -> None:
        """Leaves the learner."""
        if self._line is not None:
            self._line.close()
        if self._pair is not None:
            self._pair.close()
        self._line, self._pair, self._token = None, None, ""

    def _join(self, offer: Offer) -> None:
        from troupe.actors import pair

        group = uuid.uuid4().hex
        self._line = Line.to(offer, group, self._name)
        meeting = pair.store(offer.host, offer.store, offer.limit_s)
        self._pair = pair.Pair(offer.backend, meeting, group, pair.RECEIVER, "the learner", offer.limit_s)
        self._token = offer.token


def dtype_of(array: str) -> torch.dtype:
    """Of the tensor that is published as an array of that dtype (see `learner.model.tensors_of`)."""
    import torch

    dtype = torch.from_numpy(np.empty(0, array)).dtype
    return torch.bfloat16 if dtype == torch.int16 else dtype


def _outgoing(tensors: Mapping[str, np.ndarray[Any, Any]], backend: str) -> Iterator[torch.Tensor]:
    import torch

    from troupe.actors.pair import DEVICES

    for array in tensors.values():
        # Nobody writes to it: a snapshot may be read-only.
        tensor = torch.from_numpy(np.require(array, requirements=["C", "W"]))
        yield (tensor.view(torch.bfloat16) if tensor.dtype == torch.int16 else tensor).to(DEVICES[backend])
