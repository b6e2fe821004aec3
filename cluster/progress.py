"""What a person sees of a run: a live panel on a terminal, one line a step in a log.

Promises: every event of the run is printed once; nothing is printed that the run did not report.
"""

from __future__ import annotations

import sys
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from troupe.cluster import timeline
from troupe.protocol.messages import RunStatus

_BARS = "▁▂▃▄▅▆▇█"


class Progress:
    """Shows the statuses that it is given. Use as a context manager."""

    def __init__(self, name: str, run: str, where: str, console: Console | None = None) -> None:
        self._title = f"troupe · {name} · run {run}"
        self._where = where
        self._console = console or Console(file=sys.stdout, highlight=False, emoji=False)
        self._live: Live | None = None
        self._printed_step = 0
        self._printed_phase = ""

    def __enter__(self) -> Progress:
        if self._console.is_terminal:
            self._live = Live(console=self._console, refresh_per_second=4, transient=True)
            self._live.start()
        else:
            self._console.print(f"{self._title}   {self._where}")
        return self

    def __exit__(self, *exc: object) -> None:
        if self._live is not None:
            self._live.stop()

    def __call__(self, status: RunStatus) -> None:
        for event in status.events:
            self._console.print(f" · {event}", soft_wrap=True)
        if self._live is not None:
            self._live.update(self._panel(status))
            return
        if status.phase != self._printed_phase:
            self._printed_phase = status.phase
            self._console.print(f" · {status.phase}")
        step = int(status.metrics.get("step", 0) or 0)
        if step > self._printed_step:
            self._printed_step = step
            self._console.print(_step_line(status), soft_wrap=True)

    def _panel(self, status: RunStatus) -> Group:
        m = status.metrics
        head = Table.grid(expand=True)
        head.add_column()
        head.add_column(justify="right")
        head.add_row(Text(self._title, style="bold"), Text(f"{status.phase} · {self._where}", style="dim"))
        if "reward_mean" in m:
            pools = sum(name.startswith("env-") and state != "draining" for name, state in status.actors.items())
            lines = [
                f"{_step_line(status)}   {_spark(status.history)}",
                f"rollouts {m.get('trajectories', 0):.0f}/step in {pools} pools · version {status.version} · "
                f"generator busy {m.get('generator_busy', 0):.0%} · learner busy {m.get('learner_busy', 0):.0%} · "
                f"staleness {m.get('staleness_mean', 0):.1f} (max {m.get('staleness_max', 0):.0f}) · "
                f"sync {m.get('sync_s', 0):.2f} s",
            ]
            if "env_step_s_p50" in m:
                steps = " · ".join(f"p{q} {seconds(m[f'env_step_s_p{q}'])}" for q in (50, 90, 99))
                lines.append(f"world steps {steps} · {m.get('episodes_waiting', 0):.0f} episodes wait for a slot")
            lines += [told for told in (timeline.line(m), timeline.episode(m)) if told]
            lines.append(f"health   {status.health}")
            done, total = status.step, status.steps
        else:
            loss = m.get("cold_start_loss")
            lines = [f"{status.phase}" + (f"   loss {loss:.3f}" if loss is not None and status.phase == "cold start" else "")]
            done, total = int(status.progress * 100) if status.phase in ("demonstrations", "cold start") else 0, 100
        body = [Text(" " + line) for line in lines]
        bar = ProgressBar(total=max(1, total), completed=done, width=60)
        return Group(head, *body, Text(" ", end=""), bar)


def _step_line(status: RunStatus) -> str:
    m = status.metrics

    def number(key: str, form: str = ".3f") -> str:
        value = m.get(key)
        return format(value, form) if isinstance(value, int | float) else "–"

    return (
        f" step {int(m.get('step', status.step)):>4}/{status.steps}   success {number('success', '.2f')}   "
        f"reward {number('reward_mean')} σ {number('reward_std')}   entropy {number('entropy')}   kl {number('kl', '.4f')}   "
        f"{_si(m.get('tokens_per_s', 0))} tok/s   {number('seconds', '.1f')} s   actors {int(m.get('actors_alive', 0))}"
    )


def _spark(values: list[float], width: int = 24) -> str:
    if not values:
        return ""
    size = max(1, -(-len(values) // width))
    means = [sum(values[i : i + size]) / len(values[i : i + size]) for i in range(0, len(values), size)]
    return "".join(_BARS[min(7, int(max(0.0, min(1.0, v)) * 7.999))] for v in means)


def _si(value: Any) -> str:
    number = float(value or 0)
    return f"{number / 1000:.1f}k" if number >= 1000 else f"{number:.0f}"


def seconds(value: float) -> str:
    """12 µs, 3.4 ms, 1.2 s."""
    for factor, unit in ((1e6, "µs"), (1e3, "ms")):
        if value * factor < 999.5:
            return f"{value * factor:.3g} {unit}"
    return f"{value:.3g} s"


def closing(summary: dict[str, Any], folder: str, world: str) -> str:
    """What was learned, where it lies, and what to do next."""
    lines = []
    first, last = (summary.get("eval") or {}).get("first"), (summary.get("eval") or {}).get("last")
    if first and last and first["trials"] and last["trials"]:
        lines.append(
            f"Held-out success on {last['trials']} tasks never trained on (temperature "
            f"{last['sampling']['temperature']:g}): {first['success']:.3f} [{first['low']:.3f}, {first['high']:.3f}] before, "
            f"{last['success']:.3f} [{last['low']:.3f}, {last['high']:.3f}] after {summary['steps']} steps "
            f"in {summary['wall_s']:.0f} s."
        )
    if summary.get("episodes_failed") or summary.get("restarts"):
        lines.append(
            f"{summary['episodes_failed']} of {summary['episodes']} episodes stayed broken; restarts: "
            + (", ".join(f"{n} ×{c}" for n, c in summary["restarts"].items()) or "none")
            + "."
        )
    if ages := summary.get("staleness"):
        shares = ", ".join(f"{age}: {share:.0%}" for age, share in ages.items())
        dropped = summary.get("groups_stale", 0)
        lines.append(
            f"Versions that trained tokens were behind: {shares}."
            + (f" {dropped} groups were too old and not trained." if dropped else "")
        )
    for world, calls in (summary.get("env_latency") or {}).items():
        if (step := calls.get("step")) and step["count"]:
            longest = f"p50 {seconds(step['p50_s'])}, p90 {seconds(step['p90_s'])}, p99 {seconds(step['p99_s'])}"
            lines.append(f"Steps of {world}: {longest}, longest {seconds(step['max_s'])}, of {step['count']} in this session.")
    if "time" in summary:
        lines += timeline.told(summary["time"])
    lines += [
        f"Everything lies in {folder} (config, metrics, trajectories, checkpoints, summary.json).",
        "Next:",
        f'  troupe query {folder} "SELECT step, avg(reward) FROM trajectories GROUP BY step ORDER BY step"',
        f"  troupe trace {folder} --best",
        f"  troupe timeline {folder}",
        f"  troupe serve {folder}",
        f"  troupe env play {world}",
    ]
    return "\n".join(lines)
