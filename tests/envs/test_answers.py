"""Short answers: normalised as SQuAD does, then compared whole or word by word; the best of the accepted counts."""

import pytest

from troupe.envs.answers import exact_match, normalised, token_f1


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("The  Inn, at Ost.", "inn at ost"),
        ("\tAn apple\na day! ", "apple day"),
        ("Theodor's hat", "theodors hat"),  # an article is a word, not a beginning
        ("a-b", "ab"),  # punctuation is taken out before articles, as in the original
        ("«Élan» – 1872", "«élan» – 1872"),  # ASCII punctuation only, as in the original
        ("the a an", ""),
        ("", ""),
    ],
)
def test_what_is_compared(text, expected):
    assert normalised(text) == expected == normalised(expected)


@pytest.mark.parametrize(
    ("answer", "accepted", "exact", "f1"),
    [
        ("Velmora", ["velmora"], True, 1.0),
        ("the Velmora!", ["A velmora"], True, 1.0),
        ("in Velmora", ["Velmora"], False, 2 / 3),  # precision 1/2, recall 1
        ("Ada Ost", ["Ada Maria Ost"], False, 0.8),  # precision 1, recall 2/3
        ("Ada Ada Ost", ["Ada Ost"], False, 0.8),  # a word counts as often as it is in both
        ("Ost Ada", ["Ada Ost"], False, 1.0),  # the order of words is not looked at
        ("Berg", ["Velmora"], False, 0.0),
        ("Ada", ["Berg", "Ada Ost", "Ada"], True, 1.0),
        ("Ada Berg Ost", ["Berg", "Ada Ost"], False, 0.8),  # against the best, not the first
        ("", ["Velmora"], False, 0.0),
        ("the", ["a"], False, 0.0),
        ("Velmora", [], False, 0.0),
    ],
)
def test_golden_scores(answer, accepted, exact, f1):
    assert exact_match(answer, accepted) is exact
    assert token_f1(answer, accepted) == pytest.approx(f1)
    assert token_f1(answer, iter(accepted)) == token_f1(answer, accepted)
