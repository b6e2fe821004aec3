"""Tasks that always fail, and are therefore not tried again.

Owns the count of each task's own failures. Promises: a task is quarantined at its `after`-th failure and stays so; an
episode counts once, however often it is reported.
"""

from __future__ import annotations

from collections.abc import Mapping


class Quarantine:
    """Failures by task id."""

    def __init__(self, after: int) -> None:
        self._after = after
        self._failures: dict[str, set[str]] = {}
        self.reasons: dict[str, str] = {}
        """Quarantined tasks: id → what the task failed with last."""

    def restore(self, failures: Mapping[str, list[str]]) -> None:
        """What is known of former times: task id → a message for each failure."""
        for task, messages in failures.items():
            for number, message in enumerate(messages):
                self.report(task, f"former {number}", message)

    def report(self, task: str, episode: str, message: str) -> bool:
        """Counts a failure of `task`. True if it is the one by which the task is quarantined."""
        if task in self.reasons:
            return False
        failures = self._failures.setdefault(task, set())
        failures.add(episode)
        if len(failures) < self._after:
            return False
        self.reasons[task] = message
        del self._failures[task]
        return True

    def __contains__(self, task: str) -> bool:
        return task in self.reasons
