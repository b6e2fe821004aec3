"""One trajectory as `troupe trace` prints it: turns, tool calls, rewards, and which tokens are trained.

Promises: what is shown as sampled is exactly what has provenance `POLICY`; the pieces of a branch, joined, are its text;
without colours, marks that no content can forge say the same.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator
from itertools import pairwise
from typing import Any, get_args

import numpy as np
from rich.console import Console
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from troupe.cluster.spelling import Spell, decoded, harmless, piece
from troupe.cluster.trace_data import PROVENANCE, counts, summed, why_not_trained
from troupe.protocol.trajectory import ENVIRONMENT, POLICY, TEMPLATE, Node, Step, StopReason, Trajectory

_MARKS = {TEMPLATE: ("⟨", "⟩"), POLICY: ("⟦", "⟧"), ENVIRONMENT: ("", "")}
_NEWLINES = {TEMPLATE: "⏎", POLICY: "⏎\n", ENVIRONMENT: "\n"}
_STYLES = {TEMPLATE: "dim", ENVIRONMENT: ""}
_SHADES = ((0.8, "bold green"), (0.4, "bold cyan"), (0.1, "bold yellow"), (0.0, "bold red"))
"""Of a sampled token: the first whose probability it reaches."""

_STOPS: dict[StopReason, str] = {
    "terminated": "the episode was over",
    "max_turns": "the agent used up its turns",
    "max_tokens": "the trajectory used up its tokens",
    "context_window": "the next turn would not fit into the model's context",
    "max_tool_calls": "the agent used up its tool calls",
    "wall_clock": "something took too long",
    "failed": "it broke",
    "cancelled": "nobody needed it any more",
}
assert set(_STOPS) == set(get_args(StopReason))

_DATA_SHOWN = 400


class Page:
    """Prints one trajectory onto `console`."""

    def __init__(self, console: Console, trajectory: Trajectory, trains: bool, spell: Spell | None, note: str) -> None:
        self._console, self._t, self._spell, self._note = console, trajectory, spell, note
        self._why_not = why_not_trained(trajectory, trains)
        self._marks = console.color_system is None

    def show(self, only: int | None, tokens: bool) -> None:
        self._header()
        branches = list(self._t.branches())
        seen: set[int] = set()
        for number, path in enumerate(branches, 1):
            if only in (None, number):
                fresh = path if only else [index for index in path if index not in seen]
                if len(branches) > 1:
                    self._branch(number, len(branches), [index for index in path if index in seen], whole=only is not None)
                self._messages(path, fresh, tokens)
            seen.update(path)
        if only is None:
            told = {node.step for node in self._t.nodes}
            for index, step in enumerate(self._t.steps):
                if index not in told:
                    self._turn(index)
                    self._line("no message of this turn was recorded", "dim")
                    self._calls(step)
        self._console.print()

    def _header(self) -> None:
        t = self._t
        template, policy, environment = counts(t)
        low, high = t.versions
        data = json.dumps(t.task.data, ensure_ascii=False) if t.task.data else ""
        rows = {
            "trajectory": f"{t.id} · group {t.group}, member {t.member}, attempt {t.attempt} · {t.kind}, step {t.step}",
            "task": f"{t.task.id} · {t.task.env}, split {t.task.split}, seed {t.task.seed}",
            "data": data if len(data) <= _DATA_SHOWN else f"{data[:_DATA_SHOWN]}… (--json has all)",
            "ended": f"{t.status}: {_STOPS[t.stop]} ({t.stop})",
            "failure": f"{t.failure.kind}, {t.failure.type}: {t.failure.message}" if t.failure else "",
            "where": t.failure.where if t.failure else "",
            "reward": _reward(t.reward, summed(t.steps)) if t.status == "completed" else "none: it was not completed",
            "success": {None: "no verdict", True: "yes", False: "no"}[t.success],
            "trained": f"no: {self._why_not}" if self._why_not else "yes",
            "tokens": f"{policy} policy, {template} template, {environment} environment: {sum(counts(t))} in all",
            "versions": "" if low < 0 else f"{low}" if low == high else f"{low} to {high}",
            "sampling": " · ".join(f"{name} {_plain(value)}" for name, value in t.sampling.items()),
            "forked": f"from {t.fork.episode}, which said the first {t.fork.tokens} tokens of the policy" if t.fork else "",
            "ran": f"{t.seconds:.2f} s" + (f" in {t.pool}" if t.pool else "") + f", seed {t.seed}",
        }
        colour = {"completed": "bold", "failed": "bold red", "cancelled": "yellow"}[t.status]
        grid = Table.grid(padding=(0, 2))
        for name, value in rows.items():
            if value:
                style = colour if name in ("ended", "failure") else "bold" if name in ("trajectory", "reward") else ""
                grid.add_row(Text(name, "dim"), Text(harmless(value, keep="\n" if name == "failure" else ""), style))
        grid.add_row(Text("legend", "dim"), self._legend())
        self._console.print(grid)
        if self._note:
            self._line(self._note, "yellow", indent=0)

    def _legend(self) -> Text:
        meaning = {
            POLICY: f"sampled, not trained ({self._why_not})" if self._why_not else "sampled and trained",
            TEMPLATE: "scaffold",
            ENVIRONMENT: "what came back",
        }
        styles = _STYLES | {POLICY: _SHADES[0][1]}
        marks = _MARKS if self._marks else dict.fromkeys(_MARKS, ("", ""))
        legend = Text("   ").join(Text(word.join(marks[kind]), styles[kind]) for kind, word in meaning.items())
        if self._marks:
            return legend
        shades = [Text(f"≥{p:.0%}" if p else f"<{_SHADES[-2][0]:.0%}", style) for p, style in _SHADES]
        return Text("   by probability ").join([legend, Text(" ").join(shades)])

    def _branch(self, number: int, total: int, shared: list[int], whole: bool) -> None:
        """Heading of a branch; the nodes in `shared` are of earlier ones too, and shown only if it is shown `whole`."""
        self._console.print()
        self._console.print(Rule(Text(f"branch {number} of {total}", "bold"), align="left", characters="═", style="dim"))
        if shared:
            size = sum(len(self._t.nodes[index].tokens) for index in shared)
            there = [word for word, off in (("shown", whole), ("trained", self._why_not)) if not off]
            where = f", and {' and '.join(there)} there" if there else ""
            self._line(f"its first {len(shared)} messages ({size} tokens) are an earlier branch's too{where}", "dim")

    def _messages(self, path: list[int], fresh: list[int], tokens: bool) -> None:
        nodes = self._t.nodes
        acts = {nodes[index].step: index for index in fresh if len(nodes[index].logprobs) and nodes[index].step >= 0}
        offsets = dict(zip(path, np.cumsum([0, *(len(nodes[index].tokens) for index in path)]).tolist(), strict=False))
        turn = -1
        for index in fresh:
            node = nodes[index]
            if node.step != turn:
                turn = node.step
                self._turn(turn)
            self._message(node)
            if tokens and len(node.tokens):
                self._console.print(Padding(self._token_table(node, offsets[index]), (0, 0, 0, 4)))
            if acts.get(node.step) == index:
                self._calls(self._t.steps[node.step])

    def _turn(self, index: int) -> None:
        self._console.print()
        if index < 0:
            self._console.print(Rule(Text("outside of turns", "bold"), align="left", style="dim"))
            return
        step = self._t.steps[index]
        title = Text(f"turn {index + 1} of {len(self._t.steps)}", "bold")
        self._console.print(Rule(title, align="left", style="dim"))
        facts = f"reward {_reward(step.reward, step.parts)} · generated in {step.generate_s:.2f} s, world {step.env_s:.2f} s"
        self._line(facts + (f" · state {step.state_key}" if step.state_key else ""), "dim", keep="")
        flags = {
            "the action was invalid": step.invalid,
            "the turn was cut by its token limit": step.finish == "length",
            "the turn was cut from outside": step.finish == "abort",
            "the episode ended here": step.terminated,
            "a limit stopped the episode here": step.truncated,
        }
        for flag in (flag for flag, on in flags.items() if on):
            self._line(f"! {flag}", "yellow")

    def _message(self, node: Node) -> None:
        who = node.role if node.agent == "main" else f"{node.role} ({node.agent})"
        head = Text().append(harmless(who, keep=""), "bold")
        if len(node.logprobs):
            least = int(node.logprobs.argmin())
            shown = f"{piece(int(node.tokens[node.provenance == POLICY][least]), self._spell)} {_chance(node.logprobs[least])}"
            head.append(
                f"  {len(node.logprobs)} tokens {'sampled' if self._why_not else 'trained'} · mean logprob "
                f"{node.logprobs.mean():.2f}, least likely {shown} · version {', '.join(map(str, np.unique(node.versions)))}",
                "dim",
            )
        self._console.print(Padding(head, (0, 0, 0, 2)))
        if node.text and (self._spell is None or not len(node.tokens)):
            self._line(node.text, indent=4)
        if len(node.tokens):
            self._console.print(Padding(self._body(node), (0, 0, 0, 4)))

    def _body(self, node: Node) -> Text:
        """The node's tokens as text, by provenance; sampled ones shaded by their probability."""
        body = Text(overflow="fold")
        logprobs = iter(node.logprobs.tolist())
        for kind, span in runs(node.provenance):
            opening, closing = _MARKS[kind] if self._marks else ("", "")
            inside = False
            for said in decoded(node.tokens[span].tolist(), self._spell):
                style = _shade(next(logprobs)) if kind == POLICY else _STYLES[kind]
                said = harmless(said).replace("\n", _NEWLINES[kind])
                for line in said.splitlines(keepends=True):
                    text, ends, _ = line.partition("\n")
                    body.append(("" if inside else opening) + text + (closing if ends else "") + ends, style)
                    inside = not ends
            if inside:
                body.append(closing)
        return body

    def _token_table(self, node: Node, offset: int) -> Table:
        shown = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
        for name in ("#", "id", "piece", "from", "logprob", "p", "version"):
            justify: Any = "left" if name in ("piece", "from") else "right"
            shown.add_column(name, justify=justify, overflow="fold", no_wrap=name != "piece")
        sampled = zip(node.logprobs.tolist(), node.versions.tolist(), strict=True)
        for place, (id_, kind) in enumerate(zip(node.tokens.tolist(), node.provenance.tolist(), strict=True)):
            logprob, version = next(sampled) if kind == POLICY else (None, None)
            style = _STYLES[kind] if logprob is None else _shade(logprob)
            numbers = ("", "", "") if logprob is None else (f"{logprob:.3f}", _chance(logprob), str(version))
            cells = (str(offset + place), str(id_), piece(id_, self._spell), PROVENANCE[kind], *numbers)
            shown.add_row(*(Text(cell, style) for cell in cells))
        return shown

    def _calls(self, step: Step) -> None:
        for call in step.calls:
            style = "green" if call.status == "ok" else "yellow"
            line = Text("→ ").append(harmless(call.name, keep="") or "(no name)", "bold").append(f" {call.status}", style)
            line.append(f" {call.seconds:.2f} s  ", "dim").append(harmless(call.arguments))
            self._console.print(Padding(line, (0, 0, 0, 4)))

    def _line(self, text: str, style: str = "", indent: int = 4, keep: str = "\n\t") -> None:
        self._console.print(Padding(Text(harmless(text, keep), style, overflow="fold"), (0, 0, 0, indent)))


def runs(provenance: np.ndarray) -> Iterator[tuple[int, slice]]:
    """Each stretch of tokens of one provenance, in order."""
    cuts = [0, *(np.flatnonzero(np.diff(provenance)) + 1).tolist(), len(provenance)]
    for start, stop in pairwise(cuts):
        if start < stop:
            yield int(provenance[start]), slice(start, stop)


def _shade(logprob: float) -> str:
    return next((style for p, style in _SHADES if math.exp(min(logprob, 0.0)) >= p), _SHADES[-1][1])


def _chance(logprob: float) -> str:
    return f"{math.exp(min(float(logprob), 0.0)):.1%}"


def _reward(reward: float, parts: dict[str, float]) -> str:
    named = ", ".join(f"{name} {value:g}" for name, value in parts.items())
    return f"{reward:g}" + (f" ({named})" if named else "")


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False)
