"""What went on, in sentences, for those who ask the dispatcher how it is. The oldest are forgotten."""

from __future__ import annotations

from collections import deque

_KEPT = 200


class Notes:
    """Sentences, the latest last."""

    def __init__(self) -> None:
        self._events: deque[str] = deque(maxlen=_KEPT)
        self.last_failure = ""
        """Why something failed last; an empty string: nothing has."""

    def say(self, text: str) -> None:
        """One more."""
        self._events.append(text)

    def fail(self, who: str, reason: str, what: str) -> None:
        """`who` failed for that reason, and `what` follows from it: one sentence for the many episodes of a pool that died."""
        if reason != self.last_failure:
            self.last_failure = reason
            self.say(f"{who}: {reason} ({what})")

    def events(self) -> list[str]:
        """Those that are not forgotten."""
        return list(self._events)
