"""Where the time of a run went, as a person wants to read it: a table of its steps, and what they come to.

Promises: only what the run has written down is shown, of a live run too; nothing is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.console import Console
from rich.table import Table

from troupe.cluster.run import Run
from troupe.protocol.errors import ConfigError

_WAITS = {
    "start": "for its actors to start",
    "cold_start": "for the cold start",
    "batch": "for a batch",
    "training": "for the learner",
    "sync": "for weights to be proved",
    "evaluation": "for evaluations",
    "checkpoint": "for checkpoints",
    "measuring": "for figures",
    "other": "for other things",
}
_PARTS = {"queueing": "slot", "generating": "model", "world": "world", "verifying": "verifier", "storing": "store"}
_BUSY = {"generator_busy": "generator", "learner_busy": "learner", "overlap": "overlap"}
_SECONDS = {"waited_s": "batch", "training_s": "train", "sync_s": "sync", "evaluation_s": "eval", "checkpoint_s": "save"}
_SHOWN = 20


def line(metrics: Mapping[str, Any]) -> str:
    """One line of the time since the step before, for the live panel; empty if nothing is known of it."""
    whole = metrics.get("interval_s") or 0.0
    if not whole:
        return ""
    waits = [f"{name} {metrics.get(key, 0.0) / whole:.0%}" for key, name in _SECONDS.items() if metrics.get(key)]
    told = f"time     {' · '.join(waits)} of {whole:.1f} s"
    if "overlap" in metrics:
        told += f" · learning beside sampling {metrics['overlap']:.0%}"
    return told


def episode(metrics: Mapping[str, Any]) -> str:
    """One line of the mean episode since the step before; empty if none has ended."""
    if not metrics.get("episode_s"):
        return ""
    return f"episode  {metrics['episode_s']:.2f} s: " + _split(
        {n: metrics[f"episode_{n}_s"] for n in _PARTS}, metrics["episode_s"]
    )


def told(time: Mapping[str, Any]) -> list[str]:
    """Sentences of `time` in a summary."""
    shares = [f"{share:.0%} {_WAITS[name]}" for name, share in time["shares"].items() if round(share, 2)]
    lines = [f"Of {time['seconds'].get('wall', 0.0):.0f} s the run waited {', '.join(shares)}."]
    if {"generator_busy", "learner_busy"} <= time.keys():
        lines.append(f"Generators were busy {time['generator_busy']:.0%} of the time, the learner {time['learner_busy']:.0%}.")
    if "overlap" in time:
        lines[-1] += f" While it trained, they had work {time['overlap']:.0%} of the time."
    if time["episode"]:
        parts = dict(time["episode"])
        whole = parts.pop("seconds")
        lines.append(f"An episode took {whole:.2f} s on average: {_split(parts, whole)}.")
    return lines


def show(run: str, console: Console) -> None:
    """Prints the newest steps, and what the whole run came to. Raises ConfigError if there is nothing yet."""
    opened = Run(run)
    rows = [row for row in opened.metrics() if "interval_s" in row]
    if not rows:
        raise ConfigError(f"'{run}' tells nothing of its time yet: it does after its first step")
    table = Table(box=None, pad_edge=False, header_style="dim")
    for heading in ("step", "seconds", *_SECONDS.values(), *_BUSY.values(), "episode s", *_PARTS.values()):
        table.add_column(heading, justify="right")
    for row in rows[-_SHOWN:]:
        whole = row["interval_s"]
        episode_s = row.get("episode_s", 0.0)
        table.add_row(
            str(row["step"]),
            f"{whole:.1f}",
            *(f"{row[key] / whole:.0%}" if whole else "" for key in _SECONDS),
            *(f"{row[key]:.0%}" if key in row else "" for key in _BUSY),
            f"{episode_s:.2f}" if episode_s else "",
            *(f"{row[f'episode_{name}_s'] / episode_s:.0%}" if episode_s else "" for name in _PARTS),
        )
    console.print(table)
    summary = opened.path / "summary.json"
    if summary.exists() and "time" in (known := opened.summary()):
        console.print("\n".join(["", *told(known["time"])]), soft_wrap=True)
    console.print(f"Who did what when: open {opened.path / 'timeline.json'} at https://ui.perfetto.dev", soft_wrap=True)


def _split(parts: Mapping[str, float], whole: float) -> str:
    """Shares of an episode; what no part accounts for is told too."""
    shares = {name: parts[part] / whole for part, name in _PARTS.items()}
    shares["rest"] = max(0.0, 1.0 - sum(shares.values()))
    return " · ".join(f"{name} {share:.0%}" for name, share in shares.items() if round(share, 2)) or "nothing to tell"
