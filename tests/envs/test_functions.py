"""Functions to write: what a program gives is what was computed otherwise, words say what it does, splits do not meet."""

import random

import pytest

from troupe.envs import functions
from troupe.envs.base import belongs
from troupe.protocol.errors import TaskFailed

WRITTEN = {
    "Keep the numbers that are odd, square each, and return their sum.": ([1, 2, -3], 10),
    "Keep the numbers that can be divided by 3, add 2 to each, and return the largest, or 7 if there is none.": ([1, 2], 7),
    "Keep the numbers between -4 and 4, both included, change the sign of each, and return the first 2 of them as a list.": (
        [5, 4, -4, 0],
        [-4, 4],
    ),
    "Keep the words that have an e in them, cut each after 3 letters, and return them as a list.": (
        "tree owl sea",
        ["tre", "sea"],
    ),
    "Keep the words of at least 4 letters, write each in capitals, and return a dict that says of each how often it occurs.": (
        "moon of moon",
        {"MOON": 2},
    ),
    "Keep the words that read the same backwards, turn each around, and return how many different ones there are.": (
        "noon level noon sea",
        2,
    ),
}


def value(function, argument):
    scope = {}
    exec(function.source, scope)
    return scope[function.name](argument)


def test_a_right_program_gives_what_was_computed_otherwise():
    parts = set()
    for seed in range(120):
        function = functions.draw(random.Random(seed), "train", 8)
        for argument, expected in function.examples:
            given = value(function, argument)
            assert given == expected and type(given) is type(expected), function
        assert function.examples[0][0] in ("", []) and len({repr(argument) for argument, _ in function.examples}) == 8
        parts.update(function.words.rpartition(": ")[2].translate(dict.fromkeys(map(ord, "23456789"))).split(", "))
    assert len(parts) > 30, "nearly all parts were looked at"


@pytest.mark.parametrize("words", WRITTEN)
def test_words_say_what_the_program_does(words):
    argument, expected = WRITTEN[words]
    kind = functions._TEXT if isinstance(argument, str) else functions._NUMBERS
    parts = []
    for of in (kind.keep, kind.change, kind.make):
        parts.append(next((part, k) for part in of for k in range(2, 10) if part.words.format(k=k) in words))
    keep, change, make = (part.words.format(k=k) for part, k in parts)
    assert words in f"{keep}, {change}, and {make}."
    function = functions.Function("f", words, functions._source("f", kind, parts), [])
    assert value(function, argument) == expected


def test_no_function_is_in_both_splits_under_any_name():
    described = {}
    for split in ("train", "heldout"):
        drawn = [functions.draw(random.Random(seed), split, 1) for seed in range(200)]
        described[split] = {function.words.split(". ", 2)[2] for function in drawn}
        assert all(belongs(words, split) for words in described[split]) and len(described[split]) > 150
    assert not described["train"] & described["heldout"]
    with pytest.raises(TaskFailed, match="unknown split 'test'"):
        functions.draw(random.Random(0), "test", 1)
