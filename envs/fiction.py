"""A small library about a country that does not exist: towns, people, publishers and books, and questions about them.

Promises:
- a seed gives the same library everywhere; nothing in it can be known from elsewhere;
- an entity has one document, which states all of its facts; names are unique, their words are not;
- a question of one hop asks for a fact of an entity; of two hops, for a fact of another one, which only the first one's
  document names. Each has one answer.
"""

from __future__ import annotations

import random
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import product

_TOWNS, _PEOPLE, _PUBLISHERS, _BOOKS = 40, 120, 40, 140

_HEADS = "Bel Cor Dun El Far Gal Hol Is Jor Kel Lor Mar Nor Or Pel Quin Ros Sel Tor Ul Vel Wen Yar Zan"
_PLACES = "mora vik dale stan berg ria ford holm rath mere nock wyn"
_SURNAMES = "ando ek ins ova ard esh imer otti"
_PROVINCES = "Amberland Brakkia Osterreach Sundmark Tarnwold Upper-Ves Lower-Ves Kelland"
_GIVEN = (
    "Ada Bruno Clara Dario Edda Felix Greta Hugo Ida Jonas Klara Leo "
    "Mina Nils Olga Pavel Rosa Stefan Tilda Umar Vera Wim Xenia Yuri"
)
_JOBS = "botanist clockmaker composer diplomat engraver geologist novelist painter pilot surgeon translator weaver"
_GOODS = "bells carpets cheese glass honey kites lace ovens paper pears salt violins"
_NOUNS = (
    "Anchor Bridge Candle Dagger Ember Falcon Garden Harbour Island Jewel Kettle "
    "Lantern Mirror Needle Orchard Pilgrim River Saddle Tower Umbrella Valley Window"
)
_ADJECTIVES = "Broken Crimson Distant Empty Frozen Golden Hidden Last Midnight Paper Quiet Restless Silver Wandering"
_HOUSES = "Press House Books"

_TEXTS = {
    "town": "{name} is a town in the province of {province}. It was founded in {year} and is known for its {good}.",
    "person": "{name} is a {job} who was born in {town} in {year}.",
    "publisher": "{name} is a publishing house in {town}. It was founded by {founder} in {year}.",
    "book": "{name} is a book by {author}. It was published by {publisher} in {year}.",
}
_ASKED = {
    "town": {"province": "In which province is {}?", "year": "In which year was {} founded?", "good": "What is {} known for?"},
    "person": {
        "town": "In which town was {} born?",
        "year": "In which year was {} born?",
        "job": "What is the profession of {}?",
    },
    "publisher": {"town": "In which town is {}?", "founder": "Who founded {}?", "year": "In which year was {} founded?"},
    "book": {
        "author": "Who wrote {}?",
        "publisher": "Which publishing house published {}?",
        "year": "In which year was {} published?",
    },
}
_LINKS = {  # (kind, fact): what the fact is called, of which it is the name
    ("person", "town"): "the birthplace of {}",
    ("publisher", "town"): "the home town of {}",
    ("publisher", "founder"): "the founder of {}",
    ("book", "author"): "the author of {}",
    ("book", "publisher"): "the publisher of {}",
}


@dataclass(frozen=True, slots=True)
class Entity:
    """kind: town, person, publisher or book. facts: what its document states, by name."""

    kind: str
    name: str
    facts: dict[str, str]

    @property
    def text(self) -> str:
        """Its document."""
        return _TEXTS[self.kind].format(name=self.name, **self.facts)


@dataclass(frozen=True, slots=True)
class Question:
    """path: the entities whose documents lead to the answer: the one that the question names, and with two hops another."""

    text: str
    answer: str
    path: tuple[Entity, ...]

    @property
    def hops(self) -> int:
        """How many documents have to be read."""
        return len(self.path)


def write(seed: int) -> list[Entity]:
    """The library of `seed`: 340 entities, in an order that tells nothing."""
    rng = random.Random(f"library/{seed}")

    def year(first: int) -> str:
        return str(rng.randint(first, first + 140))

    def one(entities: list[Entity]) -> str:
        return rng.choice(entities).name

    def names(first: str, second: str, count: int, form: str) -> list[str]:
        return [form.format(*pair) for pair in rng.sample(list(product(first.split(), second.split())), count)]

    towns = [
        Entity(
            "town", name, {"province": rng.choice(_PROVINCES.split()), "year": year(1300), "good": rng.choice(_GOODS.split())}
        )
        for name in names(_HEADS, _PLACES, _TOWNS, "{}{}")
    ]
    surnames = " ".join(names(_HEADS, _SURNAMES, 40, "{}{}"))
    people = [
        Entity("person", name, {"job": rng.choice(_JOBS.split()), "town": one(towns), "year": year(1800)})
        for name in names(_GIVEN, surnames, _PEOPLE, "{} {}")
    ]
    publishers = [
        Entity("publisher", name, {"town": one(towns), "founder": one(people), "year": year(1850)})
        for name in names(_NOUNS, _HOUSES, _PUBLISHERS, "{} {}")
    ]
    books = [
        Entity("book", name, {"author": one(people), "publisher": one(publishers), "year": year(1870)})
        for name in names(_ADJECTIVES, _NOUNS, _BOOKS, "The {} {}")
    ]
    entities = [*towns, *people, *publishers, *books]
    rng.shuffle(entities)
    return entities


def questions(entities: list[Entity]) -> Iterator[Question]:
    """All questions about `entities`, of one hop and of two."""
    by_name = {entity.name: entity for entity in entities}
    for entity in entities:
        for fact, answer in entity.facts.items():
            yield Question(_ASKED[entity.kind][fact].format(entity.name), answer, (entity,))
            if link := _LINKS.get((entity.kind, fact)):
                other = by_name[answer]
                for further, found in other.facts.items():
                    text = _ASKED[other.kind][further].format(link.format(entity.name))
                    yield Question(text, found, (entity, other))
