"""Six small schemas, rows for them, and questions about them with the query that answers each.

A schema is two tables of things and a third one that links them: students, courses and enrolments, for example. Some cells
are NULL, some things have no link.

Promises:
- a database is its schema and two seeds: one for the names in it, one for the facts. With the same names and other facts a
  question still means something, and has another answer;
- a question says which columns are wanted, in which order, and the order of the rows only where that counts;
- `shape` is the question without what it compares with: the schema, the kind and the table that it is about.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import dataclass

_FIRST = "Ada Bruno Clara Edda Felix Greta Hugo Ida Jonas Leo Mina Nils Olga Pavel Rosa Tilda"
_LAST = "Berg Dahl Ek Falk Holm Lind Moe Nord Ruud Voss"
_HEADS = "Blue Broken Golden Hidden Last Long Quiet Red Silver Winter"
_NOUNS = "Anchor Bridge Candle Forest Garden Harbour Island Lantern Mirror River Tower Valley"
_TOWNS = ("Bergen", "Hamar", "Lillesand", "Narvik", "Oslo")

THINGS, LINKS = (14, 9), (34, 44)  # rows of the first and second table; of the third, from and to
_NO_CATEGORY, _NO_EXTRA = 0.12, 0.25  # shares of NULL


@dataclass(frozen=True, slots=True)
class Thing:
    """A table of things. label: the unique column that names one. kind: a column of few values, or NULL. size: an integer."""

    table: str
    one: str
    label: str
    kind: str
    kinds: tuple[str, ...]
    size: str
    sizes: range
    person: bool = False

    @property
    def key(self) -> str:
        """The column of the link table that names one."""
        return f"{self.one}_id"


@dataclass(frozen=True, slots=True)
class Schema:
    """links: the table that links one of `first` with one of `second`. amount: an integer. extra: an integer, or NULL."""

    name: str
    first: Thing
    second: Thing
    links: str
    amount: str
    amounts: range
    extra: str
    extras: range

    @property
    def script(self) -> str:
        """CREATE TABLE statements."""
        things = [
            f"CREATE TABLE {t.table} (id INTEGER PRIMARY KEY, {t.label} TEXT, {t.kind} TEXT, {t.size} INTEGER);"
            for t in (self.first, self.second)
        ]
        keys = ", ".join(f"{t.key} INTEGER REFERENCES {t.table}(id)" for t in (self.first, self.second))
        return "\n".join((*things, f"CREATE TABLE {self.links} ({keys}, {self.amount} INTEGER, {self.extra} INTEGER);"))


@dataclass(frozen=True, slots=True)
class Question:
    """text: what is asked. query: the reference. shape: see the module."""

    text: str
    query: str
    shape: str


SCHEMAS = (
    Schema(
        "school",
        Thing("students", "student", "name", "town", _TOWNS, "age", range(16, 30), person=True),
        Thing("courses", "course", "title", "subject", ("art", "history", "law", "physics"), "credits", range(2, 13)),
        "enrolments", "hours", range(10, 90), "grade", range(1, 7),
    ),
    Schema(
        "store",
        Thing("customers", "customer", "name", "town", _TOWNS, "points", range(0, 500), person=True),
        Thing("products", "product", "name", "category", ("food", "garden", "sport", "toys"), "price", range(5, 200)),
        "orders", "quantity", range(1, 12), "rating", range(1, 6),
    ),
    Schema(
        "library",
        Thing("readers", "reader", "name", "town", _TOWNS, "age", range(8, 80), person=True),
        Thing("books", "book", "title", "genre", ("crime", "poetry", "science", "travel"), "pages", range(80, 900)),
        "loans", "days", range(1, 60), "fine", range(1, 25),
    ),
    Schema(
        "airline",
        Thing("pilots", "pilot", "name", "base", _TOWNS, "experience", range(1, 35), person=True),
        Thing("planes", "plane", "name", "maker", ("Airbus", "Boeing", "Embraer"), "seats", range(40, 400)),
        "flights", "passengers", range(10, 400), "delay", range(1, 120),
    ),
    Schema(
        "clinic",
        Thing("doctors", "doctor", "name", "specialty", ("eyes", "heart", "skin"), "salary", range(40, 120), person=True),
        Thing("rooms", "room", "name", "floor", ("cellar", "ground", "upper"), "beds", range(1, 9)),
        "visits", "minutes", range(5, 90), "cost", range(20, 400),
    ),
    Schema(
        "cinema",
        Thing("actors", "actor", "name", "country", ("Chile", "France", "Japan", "Norway"), "age", range(18, 80), person=True),
        Thing("films", "film", "title", "genre", ("comedy", "crime", "drama", "horror"), "length", range(70, 200)),
        "roles", "scenes", range(1, 60), "fee", range(1, 90),
    ),
)  # fmt: skip


def labels(schema: Schema, rng: random.Random) -> tuple[list[str], list[str]]:
    """Names for the things of both tables."""
    made = []
    for thing, count in zip((schema.first, schema.second), THINGS, strict=True):
        firsts, lasts = (_FIRST, _LAST) if thing.person else (_HEADS, _NOUNS)
        made.append(rng.sample([f"{first} {last}" for first in firsts.split() for last in lasts.split()], count))
    return made[0], made[1]


def database(schema: Schema, named: tuple[list[str], list[str]], rng: random.Random) -> str:
    """A script that makes the database of `schema` with these names and facts drawn from `rng`."""
    lines = [schema.script]
    for thing, names in zip((schema.first, schema.second), named, strict=True):
        for number, name in enumerate(rng.sample(names, len(names)), 1):
            kind = _null_or(f"'{rng.choice(thing.kinds)}'", _NO_CATEGORY, rng)
            lines.append(f"INSERT INTO {thing.table} VALUES ({number}, '{name}', {kind}, {rng.choice(thing.sizes)});")
    busy = [rng.sample(range(1, count + 1), count - 2) for count in THINGS]  # two of each have no link
    for _ in range(rng.randint(*LINKS)):
        first, second = (rng.choice(one) for one in busy)
        extra = _null_or(str(rng.choice(schema.extras)), _NO_EXTRA, rng)
        lines.append(f"INSERT INTO {schema.links} VALUES ({first}, {second}, {rng.choice(schema.amounts)}, {extra});")
    return "\n".join(lines)


def _null_or(value: str, share: float, rng: random.Random) -> str:
    return "NULL" if rng.random() < share else value


# -- questions -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _About:
    """What a question is about: a table of things `t`, the other one `o`, and values to compare with."""

    s: Schema
    t: Thing
    o: Thing
    value: str
    other_value: str
    name: str
    size: int
    k: int

    @property
    def join(self) -> str:
        return f"{self.t.table} JOIN {self.s.links} ON {self.t.key} = {self.t.table}.id"

    @property
    def label(self) -> str:
        return f"{self.t.table}.{self.t.label}"


def _count(a: _About) -> tuple[str, str]:
    return (
        f"How many {a.t.table} are there whose {a.t.kind} is {a.value}?",
        f"SELECT count(*) FROM {a.t.table} WHERE {a.t.kind} = '{a.value}'",
    )


def _filter(a: _About) -> tuple[str, str]:
    return (
        f"List the {a.t.label} of each {a.t.one} whose {a.t.size} is above {a.size}.",
        f"SELECT {a.t.label} FROM {a.t.table} WHERE {a.t.size} > {a.size}",
    )


def _either(a: _About) -> tuple[str, str]:
    return (
        f"List the {a.t.label} and the {a.t.size} of each {a.t.one} whose {a.t.kind} is not {a.value}. "
        f"Those without a {a.t.kind} count as well.",
        f"SELECT {a.t.label}, {a.t.size} FROM {a.t.table} WHERE {a.t.kind} <> '{a.value}' OR {a.t.kind} IS NULL",
    )


def _top(a: _About) -> tuple[str, str]:
    return (
        f"Which {a.k} {a.t.table} have the highest {a.t.size}? "
        f"Give the {a.t.label} and the {a.t.size}, highest first, equal ones by {a.t.label}.",
        f"SELECT {a.t.label}, {a.t.size} FROM {a.t.table} ORDER BY {a.t.size} DESC, {a.t.label} LIMIT {a.k}",
    )


def _per_kind(a: _About) -> tuple[str, str]:
    return (
        f"How many {a.t.table} are there for each {a.t.kind}? "
        f"Give the {a.t.kind} and the number. Leave out {a.t.table} without a {a.t.kind}.",
        f"SELECT {a.t.kind}, count(*) FROM {a.t.table} WHERE {a.t.kind} IS NOT NULL GROUP BY {a.t.kind}",
    )


def _mean_per_kind(a: _About) -> tuple[str, str]:
    return (
        f"What is the average {a.t.size} of the {a.t.table} of each {a.t.kind}? Give the {a.t.kind} and the average, "
        f"lowest average first, equal ones by {a.t.kind}. Leave out {a.t.table} without a {a.t.kind}.",
        f"SELECT {a.t.kind}, avg({a.t.size}) FROM {a.t.table} WHERE {a.t.kind} IS NOT NULL "
        f"GROUP BY {a.t.kind} ORDER BY avg({a.t.size}), {a.t.kind}",
    )


def _common(a: _About) -> tuple[str, str]:
    return (
        f"Which {a.t.kind} do at least {a.k} {a.t.table} have? Give each such {a.t.kind}.",
        f"SELECT {a.t.kind} FROM {a.t.table} WHERE {a.t.kind} IS NOT NULL GROUP BY {a.t.kind} HAVING count(*) >= {a.k}",
    )


def _above_mean(a: _About) -> tuple[str, str]:
    return (
        f"Which {a.t.table} have a {a.t.size} above the average {a.t.size} of all {a.t.table}? Give the {a.t.label}.",
        f"SELECT {a.t.label} FROM {a.t.table} WHERE {a.t.size} > (SELECT avg({a.t.size}) FROM {a.t.table})",
    )


def _best_of_kind(a: _About) -> tuple[str, str]:
    return (
        f"Which {a.t.one} has the highest {a.t.size} of its {a.t.kind}? "
        f"Give the {a.t.kind} and the {a.t.label}, all of them where several are equal.",
        f"SELECT {a.t.kind}, {a.t.label} FROM {a.t.table} AS one WHERE {a.t.size} = "
        f"(SELECT max({a.t.size}) FROM {a.t.table} WHERE {a.t.kind} = one.{a.t.kind})",
    )


def _sum_of_one(a: _About) -> tuple[str, str]:
    return (
        f"What is the total {a.s.amount} of the {a.s.links} of the {a.t.one} {a.name}?",
        f"SELECT sum({a.s.amount}) FROM {a.join} WHERE {a.label} = '{a.name}'",
    )


def _linked(a: _About) -> tuple[str, str]:
    return (
        f"Which {a.o.table} are linked with the {a.t.one} {a.name} by {a.s.links}? Give each {a.o.label} once.",
        f"SELECT DISTINCT {a.o.table}.{a.o.label} FROM {a.join} JOIN {a.o.table} ON {a.o.key} = {a.o.table}.id "
        f"WHERE {a.label} = '{a.name}'",
    )


def _links_each(a: _About) -> tuple[str, str]:
    return (
        f"How many {a.s.links} does each {a.t.one} have? Give the {a.t.label} and the number, also of those with none.",
        f"SELECT {a.label}, count({a.t.key}) FROM {a.t.table} LEFT JOIN {a.s.links} ON {a.t.key} = {a.t.table}.id "
        f"GROUP BY {a.t.table}.id",
    )


def _many_links(a: _About) -> tuple[str, str]:
    return (
        f"Which {a.t.table} have more than {a.k} {a.s.links}? Give the {a.t.label} and the number.",
        f"SELECT {a.label}, count(*) FROM {a.join} GROUP BY {a.t.table}.id HAVING count(*) > {a.k}",
    )


def _no_links(a: _About) -> tuple[str, str]:
    return (
        f"Which {a.t.table} have no {a.s.links}? Give the {a.t.label}.",
        f"SELECT {a.t.label} FROM {a.t.table} WHERE id NOT IN (SELECT {a.t.key} FROM {a.s.links})",
    )


def _greatest_sum(a: _About) -> tuple[str, str]:
    return (
        f"Which {a.k} {a.t.table} have the highest total {a.s.amount} of {a.s.links}? "
        f"Give the {a.t.label} and the total, highest first, equal ones by {a.t.label}.",
        f"SELECT {a.label}, sum({a.s.amount}) FROM {a.join} GROUP BY {a.t.table}.id "
        f"ORDER BY sum({a.s.amount}) DESC, {a.label} LIMIT {a.k}",
    )


def _mean_extra(a: _About) -> tuple[str, str]:
    return (
        f"What is the average {a.s.extra} of the {a.s.links} of each {a.t.kind} of {a.t.table}? Give the {a.t.kind} and the "
        f"average. Leave out {a.t.table} without a {a.t.kind}, and {a.s.links} without a {a.s.extra}.",
        f"SELECT {a.t.kind}, avg({a.s.extra}) FROM {a.join} WHERE {a.t.kind} IS NOT NULL AND {a.s.extra} IS NOT NULL "
        f"GROUP BY {a.t.kind}",
    )


def _no_extra(a: _About) -> tuple[str, str]:
    return (
        f"How many {a.s.links} of {a.t.table} whose {a.t.kind} is {a.value} have no {a.s.extra}?",
        f"SELECT count(*) FROM {a.join} WHERE {a.t.kind} = '{a.value}' AND {a.s.extra} IS NULL",
    )


def _both(a: _About) -> tuple[str, str]:
    return (
        f"How many {a.s.links} link a {a.t.one} whose {a.t.kind} is {a.value} with a {a.o.one} whose {a.o.kind} is "
        f"{a.other_value}?",
        f"SELECT count(*) FROM {a.join} JOIN {a.o.table} ON {a.o.key} = {a.o.table}.id "
        f"WHERE {a.t.table}.{a.t.kind} = '{a.value}' AND {a.o.table}.{a.o.kind} = '{a.other_value}'",
    )


KINDS: dict[str, Callable[[_About], tuple[str, str]]] = {
    "count": _count, "filter": _filter, "either": _either, "top": _top, "per_kind": _per_kind, "mean_per_kind": _mean_per_kind,
    "common": _common, "above_mean": _above_mean, "best_of_kind": _best_of_kind, "sum_of_one": _sum_of_one, "linked": _linked,
    "links_each": _links_each, "many_links": _many_links, "no_links": _no_links, "greatest_sum": _greatest_sum,
    "mean_extra": _mean_extra, "no_extra": _no_extra, "both": _both,
}  # fmt: skip


def shapes() -> list[tuple[Schema, str, bool]]:
    """All there are: schema, kind, whether it is about the second table."""
    every = [(schema, kind, second) for schema in SCHEMAS for kind in KINDS for second in (False, True)]
    return [one for one in every if one[1:] != ("both", True)]  # "both" says the same about either table


def shape_of(schema: Schema, kind: str, second: bool) -> str:
    """As text, for `belongs`."""
    return f"{kind} of {(schema.second if second else schema.first).table} in {schema.name}"


def ask(schema: Schema, kind: str, second: bool, named: tuple[list[str], list[str]], rng: random.Random) -> Question:
    """A question of a shape, about a database with these names."""
    thing, other = (schema.second, schema.first) if second else (schema.first, schema.second)
    about = _About(
        schema,
        thing,
        other,
        value=rng.choice(thing.kinds),
        other_value=rng.choice(other.kinds),
        name=rng.choice(named[second]),
        size=rng.choice(thing.sizes[len(thing.sizes) // 4 : 3 * len(thing.sizes) // 4 + 1]),
        k=rng.randint(2, 4),
    )
    text, query = KINDS[kind](about)
    return Question(text, query, shape_of(schema, kind, second))
