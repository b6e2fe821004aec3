"""How many groups a training step may start, and which of those that have ended train.

Owns what is known of each step's groups, by number; it starts nothing itself. Promises:
- a group for step k starts only while `k ≤ version + 1 + max_staleness` (law 4);
- exactly `groups_per_step` groups of a step train; what failed, what a filter dropped, what is too old and what came too late
  is replaced while the step needs it, and the replacements of a step are bounded by a number (law 10);
- a group that did not become durable runs again under its own number (law 7).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from troupe.actors.groups import GROUPS_PER_STEP_LIMIT, Group, Verdict
from troupe.actors.notes import Notes
from troupe.actors.settings import RolloutSettings
from troupe.protocol.errors import TroupeError
from troupe.protocol.messages import Committed

_REPLACEMENTS = 8
"""A step may use this many times its groups before the run is called broken; the filter may use as many again."""


@dataclass(slots=True)
class _Step:
    """The groups of one training step, by number. next: the first ordinal that was never used.

    chosen: those that train, durable ones and those whose commit is under way.
    """

    next: int = 0
    holes: list[int] = field(default_factory=list)
    running: set[int] = field(default_factory=set)
    chosen: set[int] = field(default_factory=set)
    durable: set[int] = field(default_factory=set)
    failed: int = 0
    filtered: int = 0


class Quota:
    """The groups of every step that is not finished; `dropped`, `filtered` and `stale` count those of all steps that do not
    train: all, by the filter, by their age."""

    def __init__(self, settings: RolloutSettings, steps: int, notes: Notes) -> None:
        self._settings, self._last_step, self._notes = settings, steps, notes
        self._steps: dict[int, _Step] = {}
        self._filter_is_spent = False
        self.dropped = self.filtered = self.stale = 0

    def restore(self, known: Committed) -> None:
        """What the store holds of former times."""
        for number, groups in known.groups.items():
            step = self._step(number)
            step.durable, step.chosen = set(groups), set(groups)
        used: dict[int, set[int]] = {}
        for number in [n for groups in known.groups.values() for n in groups] + known.dropped:
            at, ordinal = divmod(number, GROUPS_PER_STEP_LIMIT)
            used.setdefault(at, set()).add(ordinal)
        for at, ordinals in used.items():
            step = self._step(at)
            step.next = max(ordinals) + 1
            # Groups below the highest durable one that are not durable themselves run again under their own numbers.
            step.holes = sorted(set(range(step.next)) - ordinals)
        self.dropped = len(known.dropped)

    def finished(self, version: int) -> None:
        """Steps up to `version` need no more groups."""
        for number in [n for n, step in self._steps.items() if n <= version and not step.running]:
            del self._steps[number]

    def due(self, version: int) -> Iterator[tuple[int, int]]:
        """Every group that the staleness budget allows to start, as (number, step); it runs from then on. Capacity in groups is
        (version + 1 + max_staleness) · groups_per_step − (committed + running), and of each step over-sampling adds
        ⌈oversample · groups_per_step⌉ until enough are chosen. Raises TroupeError if too many of a step have failed."""
        wanted = self._settings.groups_per_step
        started = wanted + math.ceil(round(self._settings.oversample * wanted, 6))
        newest = min(self._last_step, version + 1 + self._settings.max_staleness)
        for at in range(version + 1, newest + 1):
            step = self._step(at)
            while len(step.chosen) < wanted and len(step.durable) + len(step.running) < started:
                ordinal = step.holes[0] if step.holes else step.next
                if ordinal >= GROUPS_PER_STEP_LIMIT or step.failed > (_REPLACEMENTS - 1) * wanted:
                    raise TroupeError(
                        f"step {at}: {ordinal} groups were tried and too few survived their failures; last: "
                        f"{self._notes.last_failure or 'no reason known'}"
                    )
                step.holes = step.holes[1:]
                step.next = max(step.next, ordinal + 1)
                number = at * GROUPS_PER_STEP_LIMIT + ordinal
                step.running.add(number)
                yield number, at

    def judge(self, group: Group) -> Verdict:
        """Whether the group, whose members have all ended, trains; and why not. One that trains is chosen from then on."""
        if group.kind == "eval":
            return "evaluation"
        step, wanted = self._step(group.step), self._settings.groups_per_step
        if group.stopped:
            return group.stopped
        if len(step.chosen - {group.number}) >= wanted:
            return "surplus"
        good = group.ended("completed")
        oldest = min((done.oldest_version for done in good), default=group.min_version)
        if oldest < group.min_version:
            allowed = f"step {group.step} takes none before {group.min_version}"
            self._notes.last_failure = f"group {group.number} has a token of version {oldest}, and {allowed}"
            self._notes.say(f"{self._notes.last_failure}: it is stored and not trained, and another takes its place")
            return "stale"
        rewards = [done.reward for done in good]
        if self._settings.filter == "informative" and len(rewards) > 1 and min(rewards) == max(rewards):
            if step.filtered < (_REPLACEMENTS - 1) * wanted and step.next < GROUPS_PER_STEP_LIMIT:
                return "filtered"
            if not self._filter_is_spent:
                self._filter_is_spent = True
                self._notes.say(
                    f"step {group.step}: {step.filtered} groups had equal rewards and were replaced; further ones train, "
                    "without a gradient (said once)"
                )
        step.chosen.add(group.number)
        return "trains"

    def ended(self, group: Group, verdict: Verdict) -> list[int]:
        """A group of training is in the store, with that verdict. Returns those that run and that nobody needs any more."""
        step = self._step(group.step)
        step.running.discard(group.number)
        if verdict == "trains":
            step.chosen.add(group.number)
            step.durable.add(group.number)
            return list(step.running) if len(step.durable) >= self._settings.groups_per_step else []
        step.chosen.discard(group.number)
        self.dropped += 1
        step.failed += verdict in ("failed", "stale")
        self.stale += verdict == "stale"
        step.filtered += verdict == "filtered"
        self.filtered += verdict == "filtered"
        return []

    def _step(self, number: int) -> _Step:
        return self._steps.setdefault(number, _Step())
