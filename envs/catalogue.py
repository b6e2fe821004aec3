"""A generated shop: products with a title, attributes, options and a price, and what somebody may want of them.

Products come in families of four that have one title. What a family differs in (one feature that some have and some have not,
colours, sizes, the price) is nothing that a search can tell apart: it has to be read. So the first that a search finds is a
decoy as often as not.

Promises:
- a seed and a number give the same products everywhere;
- the values of a product's options differ from one another, so that one word names one of them;
- an attribute, an option and a kind are said with the same words everywhere: whether two match needs no guessing.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

_FAMILY = 4
COLOURS = ("black", "white", "red", "blue", "green", "grey")


class _Kind(NamedTuple):
    """category: from wide to narrow. uses: an item has two, as it has features. sizes: none if it has no such option.

    No kind has a brand, a use or a narrow category of another one: of five nouns in a title, two kinds share one at most.
    """

    category: tuple[str, str]
    brands: str
    materials: str
    features: tuple[str, ...]
    uses: str
    sizes: str
    prices: tuple[int, int]


_WORN = ("machine wash", "slim fit", "quick dry", "long lasting")
_POURED = ("dishwasher safe", "leak proof", "easy clean", "heavy duty")
_HOME = ("easy clean", "energy saving", "long lasting", "hand made")
_CLOTHES = "S M L XL"
_KINDS = {
    "shirt": _Kind(
        ("clothing", "tops"), "Arvo Belmira Corda", "cotton linen silk", _WORN, "office summer parties", _CLOTHES, (12, 58)
    ),
    "sweater": _Kind(
        ("clothing", "knitwear"), "Dunova Elstan Farro", "cotton wool silk", _WORN, "winter evenings skiing", _CLOTHES, (22, 88)
    ),
    "skirt": _Kind(
        ("clothing", "bottoms"), "Gilda Hestra Imbo", "cotton linen wool", _WORN, "dancing weddings school", _CLOTHES, (25, 95)
    ),
    "boot": _Kind(
        ("clothing", "shoes"), "Jorvik Kestra Lomond", "leather rubber", _WORN[2:], "hiking snow gardens", "7 8 9 10", (35, 150)
    ),
    "mug": _Kind(
        ("kitchen", "tableware"), "Mirelle Nordo Oxby", "steel glass clay", _POURED, "coffee tea cocoa", "small large", (6, 32)
    ),
    "kettle": _Kind(
        ("kitchen", "appliances"),
        "Pelt Quorn Rasko",
        "steel glass",
        _POURED,
        "camping breakfast guests",
        "small large",
        (18, 78),
    ),
    "pan": _Kind(
        ("kitchen", "cookware"), "Sarto Tilba Ulmer", "steel iron clay", _POURED, "eggs pancakes stew", "small large", (15, 98)
    ),
    "lamp": _Kind(
        ("home", "lighting"), "Vesta Wendel Xanto", "steel glass wood", _HOME, "reading desks hallways", "", (14, 120)
    ),
    "pillow": _Kind(
        ("home", "bedding"),
        "Yarrow Zubin Astrid",
        "cotton linen wool",
        _HOME[2:],
        "sleep sofas flights",
        "small large",
        (9, 48),
    ),
    "shelf": _Kind(
        ("home", "furniture"),
        "Brodo Ceylan Dorset",
        "steel glass wood",
        _HOME[2:],
        "books plants records",
        "small large",
        (28, 190),
    ),
}


@dataclass(frozen=True, slots=True)
class Product:
    """kind: what it is. nouns: those of its title. options: values by name. price: in dollars. lacks: features it has not."""

    title: str
    kind: str
    category: tuple[str, str]
    nouns: frozenset[str]
    attributes: tuple[str, ...]
    options: Mapping[str, tuple[str, ...]]
    price: int
    lacks: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """What a search looks through, with `text`."""
        return self.title

    @property
    def text(self) -> str:
        """Features and category, as a search reads them: it knows no "not", and no options."""
        return " ".join((*self.attributes, *self.lacks, *self.category))

    @property
    def features(self) -> str:
        """What it has and what it has not."""
        return ", ".join((*self.attributes, *(f"not {one}" for one in self.lacks)))


@dataclass(frozen=True, slots=True)
class Goal:
    """What somebody wants: a kind as that of `like`, all of `attributes`, these `options`, for `price` dollars at most."""

    like: Product
    attributes: tuple[str, ...]
    options: Mapping[str, str]
    price: int

    @property
    def wanted(self) -> str:
        """Without the price: what a split is decided by."""
        options = " and ".join(f"{name} {value}" for name, value in self.options.items())
        return f"{', '.join(self.attributes)} {self.like.kind} with {options}"

    @property
    def instruction(self) -> str:
        """What the agent is told."""
        return f"Wanted: {self.wanted}, for at most {self.price} dollars."


def stock(seed: int, count: int) -> list[Product]:
    """`count` products."""
    rng = random.Random(f"catalogue/{seed}")
    families = (_family(rng) for _ in range(-(-count // _FAMILY)))
    return [product for family in families for product in family][:count]


def _family(rng: random.Random) -> list[Product]:
    """Products of one title."""
    name = rng.choice(list(_KINDS))
    kind = _KINDS[name]
    brand, material = rng.choice(kind.brands.split()), rng.choice(kind.materials.split())
    uses, (shown, other) = rng.sample(kind.uses.split(), 2), rng.sample(kind.features, 2)
    title = f"{brand} {material} {name} for {uses[0]} and {uses[1]}, {shown}"
    nouns = frozenset({brand, material, name, *uses})
    has = rng.sample([True, False] * (_FAMILY // 2), _FAMILY)
    return [
        Product(
            title=title,
            kind=name,
            category=kind.category,
            nouns=nouns,
            attributes=(material, shown, other) if one else (material, shown),
            options=_options(rng, kind.sizes.split()),
            price=rng.randint(*kind.prices),
            lacks=() if one else (other,),
        )
        for one in has
    ]


def _options(rng: random.Random, sizes: list[str]) -> dict[str, tuple[str, ...]]:
    """Two colours, and half of the sizes if there are any."""
    options = {"colour": tuple(rng.sample(COLOURS, 2))}
    if sizes:
        some = sorted(rng.sample(range(len(sizes)), len(sizes) // 2))
        options["size"] = tuple(sizes[number] for number in some)
    return options


def goal(rng: random.Random, product: Product) -> Goal:
    """Something that `product` is: one or two of its attributes, a value of each option, and a price that is enough.

    The price is one of the next three tens of dollars above the product's, as WebShop draws it from the tens above.
    """
    chosen = rng.sample(range(len(product.attributes)), rng.randint(1, 2))
    return Goal(
        like=product,
        attributes=tuple(product.attributes[number] for number in sorted(chosen)),
        options={name: rng.choice(values) for name, values in product.options.items()},
        price=(product.price // 10 + rng.randint(1, 3)) * 10,
    )
