"""Shopping as text, in the manner of WebShop (arXiv:2207.01206): search, compare, choose the options, buy.

An action is `search[words]` or `click[thing]`; the first one in a message counts. Pages, and what can be clicked on them:

    search     nothing; only here can be searched
    results    the number of a product, next page, back (to the page before, or to the search)
    a product  a value of an option, buy, back (to the results)

Buying ends the episode and pays as section 3 of the paper says (equation 1). With what is wanted (U) and what is bought (Y):

    r = r_type * (|U_att & Y_att| + |U_opt & Y_opt| + [y_price <= u_price]) / (|U_att| + |U_opt| + 1)

r_type is the one of WebShop's own code (`get_type_reward`), from m, the share of the wanted product's nouns in its title
that the bought one's title has too: 0 if m = 0; 0.1 if m < 0.1; 0.5 if m <= 0.2 and the two products are neither of the
same kind (there: found by the same query) nor share two categories; else 1.

Promises:
- what is wanted can be had: it is drawn from a product of the shop;
- one wish in five, by the digest of all of it but its price, is held out;
- results come by BM25, equal ones in a fixed order, and products of one title are equal to it (`catalogue`): which one has what
  is wanted has to be read. Matching is exact, because the shop says one thing with one word;
- `attributes`, `options` and `price` are the named parts, and sum to the reward; only a reward of 1 is a success.
"""

from __future__ import annotations

import math
import random
import re
from collections.abc import Iterator, Mapping
from functools import lru_cache
from typing import ClassVar

from troupe.envs.base import InvalidAction, Task, TextWorld, Turn, belongs, rng_of
from troupe.envs.catalogue import COLOURS, Goal, Product, goal, stock
from troupe.envs.search import Index
from troupe.protocol.errors import TaskFailed

_ACTION = re.compile(r"(search|click)\[([^\[\]]*)\]", re.IGNORECASE)
_READ = 4_000  # characters of a message that are looked at
_QUERY = 400  # characters of a query that are searched for
_PAGES = 5
_DRAWS = 1_000


class Shop(TextWorld):
    """Options: products: in the shop, 20 to 900. results: shown on a page, 1 to 10. catalogue: seed of the products."""

    name: ClassVar[str] = "shop"
    max_turns: ClassVar[int] = 12
    inline: ClassVar[bool] = True
    system: ClassVar[str] = (
        "You shop for somebody. Write search[words] to search the shop, and click[thing] for the number of a product, "
        "the value of an option, next page, back or buy. Choose every option before you buy."
    )

    def __init__(self, products: int = 200, results: int = 5, catalogue: int = 0) -> None:
        if not 20 <= products <= 900:
            raise ValueError(f"products is {products}; it is 20 to 900")
        if not 1 <= results <= 10:
            raise ValueError(f"results is {results}; it is 1 to 10")
        self.results = results
        self._index = _index(catalogue, products)

    def reset(self, task: Task) -> str:
        self.goal = self._draw(task.split)
        self.found: list[Product] | None = None  # by the search; None: on the search page
        self.page = 0
        self.product: Product | None = None  # whose page is open
        self.chosen: dict[str, str] = {}
        return self._observation()

    def _draw(self, split: str) -> Goal:
        for _ in range(_DRAWS):
            drawn = goal(self.rng, self.rng.choice(self._index.entities))
            if belongs(drawn.wanted, split):
                return drawn
        raise TaskFailed(f"no wish of split '{split}' in {_DRAWS} draws")

    def step(self, text: str) -> Turn:
        action = _ACTION.search(text[:_READ])
        if action is None:
            raise InvalidAction(f"no action: {self._hint()}")
        verb, thing = action[1].lower(), " ".join(action[2].lower().split())
        if verb == "search":
            self._search(thing)
        elif thing not in self.clickable():
            raise InvalidAction(f"that is not here to be clicked: {self._hint()}")
        elif thing == "buy" and self.product:
            return self._bought(self.product)
        else:
            self._click(thing)
        return Turn(self._observation())

    def _search(self, query: str) -> None:
        if self.found is not None:
            raise InvalidAction(f"search only on the search page: {self._hint()}")
        self.found, self.page = self._index.best(query[:_QUERY], _PAGES * self.results), 0

    def _click(self, thing: str) -> None:
        if thing == "back" and self.product:
            self.product = None
        elif thing == "back":
            self.page -= 1
            self.found = None if self.page < 0 else self.found
        elif thing == "next page":
            self.page += 1
        elif self.product:
            options = self.product.options.items()
            self.chosen |= {name: value for name, values in options for value in values if value.lower() == thing}
        else:
            self.product, self.chosen = self._shown()[int(thing) - 1], {}

    def _bought(self, product: Product) -> Turn:
        parts = pay(self.goal, product, self.chosen)
        total = sum(parts.values())
        return Turn("bought", total, done=True, success=math.isclose(total, 1.0), parts=parts)

    def clickable(self) -> list[str]:
        """What can be clicked on the page, in lower case."""
        if self.product:
            values = [value.lower() for values in self.product.options.values() for value in values]
            return [*values, "buy", "back"]
        if self.found is None:
            return []
        more = ["next page"] if self.results * (self.page + 1) < len(self.found) else []
        return [*(str(number) for number, _ in enumerate(self._shown(), 1)), *more, "back"]

    def _shown(self) -> list[Product]:
        start = self.page * self.results
        return (self.found or [])[start : start + self.results]

    def _hint(self) -> str:
        """What can be done, for example "click[number] or click[back]"."""
        if self.product is None and self.found is None:
            return "search[words]"
        kinds = ["value", "buy"] if self.product else ["number"] if self.found else []
        more = [thing for thing in ("next page", "back") if thing in self.clickable()]
        return " or ".join(f"click[{kind}]" for kind in (*kinds, *more))

    def state_key(self) -> str:
        return self._observation()

    def _observation(self) -> str:
        lines = [self.goal.instruction]
        if self.product:
            lines += [self.product.title, f"price {self.product.price} dollars"]
            lines.append(f"attributes {self.product.features}")
            for name, values in self.product.options.items():
                chosen = self.chosen.get(name)
                lines.append(f"{name} {' '.join(f'({value})' if value == chosen else value for value in values)}")
        elif self.found is not None:
            lines.append(f"results page {self.page + 1}" if self.found else "nothing was found")
            lines += [f"{number} {_line(one)}" for number, one in enumerate(self._shown(), 1)]
        return "\n".join((*lines, self._hint()))

    # -- its scripted player -----------------------------------------------------------------------------------------

    def play(self, rng: random.Random, noise: float) -> str:
        """Looks for a product that has all that is wanted (which it sees without opening it), sets its options, buys it.

        On the last page it takes the best there is. At random: anything that can be clicked, or a search for any one word.
        """
        if rng.random() < noise:
            words = self.goal.wanted.replace(",", "").split()
            return f"click[{rng.choice(things)}]" if (things := self.clickable()) else f"search[{rng.choice(words)}]"
        if self.product:
            return f"click[{self._next(self.product)}]"
        if self.found is None:
            return f"search[{' '.join((*self.goal.attributes, self.goal.like.kind))}]"
        worth = [self._promise(one) for one in self._shown()]
        if "next page" in self.clickable() and max(worth) < 1:
            return "click[next page]"
        return f"click[{worth.index(max(worth)) + 1 if worth else 'back'}]"

    def _next(self, product: Product) -> str:
        """A value that is wanted, to be had and not chosen yet; else to buy, or to go back from what is worth nothing."""
        if self._promise(product) == 0:
            return "back"
        wanted = self.goal.options.items()
        missing = [value for name, value in wanted if value in product.options.get(name, ()) and self.chosen.get(name) != value]
        return missing[0].lower() if missing else "buy"

    def _promise(self, product: Product) -> float:
        """What `product` would be worth with the best options."""
        options = {name: value for name, value in self.goal.options.items() if value in product.options.get(name, ())}
        return sum(pay(self.goal, product, options).values())

    @classmethod
    def corpus(cls) -> Iterator[str]:
        yield cls.system
        yield f"bought nothing was found click[next page] {' '.join(COLOURS)}"
        yield "".join(f" {digit}" for digit in range(10))
        for index in range(96):
            world, task = cls(), cls.task("train", index)
            world.rng = rng_of(task)
            yield world.reset(task)
            for _ in range(cls.max_turns):
                action = world.play(world.rng, noise=0.1)
                yield action
                turn = world.step(action)
                yield turn.text
                if turn.done:
                    break


def _line(product: Product) -> str:
    """A product among the results: what can be wanted of it, so that one can choose without opening each."""
    beyond = [one for one in product.features.split(", ") if one not in product.title]
    options = (" ".join(values) for values in product.options.values())
    return ", ".join((product.title, *beyond, *options, f"{product.price} dollars"))


def type_factor(match: float, alike: bool) -> float:
    """r_type. match: m. alike: the products are of the same kind, or share two categories."""
    if match == 0:
        return 0.0
    if match < 0.1:
        return 0.1
    return 1.0 if alike or match > 0.2 else 0.5


def pay(goal: Goal, product: Product, chosen: Mapping[str, str]) -> dict[str, float]:
    """The named parts of the reward for buying `product` with the options `chosen`; they sum to the paper's r."""
    match = len(goal.like.nouns & product.nouns) / len(goal.like.nouns)
    alike = product.kind == goal.like.kind or len({*product.category} & {*goal.like.category}) >= 2
    each = type_factor(match, alike) / (len(goal.attributes) + len(goal.options) + 1)
    return {
        "attributes": each * len({*goal.attributes} & {*product.attributes}),
        "options": each * len(goal.options.items() & chosen.items()),
        "price": each * (product.price <= goal.price),
    }


@lru_cache(maxsize=4)
def _index(catalogue: int, products: int) -> Index[Product]:
    return Index(stock(catalogue, products))
