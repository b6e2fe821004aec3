"""Where the time of a run goes, as the director hears it from everybody once a step.

Owns RUN/timeline.json (see `trace_file.py`) and the sums over the run. Promises:
- to ask costs each actor one message a step; one that does not answer is left out, and asked for the same the next time;
- what is told of a time is of the time since the look before, or since this director began; an actor that died in between takes
  with it what it had not told;
- at most `SPANS` spans of all actors are heard in one look, the newest of each; sums and shares do not depend on that.
"""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from troupe.actors.context import Context, within
from troupe.actors.env_pool import EnvPool
from troupe.actors.generator import Generator
from troupe.actors.learner import Learner
from troupe.actors.store import Store
from troupe.actors.trace_file import TraceFile
from troupe.protocol.errors import ActorLost, NotReady, Overloaded, TimedOut
from troupe.protocol.messages import DispatcherStatus, GetSpans, Spans
from troupe.protocol.spans import SpanLog

SPANS = 20_000

PHASES = {
    "start": ("start actors",),
    "cold_start": ("demonstrations", "cold start"),
    "batch": ("wait for batch",),
    "training": ("train",),
    "sync": ("sync weights",),
    "evaluation": ("evaluate",),
    "checkpoint": ("checkpoint",),
    "measuring": ("measure",),
}
"""What the director does, one after the other: key of the sums → its spans."""

PARTS = ("queueing", "generating", "world", "verifying", "storing")
"""Of an episode. What is left is rendering, recording, and waiting for the pool's event loop."""

_ASK_S = 30.0


class Timeline:
    """Hears the actors of one run. seconds: sums over the run so far, by name; before: those of earlier directors."""

    def __init__(self, context: Context, path: str, before: dict[str, float]) -> None:
        self._context = context
        self._file = TraceFile(path)
        self.own = SpanLog(context.clock.now)
        """The director's."""
        self.seconds: defaultdict[str, float] = defaultdict(float, before)
        self._looked = context.clock.now()
        self._totals: dict[str, tuple[float, dict[str, float]]] = {context.name: (self.own.born, {})}

    async def look(self, names: Sequence[str], counts: DispatcherStatus | None) -> dict[str, float]:
        """Asks all of them, writes down what they tell, and returns metrics of the time since the last look."""
        began, now = self._looked, self._context.clock.now()
        self._looked = now
        own = self.own.told(self._context.name, GetSpans(self._since(self._context.name, self.own.born), SPANS))
        limit = (SPANS - len(own.spans)) // max(1, len(names))
        answers = await asyncio.gather(*(self._ask(name, limit) for name in names))
        told = [answer for answer in answers if answer is not None]
        self._file.append([own, *told], gone=self._file.heard.keys() - {own.name, *names})
        new = self._added(own, [*told, *([_of_dispatcher(counts)] if counts else [])], began)
        new["wall"] = now - began
        for spans in told:
            if spans.name.startswith("generator-"):
                new["generators"] += max(0.0, now - max(began, spans.born))
        new["both"], new["trained"] = _together(told)
        self._totals = {name: known for name, known in self._totals.items() if name in (own.name, "dispatcher", *names)}
        for name, seconds in new.items():
            self.seconds[name] += seconds
        return metrics_of(new)

    def told(self) -> dict[str, Any]:
        """For a summary: seconds by name, and what they come to."""
        return {**summary_of(self.seconds), "seconds": {name: round(s, 3) for name, s in sorted(self.seconds.items())}}

    async def _ask(self, name: str, limit: int) -> Spans | None:
        actor: Any = self._context.ref(name, _class_of(name))
        born, _ = self._file.heard.get(name, (0.0, 0))
        try:
            asked = GetSpans(self._since(name, born), limit)
            spans: Spans = await within(_ASK_S, f"{name}.spans", actor.spans(asked))
            if spans.born != born:  # another life, which counts from zero
                spans = await within(_ASK_S, f"{name}.spans", actor.spans(GetSpans(0, limit)))
        except (ActorLost, NotReady, Overloaded, TimedOut):
            return None
        return spans

    def _since(self, name: str, born: float) -> int:
        known, count = self._file.heard.get(name, (0.0, 0))
        return count if known == born else 0

    def _added(self, own: Spans, told: Iterable[Spans], began: float) -> defaultdict[str, float]:
        """What came to the totals since the last look, at `began`, under the names of the sums."""
        new: defaultdict[str, float] = defaultdict(float)
        mine = self._since_last(own, began)
        for key, names in PHASES.items():
            new[key] = sum(mine.get(name, 0.0) for name in names)
        for spans in told:
            kind = spans.name.split("-")[0]
            for name, seconds in self._since_last(spans, began).items():
                match kind:
                    case "generator" if name == "busy":
                        new["generator_busy"] += seconds
                    case "learner":
                        new["learner_busy" if name == "busy" else f"learner/{name}"] += seconds
                    case "env" if name in PARTS or name in ("episodes", "episode"):
                        new[name] += seconds
                    case "dispatcher":
                        new[name] += seconds
        return new

    def _since_last(self, spans: Spans, began: float) -> dict[str, float]:
        born, before = self._totals.get(spans.name, (spans.born, {}))
        if spans.name not in self._totals and spans.born < began:
            before = spans.totals  # it worked for a director before: of what it did since then nobody knows how much
        if born != spans.born:
            before = {}  # a new life
        self._totals[spans.name] = spans.born, spans.totals
        return {name: seconds - before.get(name, 0.0) for name, seconds in spans.totals.items()}


def _class_of(name: str) -> type[Any]:
    kinds: dict[str, type[Any]] = {"learner": Learner, "store": Store, "generator": Generator, "env": EnvPool}
    return kinds[name.split("-")[0]]


def _of_dispatcher(counts: DispatcherStatus) -> Spans:
    return Spans("dispatcher", counts.born, 0, [], {"granted": float(counts.granted), "queueing": counts.queued_s})


def _together(told: Iterable[Spans]) -> tuple[float, float]:
    """Seconds in which the learner trained and a generator had requests, and in which the learner trained."""
    learner: list[tuple[float, float]] = []
    generators: list[tuple[float, float]] = []
    for spans in told:
        if spans.name == "learner":
            learner += spans.busy
        elif spans.name.startswith("generator-"):
            generators += spans.busy
    learned, generated = _union(learner), _union(generators)
    both = sum(max(0.0, min(b, d) - max(a, c)) for a, b in learned for c, d in generated)
    return both, sum(end - begin for begin, end in learned)


def _union(spans: Iterable[tuple[float, float]]) -> list[tuple[float, float]]:
    """The same moments, as spans that do not meet."""
    found: list[tuple[float, float]] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        else:
            found.append((begin, end))
    return found


def _shares(s: Mapping[str, float]) -> dict[str, float]:
    """Who was busy, as far as it is known. overlap: of the time in which the learner trained, that with requests in flight."""
    parts = {"generator_busy": "generators", "learner_busy": "wall"}
    found = {name: min(1.0, s[name] / s[whole]) for name, whole in parts.items() if name in s and s.get(whole)}
    if s.get("trained"):
        found["overlap"] = min(1.0, s["both"] / s["trained"])
    return found


def _episode(s: Mapping[str, float]) -> dict[str, float]:
    """Mean seconds of an episode, from the moment at which it may begin until it is stored, and of its parts."""
    if not s.get("episodes"):
        return {}
    queueing = s.get("queueing", 0.0) / max(1.0, s.get("granted", 0.0))
    parts = {name: s.get(name, 0.0) / s["episodes"] for name in PARTS} | {"queueing": queueing}
    return {"seconds": s.get("episode", 0.0) / s["episodes"] + queueing, **parts}


def metrics_of(s: Mapping[str, float]) -> dict[str, float]:
    """What a line of metrics.jsonl tells of the sums since the line before."""
    names = {"wall": "interval_s", "batch": "waited_s"}
    names |= {name: f"{name}_s" for name in ("training", "sync", "evaluation", "checkpoint", "measuring")}
    found = _shares(s) | {column: s.get(name, 0.0) for name, column in names.items()}
    found |= {f"episode_{name}_s" if name != "seconds" else "episode_s": value for name, value in _episode(s).items()}
    learner = {name.partition("/")[2]: seconds for name, seconds in s.items() if name.startswith("learner/") and seconds}
    return found | {f"learner_{re.sub('[ -]', '_', name)}_s": seconds for name, seconds in learner.items()}


def summary_of(s: Mapping[str, float]) -> dict[str, Any]:
    """What the sums over a run come to: shares of the wall clock, and the mean episode."""
    wall = max(1e-9, s.get("wall", 0.0))
    shares = {name: s.get(name, 0.0) / wall for name in PHASES}
    shares["other"] = max(0.0, 1.0 - sum(shares.values()))
    return {"shares": shares, **_shares(s), "episode": _episode(s)}
