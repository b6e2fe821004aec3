"""Is a short answer right? Exact match and token F1 against the accepted ones, as question answering is usually scored.

Both compare what `normalised` leaves of a text, as SQuAD's evaluation does (arXiv:1606.05250, section 6.1): without case,
ASCII punctuation, English articles and further space. An answer is worth as much as against the best of `accepted`.
"""

from __future__ import annotations

import re
import string
from collections import Counter
from collections.abc import Iterable

_ARTICLES = re.compile(r"\b(?:a|an|the)\b")
_PUNCTUATION = str.maketrans("", "", string.punctuation)


def normalised(text: str) -> str:
    """`text` as it is compared: "The  Inn, at Ost." is "inn at ost"."""
    return " ".join(_ARTICLES.sub(" ", text.lower().translate(_PUNCTUATION)).split())


def exact_match(answer: str, accepted: Iterable[str]) -> bool:
    """Whether `answer` is one of `accepted`. An answer of which nothing is left matches none."""
    said = normalised(answer)
    return bool(said) and said in {normalised(one) for one in accepted}


def token_f1(answer: str, accepted: Iterable[str]) -> float:
    """Harmonic mean of precision and recall over words (each as often as it occurs), 0 to 1; 0 without any accepted."""
    return max((_f1(normalised(answer).split(), normalised(one).split()) for one in accepted), default=0.0)


def _f1(said: list[str], right: list[str]) -> float:
    shared = (Counter(said) & Counter(right)).total()
    return 2 * shared / (len(said) + len(right)) if shared else 0.0
