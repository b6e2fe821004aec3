"""What an actor runs on, as the actor sees it: names of the others, a clock, bulk data and its own dice.

Promises:
- `ref(name, cls)` is typed as the actor's class, so a misspelt message fails in mypy; calling a method of it sends one
  message and awaits one reply; a dead actor raises `ActorLost`, and the same reference works again once its supervisor
  has put a new one in its place;
- nothing here knows Ray: `host.py` and `simulated.py` are the two implementations.
"""

from __future__ import annotations

import random
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor
from typing import Any, Protocol, TypeVar

from troupe.actors.deadlines import Deadline
from troupe.protocol.errors import TimedOut
from troupe.protocol.messages import Blob

T = TypeVar("T")


class Clock(Protocol):
    """Time. Virtual in simulations. (`asyncio.sleep` follows the event loop, which is virtual there too.)"""

    def now(self) -> float:
        """Seconds since the epoch."""


class Blobs(Protocol):
    """Bulk data that travels beside messages without being copied into them."""

    def put(self, value: Any) -> Blob:
        """Keeps `value` (numpy arrays, Arrow tables, dicts of them) where other actors can read it."""

    async def get(self, blob: Blob) -> Any:
        """Opens a blob. The result may be shared memory: do not write to it. Raises ActorLost if its owner died."""


class Context(Protocol):
    """Handed to every actor as its first argument."""

    name: str
    clock: Clock
    blobs: Blobs
    rng: random.Random
    executor: Executor | None
    """Where blocking calls run; None: on threads of their own."""

    def ref(self, name: str, cls: type[T]) -> T:
        """A reference to the actor called `name`; it need not exist yet."""

    async def spawn(self, name: str, cls: type[Any], resources: dict[str, float] | None = None, **kwargs: Any) -> int:
        """Starts `cls(context, **kwargs)` under `name`, awaits its `start()` and returns its process id. Raises what
        the actor raised. An actor of that name is an error."""

    async def exists(self, name: str) -> bool:
        """Is an actor of that name alive, and was it begun? (One whose creator died before that never will be: `kill` it.)"""

    async def watch(self, name: str) -> str:
        """Returns, with the reason, when the actor called `name` is dead; until then it waits."""

    async def kill(self, name: str) -> None:
        """Ends the actor called `name` now. Unknown names are ignored."""

    def die(self, reason: str) -> None:
        """Ends this actor now: it met what it cannot handle, and its supervisor, who is told why, shall replace it."""

    def watch_loop(self, limit_s: float, lag: Callable[[float], None] = lambda seconds: None) -> None:
        """Ends this actor when its event loop stands still for longer than that: it runs code that is not ours, which may
        never give the loop back. Names the line. `lag` is told about once a second, in another thread, how many seconds the
        loop was late. (There is nothing to watch in virtual time.)"""


async def within(seconds: float, culprit: str, work: Awaitable[T]) -> T:
    """Awaits `work` for at most `seconds`; then TimedOut naming `culprit` (law 10)."""
    # Not wait_for: it can lose a cancellation that arrives together with the answer.
    limit = Deadline(seconds)
    try:
        with limit:
            return await work
    except TimeoutError as error:
        if not limit.expired:
            raise
        raise TimedOut(f"{culprit} has not answered for {seconds:g} s") from error
