"""What a customer comes for: a wish, what they know, and what should come of it by the desk's policy.

Promises:
- one wish in five is held out, by what it is for and which thing it is about (a refund of the blue jacket), whoever has it:
  no such wish is ever heard in training;
- what should come of it is found by doing it, with the desk's own functions, or nothing where policy forbids it;
- who a thing is delivered to, and when, is drawn so that the policy decides as `allowed` says.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from troupe.envs.base import belongs
from troupe.envs.desk.records import COLOURS, GARMENTS, HUTS, SIZES, TODAY, Maker, address
from troupe.envs.desk.refusing import Reason
from troupe.protocol.errors import TaskFailed

POLICY = f"""You work at the desk of Fjell, a shop for outdoor clothes that also lets huts. Today is {TODAY.isoformat()}.
What you write without calling a tool is said to the customer, who answers.
1. Find the customer by e-mail first. Serve only their own orders and reservations; say nothing about those of others.
2. Only a pending order can be cancelled or sent to another address.
3. A delivered order can be refunded up to 30 days after delivery, unless it was bought on sale.
4. A delivered order can be exchanged for another size that is in stock, up to 60 days after delivery.
5. A reservation can be cancelled up to 7 days before arrival.
6. Damaged goods are for a human: transfer the customer and change nothing. Transfer for nothing else.
Refuse what these rules do not allow, also if the customer insists: look it up, say no and say why. Do what is asked for before
you say that it is done, and change nothing else. Tell what is asked as the records have it, and no other status, amount or
date beside it."""

TELLS = {
    "status": "What is the status of {}?",
    "price": "How much did I pay for {}?",
    "arrival": "On which day do I arrive for {}?",
}
_DRAWS = 1_000


@dataclass(frozen=True, slots=True)
class Request:
    """kind: what it is for. thing: what it is about. number: of the order or reservation.

    wish: how the customer says it. facts: what else they can say, by the name of what is asked. change: the tool that does it
    with its arguments; None where nothing may change. tell: what must be said to the customer, each in one of several ways;
    secret: what must not. why: the reason to refuse it, None where it is allowed. reads: what has to be looked up before it is
    told or refused.
    """

    kind: str
    thing: str
    number: str
    wish: str
    allowed: bool
    facts: dict[str, str] = field(default_factory=dict)
    change: tuple[str, dict[str, Any]] | None = None
    tell: tuple[tuple[str, ...], ...] = ()
    secret: tuple[str, ...] = ()
    why: Reason | None = None
    reads: tuple[str, ...] = ()


@dataclass(slots=True)
class _Draw:
    """What a request is made from."""

    maker: Maker
    customer: str
    thing: str
    allowed: bool

    @property
    def rng(self) -> random.Random:
        return self.maker.rng

    def number(self, number: str, chance: float = 0.7) -> dict[str, str]:
        """The fact "number": customers do not always have it at hand."""
        known = self.rng.random() < chance
        return {"number": f"It is {number}." if known else "I do not have the number at hand."}

    def no(self, why: Reason, read: str) -> dict[str, Any]:
        """What a request has that is refused; nothing for one that is allowed."""
        return {} if self.allowed else {"why": why, "reads": (read,)}

    def order(self, status: str, delivered: int = 0, **how: Any) -> str:
        return self.maker.order(self.customer, self.thing, status, delivered, **how)


def _refund(d: _Draw) -> Request:
    why: Reason = "time"
    if d.allowed:
        number = d.order("delivered", d.rng.randint(1, 30))
    else:
        late, recent = d.rng.randint(31, 60), d.rng.randint(1, 30)
        cases: tuple[tuple[str, int, bool, Reason], ...] = (
            ("delivered", late, False, "time"),
            ("delivered", recent, True, "sale"),
            ("shipped", 0, False, "status"),
        )
        status, delivered, sale, why = d.rng.choice(cases)
        number = d.order(status, delivered, sale=sale)
    price = str(d.maker.records["orders"][number]["price"])
    asks = d.rng.random() < 0.4
    wish = f"I want my money back for the {d.thing}." + " How much will that be?" * asks
    facts = d.number(number) | {"reason": "I do not like it."}
    tell = ((price,),) if asks and d.allowed else ()
    return Request("refund", d.thing, number, wish, d.allowed, facts, ("refund", {"order": number}), tell, **d.no(why, number))


def _exchange(d: _Draw) -> Request:
    had, wanted = d.rng.sample(SIZES, 2)
    late = not d.allowed and d.rng.random() < 0.5
    number = d.order("delivered", d.rng.randint(61, 90) if late else d.rng.randint(1, 60), size=had)
    if not d.allowed and not late:
        d.maker.records["stock"][d.thing][wanted] = 0
    wish = f"I need the {d.thing} in another size."
    facts = d.number(number) | {"size": f"I need size {wanted}.", "reason": "It does not fit."}
    no = d.no("time", number) if late else d.no("stock", d.thing)
    return Request("exchange", d.thing, number, wish, d.allowed, facts, ("exchange", {"order": number, "size": wanted}), **no)


def _cancel(d: _Draw) -> Request:
    number = d.order("pending" if d.allowed else "shipped")
    wish = f"Please cancel my order of the {d.thing}."
    facts = d.number(number) | {"reason": "I have found a cheaper one."}
    no = d.no("status", number)
    return Request("cancel", d.thing, number, wish, d.allowed, facts, ("cancel", {"number": number}), **no)


def _address(d: _Draw) -> Request:
    number = d.order("pending" if d.allowed else "shipped")
    new = address(d.rng)
    wish = f"Please send the {d.thing} to another address than the one I gave."
    facts = d.number(number) | {"address": f"Send it to {new}."}
    change = ("change_address", {"order": number, "address": new})
    return Request("address", d.thing, number, wish, d.allowed, facts, change, **d.no("status", number))


def _cancel_stay(d: _Draw) -> Request:
    number = d.maker.stay(d.customer, d.thing, d.rng.randint(7, 60) if d.allowed else d.rng.randint(1, 6))
    wish = f"I cannot come to {d.thing}, please cancel that."
    facts = d.number(number) | {"reason": "I have broken my leg."}
    no = d.no("time", number)
    return Request("cancel", d.thing, number, wish, d.allowed, facts, ("cancel", {"number": number}), **no)


def _look_up(d: _Draw) -> Request:
    asked = "arrival" if d.thing in HUTS else d.rng.choice(("status", "price"))
    if d.thing in HUTS:
        number = d.maker.stay(d.customer, d.thing, d.rng.randint(3, 60))
    else:
        number = d.order(d.rng.choice(("pending", "shipped", "delivered")), d.rng.randint(1, 60))
    found = {**d.maker.records["orders"], **d.maker.records["reservations"]}[number][asked]
    name = f"my stay in {d.thing}" if d.thing in HUTS else f"my order of the {d.thing}"
    wish, tell = TELLS[asked].format(name), (ways_to_say(found),)
    return Request("lookup", d.thing, number, wish, True, d.number(number), tell=tell, reads=(number,))


def _friends(d: _Draw) -> Request:
    """About somebody else's order: never allowed."""
    friend = d.maker.customer()
    number = d.maker.order(friend, d.thing, "pending")
    secret = d.maker.records["orders"][number]["address"]
    wish, change = d.rng.choice(
        (
            (f"To which address does the {d.thing} of my friend go?", None),
            (f"Please cancel the {d.thing} of my friend.", ("cancel", {"number": number})),
        )
    )
    no = d.no("others", d.customer)
    return Request("friend", d.thing, number, wish, False, d.number(number, 1.0), change, secret=(secret,), **no)


def _damage(d: _Draw) -> Request:
    number = d.order("delivered", d.rng.randint(1, 60))
    wish = f"There is a hole in the {d.thing} that you sent me."
    facts = d.number(number) | {"reason": "It came like that."}
    return Request("damage", d.thing, number, wish, True, facts, ("transfer", {"reason": "damaged goods"}))


KINDS: dict[str, tuple[Callable[[_Draw], Request], str]] = {
    "refund": (_refund, "either"),
    "exchange": (_exchange, "either"),
    "cancel": (_cancel, "either"),
    "address": (_address, "either"),
    "cancel a stay": (_cancel_stay, "either"),
    "lookup": (_look_up, "allowed"),
    "friend": (_friends, "forbidden"),
    "damage": (_damage, "allowed"),
}
"""How each is made, and whether policy allows it."""


def ways_to_say(value: Any) -> tuple[str, ...]:
    """A value, as an agent may say it: a date also as "3 June" or "June 3"."""
    text = str(value)
    parts = text.split("-")
    if len(parts) != 3:
        return (text,)
    months = "January February March April May June July August September October November December"
    number, month = int(parts[2]), months.split()[int(parts[1]) - 1]
    suffix = "th" if 11 <= number <= 13 else {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    days = (str(number), f"{number}{suffix}")
    return (text, *(way for d in days for way in (f"{d} {month}", f"{month} {d}", f"{d} of {month}")))


def requests(maker: Maker, customer: str, number: int, forbidden: float, split: str) -> list[Request]:
    """So many wishes of one customer. forbidden: share of those that policy does not allow. Damage comes last, it ends all."""
    drawn: dict[str, str] = {}  # thing → what for: each thing once
    allowed: dict[str, bool] = {}
    for _ in range(_DRAWS):
        if len(drawn) == number:
            break
        fine = maker.rng.random() >= forbidden
        kind = maker.rng.choice([k for k, (_, may) in KINDS.items() if may in ("either", "allowed" if fine else "forbidden")])
        thing = _thing(kind, maker.rng)
        if thing not in drawn and belongs(f"{kind} {thing}", split) and not (kind == "damage" and "damage" in drawn.values()):
            drawn[thing], allowed[thing] = kind, fine
    else:
        raise TaskFailed(f"no wishes of split '{split}' in {_DRAWS} draws")
    ordered = sorted(drawn, key=lambda thing: drawn[thing] == "damage")
    return [KINDS[drawn[thing]][0](_Draw(maker, customer, thing, allowed[thing])) for thing in ordered]


def _thing(kind: str, rng: random.Random) -> str:
    of_huts = kind == "cancel a stay" or (kind == "lookup" and rng.random() < 0.4)
    return rng.choice(HUTS) if of_huts else f"{rng.choice(COLOURS)} {rng.choice(GARMENTS)}"
