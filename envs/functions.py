"""Small functions to write: what one should do, in words; a right program; and examples, computed otherwise than by it.

A function keeps some items of a list of numbers, or some words of a text, changes each, and makes one value of them. There are
some 12,000 of them, beside their names. One in five, by the digest of its description, is held out, whatever it is called.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from typing import Any, NamedTuple

from troupe.envs.base import belongs
from troupe.protocol.errors import TaskFailed

_DRAWS = 1_000
_NAMES = ("pick", "solve", "collect", "compute", "work_out")
_WORDS = (
    "river",
    "stone",
    "Anna",
    "apple",
    "of",
    "tree",
    "level",
    "owl",
    "green",
    "moon",
    "It",
    "under",
    "noon",
    "sea",
    "eagle",
)


class _Part(NamedTuple):
    """words, code: with {k}, a number. run: the same, given the item or the items, and k."""

    words: str
    code: str
    run: Callable[[Any, int], Any]


class _Kind(NamedTuple):
    """argument: of the function, with what it is. item, items: how code calls them. keep, change, make: a part of each."""

    argument: str
    about: str
    item: str
    items: str
    draw: Callable[[random.Random], Any]
    split: Callable[[Any], list[Any]]
    keep: tuple[_Part, ...]
    change: tuple[_Part, ...]
    make: tuple[_Part, ...]


_NUMBERS = _Kind(
    "numbers",
    "a list of whole numbers",
    "n",
    "numbers",
    lambda rng: [rng.randint(-20, 30) for _ in range(rng.randint(4, 8))],
    list,
    (
        _Part("Keep the numbers that are even", "n % 2 == 0", lambda n, k: not n & 1),
        _Part("Keep the numbers that are odd", "n % 2 == 1", lambda n, k: bool(n & 1)),
        _Part("Keep the numbers that can be divided by {k}", "n % {k} == 0", lambda n, k: n // k * k == n),
        _Part("Keep the numbers that are greater than {k}", "n > {k}", lambda n, k: n - k > 0),
        _Part("Keep the numbers that are smaller than {k}", "n < {k}", lambda n, k: k - n > 0),
        _Part("Keep the numbers between -{k} and {k}, both included", "-{k} <= n <= {k}", lambda n, k: abs(n) <= k),
    ),
    (
        _Part("square each", "n * n", lambda n, k: n**2),
        _Part("add {k} to each", "n + {k}", lambda n, k: n - -k),
        _Part("multiply each by {k}", "n * {k}", lambda n, k: sum([n] * k)),
        _Part("take {k} from each", "n - {k}", lambda n, k: -(k - n)),
        _Part("drop the sign of each", "abs(n)", lambda n, k: max(n, -n)),
        _Part("change the sign of each", "-n", lambda n, k: 0 - n),
    ),
    (
        _Part("return their sum", "sum(kept)", lambda kept, k: sum(sorted(kept))),
        _Part("return how many different ones there are", "len(set(kept))", lambda kept, k: len(Counter(kept))),
        _Part(
            "return the largest, or {k} if there is none",
            "max(kept, default={k})",
            lambda kept, k: sorted(kept)[-1] if kept else k,
        ),
        _Part(
            "return the smallest, or {k} if there is none",
            "min(kept, default={k})",
            lambda kept, k: sorted(kept)[0] if kept else k,
        ),
        _Part("return them as a list, the smallest first", "sorted(kept)", lambda kept, k: sorted(kept, reverse=True)[::-1]),
        _Part("return the first {k} of them as a list", "kept[:{k}]", lambda kept, k: [*kept][: min(k, len(kept))]),
    ),
)
_TEXT = _Kind(
    "text",
    "words with single spaces between them",
    "word",
    "text.split()",
    lambda rng: " ".join(rng.choice(_WORDS) for _ in range(rng.randint(4, 8))),
    str.split,
    (
        _Part("Keep the words of at least {k} letters", "len(word) >= {k}", lambda word, k: word[k - 1 :] != ""),
        _Part("Keep the words of at most {k} letters", "len(word) <= {k}", lambda word, k: word[k:] == ""),
        _Part("Keep the words that have an e in them", '"e" in word', lambda word, k: word.count("e") > 0),
        _Part("Keep the words that read the same backwards", "word == word[::-1]", lambda w, k: [*w] == [*reversed(w)]),
        _Part("Keep the words that begin with a small letter", "word[0].islower()", lambda word, k: word[0] in "aegklmnorstu"),
    ),
    (
        _Part("write each in capitals", "word.upper()", lambda word, k: "".join(letter.upper() for letter in word)),
        _Part("turn each around", "word[::-1]", lambda word, k: "".join(reversed(word))),
        _Part("cut each after {k} letters", "word[:{k}]", lambda word, k: "".join([*word][:k])),
        _Part("write each {k} times in a row", "word * {k}", lambda word, k: "".join([word] * k)),
        _Part("take the length of each", "len(word)", lambda word, k: sum(1 for _ in word)),
    ),
    (
        _Part("return them as a list", "kept", lambda kept, k: [*kept]),
        _Part("return how many different ones there are", "len(set(kept))", lambda kept, k: len(Counter(kept))),
        _Part("return the last {k} of them as a list", "kept[-{k}:]", lambda kept, k: kept[max(0, len(kept) - k) :]),
        _Part(
            "return a dict that says of each how often it occurs",
            "{{x: kept.count(x) for x in kept}}",
            lambda kept, k: dict(Counter(kept)),
        ),
    ),
)


class Function(NamedTuple):
    """words: what it should do. source: a right program. examples: arguments and values; the first one's argument is empty."""

    name: str
    words: str
    source: str
    examples: list[tuple[Any, Any]]

    def call(self, argument: Any) -> str:
        """The expression that calls it."""
        return f"{self.name}({argument!r})"


def draw(rng: random.Random, split: str, examples: int) -> Function:
    """A function of `split`, with that many examples. Raises TaskFailed for an unknown split."""
    for _ in range(_DRAWS):
        kind = rng.choice((_NUMBERS, _TEXT))
        parts = [(rng.choice(of), rng.randint(2, 9)) for of in (kind.keep, kind.change, kind.make)]
        keep, change, make = (part.words.format(k=k) for part, k in parts)
        words = f"{keep}, {change}, and {make}."
        if belongs(words, split):
            name = rng.choice(_NAMES)
            about = f"Write the Python function {name}({kind.argument}). What it is given: {kind.about}. {words}"
            return Function(name, about, _source(name, kind, parts), _examples(rng, kind, parts, examples))
    raise TaskFailed(f"no function of split '{split}' in {_DRAWS} draws")


def _source(name: str, kind: _Kind, parts: list[tuple[_Part, int]]) -> str:
    keep, change, make = (part.code.format(k=k) for part, k in parts)
    kept = f"[{change} for {kind.item} in {kind.items} if {keep}]"
    return f"def {name}({kind.argument}):\n    kept = {kept}\n    return {make}"


def _examples(rng: random.Random, kind: _Kind, parts: list[tuple[_Part, int]], count: int) -> list[tuple[Any, Any]]:
    (keep, least), (change, by), (make, most) = parts
    arguments: list[Any] = ["" if kind is _TEXT else []]
    while len(arguments) < count:
        drawn = kind.draw(rng)
        if drawn not in arguments:
            arguments.append(drawn)
    kept = ([change.run(one, by) for one in kind.split(argument) if keep.run(one, least)] for argument in arguments)
    return [(argument, make.run(values, most)) for argument, values in zip(arguments, kept, strict=True)]
