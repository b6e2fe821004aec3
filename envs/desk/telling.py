"""Was the customer told what they asked to know? Who recites every answer there is has told none.

Promises: an answer counts only if hardly any other of its kind is said to the same wish: no other status, at most two other
dates, at most three other numbers. What the customer said, the order's number and today's date are no other answers.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

STATUSES = {"pending", "shipped", "delivered"}
_MONTHS = "January|February|March|April|May|June|July|August|September|October|November|December"
DATE = re.compile(
    rf"\d{{4}}-\d\d-\d\d|\b\d{{1,2}}(?:st|nd|rd|th)?(?: of)? (?:{_MONTHS})\b|\b(?:{_MONTHS}) \d{{1,2}}(?:st|nd|rd|th)?\b",
    re.IGNORECASE,
)
_NUMBER = re.compile(r"\d+")
_OTHER_DATES, _OTHER_NUMBERS = 2, 3


def told(ways: Sequence[str], said: str, known: str) -> bool:
    """Whether `said` has the answer, in one of these ways, and not a choice of them. known: what is no other answer."""
    if not any(said_in(way, said) for way in ways):
        return False
    if ways[0] in STATUSES:
        return not any(said_in(other, said) for other in STATUSES - {ways[0]})
    if len(ways) > 1:
        return len(_others(DATE, said, ways, known)) <= _OTHER_DATES
    return len(_others(_NUMBER, DATE.sub(" ", said), ways, known)) <= _OTHER_NUMBERS


def said_in(text: str, said: str) -> bool:
    """Whether it stands there as words of its own: 12 is not in 120."""
    return re.search(rf"(?<![\w-]){re.escape(text)}(?![\w-])", said, re.IGNORECASE) is not None


def _others(kind: re.Pattern[str], said: str, ways: Sequence[str], known: str) -> set[str]:
    found = {one.lower() for one in kind.findall(said)}
    return found - {one.lower() for one in (*ways, *kind.findall(known))}
