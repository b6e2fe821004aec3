"""What a check found, for people and for programs."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

Status = Literal["ok", "broken", "warning", "unknown"]
"""Of a promise. `warning`: kept, but somebody should look; `unknown`: it could not be judged here."""

Found = tuple[Status, str]
"""Status and detail of a finding."""

RANK: tuple[Status, ...] = ("broken", "warning", "unknown", "ok")


@dataclass(slots=True)
class Finding:
    """One promise, and what was seen of it."""

    name: str
    status: Status
    detail: str = ""


@dataclass(slots=True)
class Report:
    """What `check` found, in the order in which it was looked at.

    seconds: of "make", "reset", "step", "close": median and longest. episodes, steps: played in the first pass.
    """

    world: str
    findings: list[Finding] = field(default_factory=list)
    seconds: dict[str, tuple[float, float]] = field(default_factory=dict)
    episodes: int = 0
    steps: int = 0

    @property
    def ok(self) -> bool:
        """No promise is broken."""
        return not self.broken

    @property
    def broken(self) -> list[Finding]:
        """The broken promises; the first one may well explain the others."""
        return [finding for finding in self.findings if finding.status == "broken"]

    @property
    def sorted(self) -> list[Finding]:
        """What failed first at the top, then warnings, then what could not be judged."""
        return sorted(self.findings, key=lambda finding: RANK.index(finding.status))

    @property
    def verdict(self) -> str:
        """One line."""
        if self.ok:
            warnings = sum(finding.status == "warning" for finding in self.findings)
            return f"{self.world} conforms" + (f", with {warnings} warning{'s' * (warnings > 1)}" if warnings else "")
        count = f"{len(self.broken)} of {len(self.findings)} promises broken"
        return f"{self.world} does not conform: {count}, first: {self.broken[0].name}"

    @property
    def timing(self) -> str:
        """One line: how long its calls took."""
        spans = (f"{name} {_span(p50)} / {_span(top)}" for name, (p50, top) in self.seconds.items())
        return f"{self.episodes} episodes, {self.steps} steps; median / longest: {', '.join(spans)}"

    def as_json(self) -> dict[str, Any]:
        """Everything, as JSON has it."""
        return {
            "world": self.world,
            "conforms": self.ok,
            "first_broken": self.broken[0].name if self.broken else None,
            "findings": [{"promise": f.name, "status": f.status, "detail": f.detail} for f in self.findings],
            "episodes": self.episodes,
            "steps": self.steps,
            "seconds": {name: {"p50": p50, "max": top} for name, (p50, top) in self.seconds.items()},
        }

    def __str__(self) -> str:
        lines = [f"{f.status:8}{f.name}" + (f": {f.detail}" if f.detail else "") for f in self.sorted]
        return "\n".join((self.verdict, *lines))


def _span(seconds: float) -> str:
    for unit, size in (("s", 1.0), ("ms", 1e-3)):
        if seconds >= size:
            return f"{seconds / size:.3g} {unit}"
    return f"{seconds * 1e6:.0f} µs"
