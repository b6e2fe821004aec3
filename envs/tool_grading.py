"""How right are some tool calls? ToolRL's decomposed reward (arXiv:2504.13958), as a pure function.

With reference calls G and said calls P, each a tool's name and its arguments:

    r_name  = |N_G ∩ N_P| / |N_G ∪ N_P|                               names, compared as multisets
    r_param = Σ over g in G of |keys(g) ∩ keys(p)| / |keys(g) ∪ keys(p)|    p: the call that g is matched with
    r_value = Σ over g in G of the arguments k of g with p[k] = g[k]
    R_correct = 6 · (r_name + r_param + r_value) / S_max − 3,   S_max = 1 + |G| + Σ |keys(g)|

A reference call is matched with a said call of the same name, or with none; of all ways to match the best one counts. So
R_correct lies in [−3, 3]; where nothing should be called it is 3 if nothing was, else −3.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

LOWEST, RANGE = -3.0, 6.0


class ToolCall(NamedTuple):
    """A tool's name and the arguments that it is called with."""

    name: str
    arguments: dict[str, Any]


@dataclass(frozen=True, slots=True)
class Grade:
    """names, arguments, values: r_name, r_param and r_value. most: S_max, what they can be together."""

    names: float
    arguments: float
    values: float
    most: int

    @property
    def correct(self) -> float:
        """R_correct, −3 to 3; exactly 3 for calls that are the reference's, in any order."""
        earned = RANGE * (self.names + self.arguments + self.values) / self.most
        return round(LOWEST + earned, 9)  # without a residue of floats: what is worth the same is equal

    @property
    def parts(self) -> dict[str, float]:
        """What each term adds to −3, by name."""
        return {name: RANGE * getattr(self, name) / self.most for name in ("names", "arguments", "values")}


def grade(said: Sequence[ToolCall], reference: Sequence[ToolCall]) -> Grade:
    """Grades `said` against `reference`, at most some ten calls (all ways to match them are tried)."""
    most = 1 + len(reference) + sum(len(call.arguments) for call in reference)
    arguments, values = _matched(said, reference)
    names = jaccard([call.name for call in said], [call.name for call in reference])
    return Grade(names, arguments, values, most)


def jaccard(one: Sequence[str], other: Sequence[str]) -> float:
    """|one ∩ other| / |one ∪ other| of multisets; 1 if both are empty."""
    a, b = Counter(one), Counter(other)
    union = (a | b).total()
    return (a & b).total() / union if union else 1.0


def _matched(said: Sequence[ToolCall], reference: Sequence[ToolCall]) -> tuple[float, float]:
    """(r_param, r_value) of the best matching. best: set of reference calls that are taken → the most they can be worth."""
    best: dict[int, tuple[float, float]] = {0: (0.0, 0.0)}
    for call in said:
        for taken, (arguments, values) in list(best.items()):
            for i, wanted in enumerate(reference):
                if taken & 1 << i or call.name != wanted.name:
                    continue
                worth = (
                    arguments + jaccard(list(call.arguments), list(wanted.arguments)),
                    values + sum(_same(call.arguments.get(k, _MISSING), v) for k, v in wanted.arguments.items()),
                )
                key = taken | 1 << i
                best[key] = max(best.get(key, (0.0, 0.0)), worth, key=sum)
    return max(best.values(), key=sum)


_MISSING = object()


def _same(one: Any, other: Any) -> bool:
    """Equal as JSON: 1 is 1.0, and true is not 1."""
    return isinstance(one, bool) == isinstance(other, bool) and bool(one == other)
