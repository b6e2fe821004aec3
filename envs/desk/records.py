"""The desk's records, and what can be done with them. All of it is JSON, so that two states can be compared.

Promises: a change that makes no sense (an unknown number, a size that is out of stock) is refused and told. Whether policy
allows a change is not looked at here: that is the agent's to judge.
"""

from __future__ import annotations

import random
from datetime import date, timedelta
from itertools import count
from typing import Any

from troupe.envs.tools import short
from troupe.protocol.errors import InvalidAction, nearest

TODAY = date(2026, 5, 20)
COLOURS = ("black", "blue", "green", "grey", "red", "white")
GARMENTS = ("boots", "cap", "gloves", "jacket", "trousers", "vest")
HUTS = tuple(f"{name} Hut" for name in "Bear Birch Crow Eagle Elk Fox Lake Moss Owl Pine River Stone Wolf".split())  # noqa: SIM905
SIZES = ("S", "M", "L")
_FIRST = ("Ada", "Bruno", "Clara", "Felix", "Greta", "Hugo", "Ida", "Jonas", "Leo", "Mina", "Olga", "Rosa")
_LAST = ("Berg", "Dahl", "Ek", "Falk", "Holm", "Lind", "Moe", "Nord", "Ruud", "Voss")
_STREETS = ("Church Road", "Mill Lane", "North Street", "Park Road", "School Lane", "Station Street")

Records = dict[str, Any]
"""customers, orders, reservations and stock, each by its key; transferred: whether the customer was sent to a human."""


def day(days: int) -> str:
    """The date so many days from today."""
    return (TODAY + timedelta(days)).isoformat()


def address(rng: random.Random) -> str:
    """Somewhere to send an order to."""
    return f"{rng.randint(1, 98)} {rng.choice(_STREETS)}"


class Maker:
    """Makes records, all chance from `rng`. No customer has two orders of one thing, nor two stays in one hut."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.records: Records = {"customers": {}, "orders": {}, "reservations": {}, "stock": {}, "transferred": False}
        self._numbers = iter(rng.sample(range(100, 1000), 200))
        self._names = iter(rng.sample([(a, b) for a in _FIRST for b in _LAST], 20))
        self._ids = count(1)

    def customer(self) -> str:
        """A new customer's id."""
        first, last = next(self._names)
        made = f"C{next(self._ids)}"
        self.records["customers"][made] = {"name": f"{first} {last}", "email": f"{first}.{last}@post.no".lower()}
        return made

    def order(self, customer: str, item: str, status: str, delivered: int = 0, sale: bool = False, size: str = "") -> str:
        """A new order's number. delivered: days ago, for one that is."""
        number = f"O{next(self._numbers)}"
        self.records["orders"][number] = {
            "customer": customer,
            "item": item,
            "size": size or self.rng.choice(SIZES),
            "price": self.rng.randint(20, 250),
            "on_sale": sale,
            "status": status,
            "delivered": day(-delivered) if status == "delivered" else None,
            "address": address(self.rng),
        }
        if item not in self.records["stock"]:
            self.records["stock"][item] = {size: self.rng.randint(1, 9) for size in SIZES}
        return number

    def stay(self, customer: str, hut: str, arrival: int) -> str:
        """A new reservation's number. arrival: in so many days."""
        number = f"R{next(self._numbers)}"
        self.records["reservations"][number] = {
            "customer": customer,
            "hut": hut,
            "arrival": day(arrival),
            "nights": self.rng.randint(1, 6),
            "price": self.rng.randint(60, 400),
            "status": "booked",
        }
        return number


# -- what can be done ------------------------------------------------------------------------------------------------


def record(records: Records, number: str) -> dict[str, Any]:
    """An order or a reservation. Raises InvalidAction."""
    found: dict[str, Any] | None = {**records["orders"], **records["reservations"]}.get(number)
    if found is None:
        raise InvalidAction(f"there is no order or reservation '{short(number)}'")
    return found


def cancel(records: Records, number: str) -> str:
    """Cancels an order or a reservation."""
    _change(record(records, number), number, "cancelled")
    return f"{number} is cancelled"


def refund(records: Records, order: str) -> str:
    """Gives the money back for an order."""
    found = _order(records, order)
    _change(found, order, "refunded")
    return f"{order} is refunded: {found['price']}"


def exchange(records: Records, order: str, size: str) -> str:
    """Exchanges what was ordered for another size."""
    found = _order(records, order)
    stock = records["stock"][found["item"]]
    if stock.get(size, 0) < 1:
        raise InvalidAction(f"the {found['item']} is not in stock in size {short(size)}")
    _change(found, order, "exchanged")
    found["size"] = size
    stock[size] -= 1
    return f"{order} is exchanged for size {size}"


def change_address(records: Records, order: str, address: str) -> str:
    """Sends an order to another address."""
    _order(records, order)["address"] = " ".join(address.split())
    return f"{order} goes to {short(address)}"


def stock(records: Records, item: str) -> dict[str, int]:
    """Counts by size. Raises InvalidAction."""
    found: dict[str, int] | None = records["stock"].get(item)
    if found is None:
        raise InvalidAction(f"there is no item '{short(item)}'.{nearest(short(item), records['stock'])}")
    return found


def _order(records: Records, number: str) -> dict[str, Any]:
    found: dict[str, Any] | None = records["orders"].get(number)
    if found is None:
        raise InvalidAction(f"there is no order '{short(number)}'")
    return found


def _change(found: dict[str, Any], number: str, status: str) -> None:
    if found["status"] in ("cancelled", "refunded", "exchanged"):
        raise InvalidAction(f"{number} is {found['status']} already")
    found["status"] = status
