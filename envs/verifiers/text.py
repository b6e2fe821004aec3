"""Verifiers of a message: is it one of the accepted answers, how near is it, has it the form that was asked for?"""

from __future__ import annotations

import re
from collections.abc import Sequence

from troupe.envs.answers import exact_match, token_f1
from troupe.protocol.errors import ConfigError

_READ = 100_000  # characters of a message that are looked at


class Exact:
    """1 if the answer is one of `accepted`, as `troupe.envs.answers` compares; `normalise=False`: to the letter."""

    inline = True

    def __init__(self, *accepted: str, normalise: bool = True) -> None:
        self.accepted, self.normalise = _some(accepted), normalise

    def __call__(self, answer: str) -> float:
        said = answer[:_READ]
        return float(exact_match(said, self.accepted) if self.normalise else said in self.accepted)


class F1:
    """F1 of the words of the answer against the nearest of `accepted`, 0 to 1."""

    inline = True

    def __init__(self, *accepted: str) -> None:
        self.accepted = _some(accepted)

    def __call__(self, answer: str) -> float:
        return token_f1(answer[:_READ], self.accepted)


class Format:
    """1 if the message is nothing but these tags, in this order, each with something in it: Format("think", "answer").

    pattern: a regular expression that the whole message has to match instead. It is the author's to keep it harmless: while
    Python's `re` searches, nothing can stop it.
    """

    inline = True

    def __init__(self, *tags: str, pattern: str = "") -> None:
        if bool(tags) == bool(pattern):
            raise ConfigError("Format takes the names of tags, or a pattern: one of them")
        self.tags = tags
        try:
            self.pattern = re.compile(pattern, re.DOTALL)
        except re.error as error:
            raise ConfigError(f"Format: the pattern is no regular expression: {error}") from None

    def __call__(self, message: str) -> float:
        said = message[:_READ].strip()
        return float(self._tagged(said) if self.tags else self.pattern.fullmatch(said) is not None)

    def _tagged(self, left: str) -> bool:
        for tag in self.tags:
            opening, closing = f"<{tag}>", f"</{tag}>"
            inside, closed, after = left.removeprefix(opening).partition(closing)
            if not left.startswith(opening) or not closed or not inside.strip() or any(f"<{t}>" in inside for t in self.tags):
                return False
            left = after.lstrip()
        return not left


def inside(tag: str, message: str) -> str:
    """What stands in the last `<tag>…</tag>` of a message, for `of`; empty if there is none."""
    before, closed, _ = message.rpartition(f"</{tag}>")
    _, opened, text = before.rpartition(f"<{tag}>")
    return text.strip() if closed and opened else ""


def _some(accepted: Sequence[str]) -> tuple[str, ...]:
    if not accepted or not all(isinstance(one, str) for one in accepted):
        raise ConfigError(f"accepted answers are one str or more, not {accepted!r}")
    return tuple(accepted)
