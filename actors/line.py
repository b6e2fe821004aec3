"""Who wants which weights: an offer of the learner's, and the connection on which a replica takes it up.

The weights themselves take another way (`pair.py`); here go a few lines of JSON. But it is also how each side sees at once
that the other is dead, whatever moves the weights. Promises:
- each wait is bounded, or is for a request while there is nothing to do, and then ends with the other side's process, or, by
  keep-alives, its machine;
- who does not know the offer's token is told nothing and gets nothing.
"""

from __future__ import annotations

import contextlib
import json
import select
import socket
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from troupe.protocol.errors import ActorLost, TimedOut

CONNECT_S = 30.0


@dataclass(frozen=True, slots=True)
class Offer:
    """What a generator gets in the place of weights: where they are to be had.

    port: of the learner's connections; store: of the store where groups meet. token: names that learner, and opens. layout:
    name, dtype and shape of each array, in the order in which they come. limit_s: how long nothing may move.
    """

    version: int
    backend: str
    host: str
    port: int
    store: int
    token: str
    layout: tuple[tuple[str, str, tuple[int, ...]], ...]
    limit_s: float

    def outline(self) -> dict[str, np.ndarray[Any, Any]]:
        """Arrays of those shapes and dtypes which take no memory."""
        return {name: np.broadcast_to(np.zeros((), dtype), shape) for name, dtype, shape in self.layout}


class Line:
    """One end of a connection. Not for two threads at a time. other: how the other end is called in errors."""

    def __init__(self, connection: socket.socket, other: str) -> None:
        self._socket, self._other, self._heard = connection, other, b""
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        for option, value in (("TCP_KEEPIDLE", 30), ("TCP_KEEPINTVL", 10), ("TCP_KEEPCNT", 3)):
            if hasattr(socket, option):
                connection.setsockopt(socket.IPPROTO_TCP, getattr(socket, option), value)

    @classmethod
    def to(cls, offer: Offer, group: str, name: str) -> Line:
        """Connects the replica called `name` to the learner, which then enters `group` as its sender."""
        other = f"the learner at {offer.host}:{offer.port}"
        try:
            line = cls(socket.create_connection((offer.host, offer.port), timeout=CONNECT_S), other)
        except OSError as error:
            raise ActorLost(f"{other} cannot be reached: {error}") from error
        line.say({"token": offer.token, "group": group, "name": name})
        return line

    def say(self, what: Mapping[str, Any]) -> None:
        try:
            self._socket.settimeout(CONNECT_S)
            self._socket.sendall(json.dumps(what).encode() + b"\n")
        except OSError as error:
            raise ActorLost(f"{self._other} is gone: {error}") from error

    def hear(self, limit_s: float | None) -> dict[str, Any]:
        """The next line; limit_s None: waits for as long as the other lives. Raises ActorLost at the end, TimedOut."""
        deadline = None if limit_s is None else time.monotonic() + limit_s
        while b"\n" not in self._heard:
            try:
                self._socket.settimeout(None if deadline is None else max(0.001, deadline - time.monotonic()))
                more = self._socket.recv(4096)
            except TimeoutError as error:
                raise TimedOut(f"{self._other} has not answered for {limit_s:g} s") from error
            except OSError as error:
                raise ActorLost(f"{self._other} is gone: {error}") from error
            if not more or len(self._heard) > 65536:
                raise ActorLost(f"{self._other} has closed the connection")
            self._heard += more
        line, _, self._heard = self._heard.partition(b"\n")
        try:
            found = json.loads(line)
        except ValueError:
            found = None
        if not isinstance(found, dict):
            raise ActorLost(f"{self._other} speaks another language")
        return found

    def ask(self, version: int) -> None:
        """Has the learner begin to send. Raises ActorLost if it has that version no more."""
        self.say({"version": version})
        answer = self.hear(CONNECT_S)
        if answer.get("sending") != version:
            raise ActorLost(f"{self._other} has no version {version}: {answer.get('gone', 'it does not say why')}")

    def sent(self, version: int, limit_s: float) -> None:
        """Returns when the learner has sent all of it."""
        if self.hear(limit_s).get("sent") != version:
            raise ActorLost(f"{self._other} has not sent version {version}")

    def gone(self, wait_s: float) -> bool:
        """Whether the other end is closed; waits for that for at most so long."""
        try:
            poll = select.poll()  # select.select knows no descriptor above 1023
            poll.register(self._socket, select.POLLIN)
            if not poll.poll(wait_s * 1000):
                return False
            self._socket.settimeout(0)
            if not self._socket.recv(1, socket.MSG_PEEK):
                return True
        except (OSError, ValueError):
            return True
        time.sleep(wait_s)  # it has said something that nobody wants to hear yet
        return False

    def close(self) -> None:
        with contextlib.suppress(OSError):
            self._socket.shutdown(socket.SHUT_RDWR)  # also wakes a thread that hears
        self._socket.close()


def own_address() -> str:
    """This machine's, as others in its network see it; 127.0.0.1 if it is in none."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # nothing is sent: the kernel says from where it would be
            return str(probe.getsockname()[0])
        except OSError:
            return "127.0.0.1"
