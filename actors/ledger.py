"""What a run writes down: journal, metrics and summary, in its run folder.

Owns `RUN/journal.jsonl` (what happened), `RUN/metrics.jsonl` (one object a step), `RUN/summary.json` and the TensorBoard
files. Promises:
- a line is whole or absent, and durable before the run goes on; a summary is the old one or the new one;
- after a resume, metrics has exactly one line for each step that counts.
"""

from __future__ import annotations

import json
import os
from collections import deque
from typing import Any

from troupe.actors import journal
from troupe.actors.context import Clock
from troupe.actors.evaluator import read_evaluations
from troupe.protocol.messages import DispatcherStatus

_EVENTS_KEPT = 1000
_ROWS_KEPT = 2000
"""Metrics that are kept in memory, for the detectors of a collapse."""


class Ledger:
    """The run folder as the director writes it."""

    def __init__(self, folder: str, clock: Clock) -> None:
        self.folder = folder
        self._clock = clock
        self._began = clock.now()
        self._events: deque[str] = deque(maxlen=_EVENTS_KEPT)
        self.events_total = 0
        self._restarts: dict[str, int] = {}
        self._tokens = 0
        known = self._known_summary()
        self._wall_before = known.get("wall_s", 0.0)
        self.seconds_before: dict[str, float] = known.get("time", {}).get("seconds", {})
        """Of the directors before: see `timeline.py`."""
        self.metrics: dict[str, Any] = {}
        self.history: list[float] = []
        self.rows: deque[dict[str, Any]] = deque(maxlen=_ROWS_KEPT)
        journal_rows = self._rows("journal.jsonl")
        self.alarms = [row for row in journal_rows if row.get("event") == "alarm"]
        self.remedies = [row for row in journal_rows if row.get("event") == "remedy"]
        self._board: Any = None

    # -- journal -----------------------------------------------------------------------------------------------------

    def note(self, event: str, **details: Any) -> None:
        """Writes one line to the journal."""
        journal.append(self.path("journal.jsonl"), event=event, **details)

    def say(self, text: str) -> None:
        """Writes a sentence for people: journal, and whoever watches the run."""
        self._events.append(text)
        self.events_total += 1
        self.note("said", text=text)

    def warn(self, step: int, kind: str, **details: Any) -> bool:
        """Notes an alarm of the health of `step`; False if it was noted before, by a director that then died."""
        return self._once(self.alarms, "alarm", step=step, kind=kind, **details)

    def treat(self, step: int, action: str, changes: dict[str, Any], restart: int | None) -> bool:
        """Notes what is done about it from the next step on (see `health.in_force`); False if it was noted before."""
        return self._once(self.remedies, "remedy", step=step, action=action, changes=changes, restart=restart)

    def _once(self, known: list[dict[str, Any]], event: str, **details: Any) -> bool:
        name = "kind" if event == "alarm" else "action"
        if any((row["step"], row[name]) == (details["step"], details[name]) for row in known):
            return False
        self.note(event, **details)
        known.append({"event": event, **details})
        return True

    def died(self, actor: str, reason: str) -> None:
        """A child died."""
        self._restarts[actor] = self._restarts.get(actor, 0) + 1
        self.note("died", actor=actor, reason=reason)

    def events_since(self, index: int) -> list[str]:
        """Sentences from number `index` on (the oldest may be forgotten)."""
        first = self.events_total - len(self._events)
        return list(self._events)[max(0, index - first) :]

    def said_since_start_of(self, actor: str) -> list[str]:
        """Sentences since the newest `actor` was started."""
        rows = self._rows("journal.jsonl")
        starts = [n for n, row in enumerate(rows) if row.get("event") == "starting" and row["actor"] == actor]
        return [row["text"] for row in rows[starts[-1] if starts else 0 :] if row.get("event") == "said"]

    def starts_of(self, actor: str) -> int:
        """How many times this run has begun to start `actor`: a start that was cut off counts too."""
        return sum(row.get("event") == "starting" and row.get("actor") == actor for row in self._rows("journal.jsonl"))

    def members(self, kind: str) -> tuple[list[str], list[str]]:
        """Names of that kind whose start was begun and who are still wanted, and of those who are on their way out."""
        last: dict[str, str] = {}
        for row in self._rows("journal.jsonl"):
            if row.get("event") in ("starting", "draining", "retired") and row["actor"].startswith(kind):
                last[row["actor"]] = row["event"]
        names = sorted(last, key=lambda name: (len(name), name))
        return [n for n in names if last[n] == "starting"], [n for n in names if last[n] == "draining"]

    def names(self, kind: str) -> set[str]:
        """Names of that kind that were ever given to an actor of this run."""
        rows = self._rows("journal.jsonl")
        return {row["actor"] for row in rows if row.get("event") == "starting" and row["actor"].startswith(kind)}

    def wanted(self) -> dict[str, int]:
        """Numbers of children that were last asked for while the run was live."""
        asked = [row["wanted"] for row in self._rows("journal.jsonl") if row.get("event") == "scale"]
        return dict(asked[-1]) if asked else {}

    def known(self) -> bool:
        """Has this run begun before?"""
        return bool(self._rows("journal.jsonl"))

    # -- metrics -----------------------------------------------------------------------------------------------------

    def resume_at(self, step: int) -> None:
        """Forgets the lines of steps that will be taken again."""
        journal.keep(self.path("metrics.jsonl"), lambda row: row["step"] <= step)
        rows = self._rows("metrics.jsonl")
        self.history = [float(row.get("success", 0.0)) for row in rows]
        self.rows.extend(rows[-_ROWS_KEPT:])
        if rows:
            self.metrics = dict(rows[-1])
            self._tokens = int(rows[-1]["tokens_trained"])

    def measure(self, step: int, **values: float) -> None:
        """Writes the metrics of one step."""
        self._tokens += int(values.get("policy_tokens", 0))
        row = {"step": step, "time": self._clock.now(), "tokens_trained": self._tokens, **values}
        journal.append(self.path("metrics.jsonl"), **row)
        self.metrics = row
        self.rows.append(row)
        self.history.append(float(values.get("success", 0.0)))
        self._to_board(step, values)

    def _to_board(self, step: int, values: dict[str, float]) -> None:
        # TensorBoard's own writer: unlike its wrappers it needs neither TensorFlow nor torch in this process.
        from tensorboard.compat.proto.event_pb2 import Event
        from tensorboard.compat.proto.summary_pb2 import Summary
        from tensorboard.summary.writer.event_file_writer import EventFileWriter

        if self._board is None:
            self._board = EventFileWriter(self.path("tensorboard"))
        scalars = [Summary.Value(tag=name, simple_value=value) for name, value in values.items()]
        self._board.add_event(Event(wall_time=self._clock.now(), step=step, summary=Summary(value=scalars)))
        self._board.flush()

    # -- summary -----------------------------------------------------------------------------------------------------

    def summarise(
        self, step: int, counts: DispatcherStatus | None, weights: dict[str, Any], finished: bool, **more: Any
    ) -> None:
        """Writes summary.json."""
        scores = read_evaluations(self.path("evals.jsonl"))
        rows = self._rows("metrics.jsonl")
        summary = {
            "finished": finished,
            "steps": step,
            "wall_s": self._wall_before + self._clock.now() - self._began,
            "tokens_generated": counts.tokens if counts else 0,
            "tokens_trained": self._tokens,
            "episodes": counts.completed + counts.failed + counts.cancelled if counts else 0,
            "episodes_failed": counts.failed if counts else 0,
            "episodes_cancelled": counts.cancelled if counts else 0,
            "episodes_retried": counts.retried if counts else 0,
            "episodes_moved": counts.moved if counts else 0,
            "groups_dropped": counts.dropped_groups if counts else 0,
            "groups_filtered": counts.filtered_groups if counts else 0,
            "groups_stale": counts.stale_groups if counts else 0,
            "staleness": _staleness(rows),
            "quarantined": counts.quarantined if counts else {},
            "restarts": self._restarts,
            "eval": {name: _score(scores, at) for name, at in (("first", 0), ("last", -1))},
            "reward": {name: rows[at].get("reward_mean") if rows else None for name, at in (("first", 0), ("last", -1))},
            "weights": weights,
            "alarms": [{name: row[name] for name in ("step", "kind", "since_step", "seen")} for row in self.alarms],
            "remedies": [{name: row[name] for name in ("step", "action", "changes", "restart")} for row in self.remedies],
            **more,
        }
        temporary = self.path("summary.json.tmp")
        with open(temporary, "w") as file:
            json.dump(summary, file, indent=2)
            file.write("\n")
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, self.path("summary.json"))

    def close(self) -> None:
        """Closes the TensorBoard files."""
        if self._board is not None:
            self._board.close()

    def path(self, name: str) -> str:
        """A file of the run folder."""
        return os.path.join(self.folder, name)

    def _rows(self, name: str) -> list[dict[str, Any]]:
        return journal.read(self.path(name))

    def _known_summary(self) -> dict[str, Any]:
        try:
            with open(self.path("summary.json")) as file:
                known: dict[str, Any] = json.load(file)
                return known
        except FileNotFoundError:
            return {}


def _staleness(rows: list[dict[str, Any]]) -> dict[str, float]:
    """Of all tokens that were trained, the share of those that were so many versions behind."""
    sums: dict[int, float] = {}
    for row in rows:
        for name, share in row.items():
            age = name.removeprefix("staleness_")
            if age != name and age.lstrip("-").isdigit():
                sums[int(age)] = sums.get(int(age), 0.0) + share * row.get("policy_tokens", 0.0)
    total = sum(sums.values())
    return {str(age): round(sums[age] / total, 4) for age in sorted(sums)} if total else {}


def _score(scores: list[Any], at: int) -> dict[str, Any] | None:
    from dataclasses import asdict

    return asdict(scores[at]) if scores else None
