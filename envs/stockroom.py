"""How many are in stock? A question that needs two or three tool calls, some of which can be made at the same time.

Promises: one question in five, by its digest, is held out; the counts are drawn anew for each task, so that no answer can
be learnt by heart; the reward is 1 for the right number, else 0.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Annotated, ClassVar, Literal

from pydantic import Field

from troupe.envs.base import InvalidAction, Task, belongs
from troupe.envs.tools import Rewards, ToolWorld, short, tool
from troupe.protocol.errors import TaskFailed, nearest

WAREHOUSES = ("north", "south", "east")
_COLOURS = ("red", "blue", "green", "black", "white")
_THINGS = ("lamp", "chair", "table", "desk", "clock", "vase", "stool", "mirror")
_NAMES = [f"{colour} {thing}" for colour in _COLOURS for thing in _THINGS]
_DRAWS = 1_000
_NUMBER = re.compile(r"-?[0-9]+")
_READ = 4_000  # characters of an answer that are looked at


class Stockroom(ToolWorld):
    """Options: items: different items in the stockroom, 2 to 40. largest: count of an item in a warehouse, 1 to 1000."""

    name: ClassVar[str] = "stockroom"
    max_turns: ClassVar[int] = 6
    inline: ClassVar[bool] = True
    system: ClassVar[str] = (
        "You answer questions about a stockroom. "
        "Look up what you need with the tools, then reply with one number and nothing else."
    )

    def __init__(self, items: int = 8, largest: int = 20) -> None:
        if not 2 <= items <= len(_NAMES):
            raise ValueError(f"items is {items}; it is 2 to {len(_NAMES)}")
        if not 1 <= largest <= 1_000:
            raise ValueError(f"largest is {largest}; it is 1 to 1000")
        self.items, self.largest = items, largest

    def reset(self, task: Task) -> str:
        self.item, self.places = self._draw(task.split)
        names = [self.item, *self.rng.sample([name for name in _NAMES if name != self.item], self.items - 1)]
        numbers = self.rng.sample(range(100, 1_000), self.items)
        self.ids = {name: f"A{number}" for name, number in zip(names, numbers, strict=True)}
        self.counts = {(i, w): self.rng.randint(0, self.largest) for i in self.ids.values() for w in WAREHOUSES}
        self.seen: set[str] = set()  # what the agent has looked up
        where = " and the ".join(self.places) + (" warehouse" if len(self.places) == 1 else " warehouses")
        return f"How many {self.item}s are there in the {where}?"

    def _draw(self, split: str) -> tuple[str, list[str]]:
        for _ in range(_DRAWS):
            item = self.rng.choice(_NAMES)
            places = sorted(self.rng.sample(WAREHOUSES, self.rng.randint(1, 2)), key=WAREHOUSES.index)
            if belongs(f"{item} in {places}", split):
                return item, places
        raise TaskFailed(f"no question of split '{split}' in {_DRAWS} draws")

    @tool
    def find_item(self, name: Annotated[str, Field(description="for example 'red lamp'")]) -> str:
        """Find the id of an item."""
        if name not in self.ids:
            raise InvalidAction(f"there is no '{short(name)}'.{nearest(short(name), self.ids)}")
        self.seen.add(self.ids[name])
        return self.ids[name]

    @tool
    def stock(self, item_id: str, warehouse: Literal["north", "south", "east"]) -> int:
        """Count an item in one warehouse."""
        if (item_id, warehouse) not in self.counts:
            raise InvalidAction(f"no item has the id '{short(item_id)}'")
        self.seen.add(f"{item_id} {warehouse}")
        return self.counts[item_id, warehouse]

    @property
    def total(self) -> int:
        """The right answer."""
        return sum(self.counts[self.ids[self.item], place] for place in self.places)

    def verify(self) -> Rewards:
        numbers = _NUMBER.findall(self.answer[:_READ])
        return Rewards(outcome=len(numbers) == 1 and len(numbers[0]) < 10 and int(numbers[0]) == self.total)

    def state_key(self) -> str:
        return f"{self.item} in {','.join(self.places)} | {' '.join(sorted(self.seen))}"

    @classmethod
    def corpus(cls) -> Iterator[str]:
        yield cls.system
        yield from (json.dumps(found.spec) for found in cls._tools.values())
        for index in range(32):
            world, task = cls(), cls.task("train", index)
            world._begin(task)
            yield world.reset(task)
            yield f"{world.ids[world.item]} {world.counts}"
