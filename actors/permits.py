"""Permits: who may use a pool's next free slot.

Owns the count of used slots and the two lines that wait for one. Promises:
- a pool never has more episodes of ours than slots;
- fair: while training and evaluation both wait, they are served in turn, one each; within a kind the lowest place first,
  so an episode that is retried keeps its place in the line;
- a permit is handed to exactly one asker, which gives it back; one that was withdrawn or cancelled takes none.
"""

from __future__ import annotations

import asyncio
import heapq
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from troupe.protocol.trajectory import Kind


@dataclass(slots=True, order=True)
class _Waiting:
    place: int
    owner: int = field(compare=False)
    avoid: str = field(compare=False)
    granted: asyncio.Future[str] = field(compare=False)


class Permits:
    """The slots of all pools."""

    def __init__(self) -> None:
        self._slots: dict[str, int] = {}
        self._used: Counter[str] = Counter()
        self._lines: dict[Kind, list[_Waiting]] = {"train": [], "eval": []}
        self._last: Kind = "eval"
        self.granted = 0
        self.waited = 0.0
        """Seconds that those waited who were given a slot, all together."""

    def open(self, slots: Mapping[str, int]) -> None:
        """Pools that take episodes from now on, and no others: name → slots."""
        self._slots = dict(slots)
        self._grant()

    def close(self, pool: str) -> None:
        """`pool` gets no more until it is opened again."""
        self._slots.pop(pool, None)

    def used(self, pool: str) -> int:
        """Slots of `pool` that are taken, whether it is open or not."""
        return self._used[pool]

    def load(self) -> tuple[int, int, int]:
        """(episodes that wait, slots taken, slots) of the open pools. May be asked from any thread."""
        slots = dict(self._slots)
        waiting = sum(not one.granted.done() for line in self._lines.values() for one in list(line))
        return waiting, sum(min(self._used[pool], most) for pool, most in slots.items()), sum(slots.values())

    async def take(self, kind: Kind, place: int, owner: int, avoid: str = "") -> str:
        """Waits for a slot and returns its pool: the one with the most free slots, not `avoid` if another has room.

        An empty string if `owner` withdrew meanwhile.
        """
        loop = asyncio.get_running_loop()
        waiting, began = _Waiting(place, owner, avoid, loop.create_future()), loop.time()
        heapq.heappush(self._lines[kind], waiting)
        self._grant()
        try:
            pool = await waiting.granted
        except asyncio.CancelledError:
            if not waiting.granted.cancelled() and waiting.granted.result():
                self.give(waiting.granted.result())  # granted and cancelled at the same moment
            raise
        if pool:
            self.granted += 1
            self.waited += loop.time() - began
        return pool

    def give(self, pool: str) -> None:
        """The slot is free again."""
        self._used[pool] -= 1
        self._grant()

    def withdraw(self, owner: int) -> None:
        """Whatever waits for `owner` waits no longer."""
        for line in self._lines.values():
            for waiting in line:
                if waiting.owner == owner and not waiting.granted.done():
                    waiting.granted.set_result("")

    def _grant(self) -> None:
        while free := {pool: slots - self._used[pool] for pool, slots in self._slots.items() if self._used[pool] < slots}:
            kinds = [kind for kind, line in self._lines.items() if _front(line)]
            if not kinds:
                return
            kind = next((kind for kind in kinds if kind != self._last), kinds[0])
            self._last = kind
            waiting = heapq.heappop(self._lines[kind])
            others = {pool: slots for pool, slots in free.items() if pool != waiting.avoid}
            pool = max((slots, pool) for pool, slots in (others or free).items())[1]
            self._used[pool] += 1
            waiting.granted.set_result(pool)


def _front(line: list[_Waiting]) -> bool:
    """Whether anybody waits in `line`; those who left it are taken out of its front."""
    while line and line[0].granted.done():
        heapq.heappop(line)
    return bool(line)
