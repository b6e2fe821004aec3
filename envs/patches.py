"""How near is an edit to the right one? SWE-RL's reward (arXiv:2502.18449, section 2.2), as pure functions.

An answer is `<solution>` … `</solution>`, once, with search/replace edits, each in a code block of its own:

    ```python
    ### shop/prices.py
    <<<<<<< SEARCH
    lines of the file
    =======
    lines to put there
    >>>>>>> REPLACE
    ```

The reward is −1 for an answer that is no such thing or does not apply (its lines are not in the file, or are not changed),
else the similarity of the patch to the right one: per file that either changes, the ratio of
`difflib.SequenceMatcher(a=unified diff of the answer, b=that of the oracle, autojunk=False)`, 0 if only one of them changes the
file; the mean over files.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping

MALFORMED = -1.0
_SOLUTION = re.compile(r"<solution>(.*)</solution>", re.DOTALL)
_EDIT = re.compile(
    r"```[^\n]*\n### (?P<path>[^\n]+)\n<<<<<<< SEARCH\n(?P<search>.*?\n)=======\n(?P<replace>.*?)>>>>>>> REPLACE\n```",
    re.DOTALL,
)


class Malformed(ValueError):
    """The answer is not edits, or they do not apply. Says why in one line."""


def reward(answer: str, files: Mapping[str, str], oracle: Mapping[str, str]) -> float:
    """−1, or 0 to 1. files: path → text before. oracle: path → text after the right patch, of the files that it changes."""
    try:
        return similarity(files, patched(answer, files), oracle)
    except Malformed:
        return MALFORMED


def patched(answer: str, files: Mapping[str, str]) -> dict[str, str]:
    """The edited files, path → text. A searched text is whole lines, and is replaced wherever it is. Raises Malformed."""
    if not answer.count("<solution>") == answer.count("</solution>") == 1 or not (found := _SOLUTION.search(answer)):
        raise Malformed("write one <solution> … </solution>")
    edits = list(_EDIT.finditer(found[1]))
    if not edits:
        raise Malformed("there is no search/replace edit in the solution")
    after: dict[str, str] = {}
    for edit in edits:
        path, search, replace = edit["path"], edit["search"], edit["replace"]
        if path not in files:
            raise Malformed(f"there is no file '{path[:60]}'")
        if search == replace:
            raise Malformed("an edit changes nothing")
        text = "\n" + after.get(path, files[path])  # so that a searched text begins at the beginning of a line
        if "\n" + search not in text:
            raise Malformed("the searched lines are not in the file")
        after[path] = text.replace("\n" + search, "\n" + replace)[1:]
    return after


def similarity(files: Mapping[str, str], after: Mapping[str, str], oracle: Mapping[str, str]) -> float:
    """0 to 1: how near the patch from `files` to `after` is to that from `files` to `oracle`."""
    one, other = ({path: diff(files[path], text) for path, text in texts.items()} for texts in (after, oracle))
    paths = sorted(path for path in {*one, *other} if one.get(path) or other.get(path))
    ratios = [_ratio(one.get(path, ""), other.get(path, "")) for path in paths]
    return sum(ratios) / len(ratios) if ratios else 0.0


def diff(before: str, after: str) -> str:
    """The unified diff, three lines of context, without its two lines of file names; empty if nothing changes."""
    return "\n".join(list(difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=3))[2:])


def _ratio(one: str, other: str) -> float:
    return difflib.SequenceMatcher(None, one, other, autojunk=False).ratio() if one and other else 0.0
