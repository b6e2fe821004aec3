"""Was the customer told no, and why? Who recites every reason there is has given none.

Promises: a refusal counts only if it says no and names the reason that the records give, with at most two other reasons beside
it. A rule may be quoted or told in other words, and a record may be quoted: "it is shipped", "only pending orders", a date.
"""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import Literal

from troupe.envs.desk.telling import DATE

Reason = Literal["status", "time", "sale", "stock", "others"]
"""It is not pending, or not delivered; too many or too few days; bought on sale; not in stock; somebody else's."""

_OTHER_REASONS = 2
_NO = re.compile(
    r"\b(can ?not|can't|could not|couldn't|unable|not able|not allowed|not allow|doesn't allow|not permitted|not possible|"
    r"impossible|refuse|decline|sorry|unfortunately|won't|will not|not eligible|against (our|the) (policy|rules))\b"
)
_REASONS: dict[Reason, re.Pattern[str]] = {
    "status": re.compile(
        r"\b(shipped|shipping|dispatched|already (been )?sent|been sent|on (its|the) way|in transit|pending)\b|\bnot yet\b|"
        r"(\b(not|no longer|only|once|until|before)|n't)\b.{0,40}\bdeliver|\bdelivered (order|one|item|good)"
    ),
    "time": re.compile(
        r"\b(\d+|seven|thirty|sixty)[- ]days?\b|\b(weeks?|months?)\b|\btoo (late|long|soon|close|near)\b|"
        rf"\b(ago|expired|deadline|window|period)\b|\barriv|{DATE.pattern}",
        re.IGNORECASE,
    ),
    "sale": re.compile(r"\b(sales?|discount(ed)?|reduced|clearance|marked down)\b"),
    "stock": re.compile(
        r"\b(stock|sold out|unavailable|ran out|run out)\b|(\bnot|n't) available\b|\bno(ne|t any)?\b.{0,40}\bleft\b"
    ),
    "others": re.compile(
        r"\bfriend|(\bnot|n't) yours?\b|\byour own\b|\b(some|any)(one|body) else|\b(an)?other (customer|person|people|account)|"
        r"\bbelongs? to|\bprivacy|\bprivate|\bconfidential|\bthird part"
    ),
}


def says_no(said: str) -> bool:
    """Whether somebody who hears this has been refused something. said: in lower case."""
    return _NO.search(said) is not None


def refused(reason: Reason, said: str, about: Collection[Reason]) -> bool:
    """Whether `said` is a no for this reason. about: the reasons of all that it may be about, which are no other ones."""
    text = said.lower().replace("’", "'")
    named = {one for one, pattern in _REASONS.items() if pattern.search(text)}
    return says_no(text) and reason in named and len(named - {*about}) <= _OTHER_REASONS
