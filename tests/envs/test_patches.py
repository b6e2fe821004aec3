"""SWE-RL's reward, against numbers worked out by hand."""

import difflib

import pytest

from troupe.envs.patches import Malformed, diff, patched, reward, similarity

FILES = {"a.py": "one\ntwo\nthree\n", "b.py": "b\n"}


def solution(*edits):
    blocks = (f"```python\n### {p}\n<<<<<<< SEARCH\n{s}=======\n{r}>>>>>>> REPLACE\n```" for p, s, r in edits)
    return "<solution>\n" + "\n".join(blocks) + "\n</solution>"


def test_a_diff_has_no_names_and_three_lines_of_context():
    assert diff("1\n2\n3\n4\n5\n6\n", "1\n2\n3\n4\n5\nsix\n") == "@@ -3,4 +3,4 @@\n 3\n 4\n 5\n-6\n+six"
    assert diff("1\n", "1\n") == ""


def test_the_right_patch_earns_one():
    assert reward(solution(("a.py", "two\n", "TWO\n")), FILES, {"a.py": "one\nTWO\nthree\n"}) == 1.0


def test_a_patch_earns_how_near_it_is():
    """-two +TWO against -two +Two: '@@ -1,3 +1,3 @@\\n one\\n-two\\n+TWO\\n three' is 37 characters, two of them differ."""
    text = "@@ -1,3 +1,3 @@\n one\n-two\n+TWO\n three"
    assert len(text) == 37 and diff(FILES["a.py"], "one\nTWO\nthree\n") == text
    oracle = {"a.py": "one\nTwo\nthree\n"}
    assert reward(solution(("a.py", "two\n", "TWO\n")), FILES, oracle) == pytest.approx(2 * 35 / (2 * 37))


def test_the_mean_is_over_the_files_that_either_changes():
    after = {"a.py": "one\nTWO\nthree\n", "b.py": "B\n"}
    assert similarity(FILES, after, after) == 1.0
    assert similarity(FILES, after, {"a.py": after["a.py"]}) == 0.5
    assert similarity(FILES, {"b.py": "B\n"}, {"a.py": after["a.py"]}) == 0.0
    assert similarity(FILES, dict(FILES), dict(FILES)) == 0.0


def test_edits_follow_each_other_and_may_delete():
    made = patched(solution(("a.py", "two\n", "2\n"), ("a.py", "2\nthree\n", ""), ("b.py", "b\n", "b\nc\n")), FILES)
    assert made == {"a.py": "one\n", "b.py": "b\nc\n"}


def test_popular_characters_are_not_junk():
    """difflib would leave out what is frequent in a text of 200 characters or more, that is: nearly all of a long patch."""
    lines = [f"x{i} = {i}\n" for i in range(40)]
    before, after, oracle = "", "".join(lines), "".join(reversed(lines))
    ratios = [difflib.SequenceMatcher(None, diff(before, after), diff(before, oracle), junk).ratio() for junk in (False, True)]
    assert similarity({"f": before}, {"f": after}, {"f": oracle}) == ratios[0] != ratios[1]


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        ("", "write one <solution>"),
        ("two becomes TWO", "write one <solution>"),
        ("<solution></solution><solution></solution>", "write one <solution>"),
        ("</solution><solution>", "write one <solution>"),
        ("<solution>\ntwo\n</solution>", "no search/replace edit"),
        (solution(("a.py", "two\n", "TWO\n")).replace("=======", "====="), "no search/replace edit"),
        (solution(("c.py", "two\n", "TWO\n")), "there is no file 'c.py'"),
        (solution(("a.py", "four\n", "TWO\n")), "not in the file"),
        (solution(("a.py", " two\n", "TWO\n")), "not in the file"),  # indentation counts
        (solution(("a.py", "tw\n", "TWO\n")), "not in the file"),  # whole lines
        (solution(("a.py", "wo\n", "TWO\n")), "not in the file"),
        (solution(("a.py", "two\n", "two\n")), "changes nothing"),
        (solution(("a.py", "two\n", "TWO\n"), ("a.py", "two\n", "2\n")), "not in the file"),  # it is no longer there
    ],
)
def test_what_is_no_edit_or_does_not_apply_earns_minus_one(answer, why):
    with pytest.raises(Malformed, match=why):
        patched(answer, FILES)
    assert reward(answer, FILES, {"a.py": "one\nTWO\nthree\n"}) == -1.0
