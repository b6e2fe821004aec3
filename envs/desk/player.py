"""The desk's scripted player: asks for what it needs, looks things up, does what is allowed and refuses the rest.

It knows what the customer wants and what policy says to it; it does not know what the customer has not said yet.
"""

from __future__ import annotations

import random
from typing import TYPE_CHECKING

from troupe.envs.base import ToolCall
from troupe.envs.desk import records as desk
from troupe.envs.desk.refusing import Reason
from troupe.envs.desk.requests import Request

if TYPE_CHECKING:
    from troupe.envs.desk.world import Desk

_ASK = {
    "email": "What is your e-mail address?",
    "number": "What is the number?",
    "size": "Which size do you need?",
    "address": "What is the new address?",
}
_DONE = {
    "cancel": "{number} is cancelled.",
    "refund": "{order} is refunded.",
    "exchange": "{order} is exchanged for size {size}.",
    "change_address": "{order} goes to {address}.",
}
_NO = "I am sorry, I cannot do that."
_WHY: dict[Reason, str] = {
    "status": "it is {status} already",
    "time": "the day is {day}",
    "sale": "you have bought it on sale",
    "stock": "it is not in stock",
    "others": "it is not yours",
}
_MORE = "Is there anything else?"


class Player:
    """Plays one episode of `world`."""

    def __init__(self, world: Desk) -> None:
        self.world = world
        self.asked: set[tuple[int, str]] = set()  # (wish, fact)
        self.closed = 0  # wishes that are done with

    def act(self, rng: random.Random, noise: float) -> str | ToolCall:
        """The next message or call. noise: share of its moves that are random."""
        if rng.random() < noise:
            return self._anything(rng)
        wishes = self.world.wishes
        if self.closed and "exception" in self.world.heard[-1]:
            return _NO
        if self.closed == len(wishes):
            return _MORE
        return self._ask("email") or self._serve(wishes[self.closed])

    def _ask(self, fact: str) -> str:
        """The question, if it was not asked yet and need be."""
        place = (0 if fact == "email" else self.closed, fact)
        if place in self.asked:
            return ""
        self.asked.add(place)
        return _ASK[fact]

    def _serve(self, wish: Request) -> str | ToolCall:
        world = self.world
        if world.customer not in world.known:
            return ToolCall("find_customer", {"email": world.records["customers"][world.customer]["email"]})
        if wish.number not in world.known:
            return self._ask("number") or self._find(wish)
        name, arguments = wish.change or ("", {})
        for fact in ("size", "address"):
            if fact in arguments and (question := self._ask(fact)):
                return question
        if name == "exchange" and wish.thing not in world.known:
            return ToolCall("stock", {"item": wish.thing})
        if not wish.allowed:
            return self._close(self._no(wish))
        if name and not self._is_done(wish):
            return ToolCall(name, arguments)
        told = f"That is {wish.tell[0][0]}." if wish.tell else ""
        done = _DONE[name].format(**arguments) if name in _DONE else ""
        return self._close(" ".join(text for text in (done, told) if text))

    def _find(self, wish: Request) -> ToolCall:
        """Looks up the order by its number, or one after the other if the customer has none to say."""
        records, known = self.world.records, self.world.known
        if wish.number in " ".join(self.world.heard):
            return ToolCall("look_up", {"number": wish.number})
        kind = "reservations" if wish.number.startswith("R") else "orders"
        mine = [n for n, found in records[kind].items() if found["customer"] == self.world.customer and n not in known]
        return ToolCall("look_up", {"number": min(mine, default=wish.number)})

    def _is_done(self, wish: Request) -> bool:
        now, after = (desk.record(records, wish.number) for records in (self.world.records, self.world.expected))
        return now == after and wish.kind != "damage"

    def _no(self, wish: Request) -> str:
        assert wish.why
        found = desk.record(self.world.records, wish.number)
        why = _WHY[wish.why].format(status=found["status"], day=found.get("delivered") or found.get("arrival"))
        return f"{_NO[:-1]}: {why}."

    def _close(self, text: str) -> str:
        self.closed += 1
        return text

    def _anything(self, rng: random.Random) -> str | ToolCall:
        """A call or a message that fits some wish or other."""
        records = self.world.records
        order = rng.choice(list(records["orders"]))
        number = rng.choice([*records["orders"], *records["reservations"]])
        moves: tuple[str | ToolCall, ...] = (
            ToolCall("look_up", {"number": number}),
            ToolCall("stock", {"item": records["orders"][order]["item"]}),
            ToolCall("cancel", {"number": number}),
            ToolCall("refund", {"order": order}),
            ToolCall("exchange", {"order": order, "size": rng.choice(desk.SIZES)}),
            *_ASK.values(),
            _NO,
            _MORE,
        )
        return rng.choice(moves)
