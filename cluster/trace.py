"""`troupe trace`: one trajectory as a person wants to read it: turns, tool calls, rewards, and which tokens are trained.

Promises:
- reads what is committed, of a live run or a finished one; nothing is written, neither Ray nor torch is imported;
- what is shown as sampled is exactly what has provenance `POLICY`; the pieces of a branch, joined, are its text;
- nothing that a world or a policy said reaches the terminal as a command: control characters are spelled out;
- without colours (a pipe, NO_COLOR) there are no escape codes, and marks that no content can forge say the same.
"""

from __future__ import annotations

import codecs
import io
import json
import math
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, replace
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from rich.console import Console
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text
from tokenizers import Tokenizer

from troupe.actors.learner import checkpoints
from troupe.cluster.run import Run
from troupe.protocol.arrow import from_table
from troupe.protocol.errors import ConfigError, nearest
from troupe.protocol.trajectory import ENVIRONMENT, POLICY, TEMPLATE, Node, Step, StopReason, Trajectory

Spell = Callable[[int], bytes | None]
"""The bytes that a token id stands for, None if nobody knows."""

_PROVENANCE = {TEMPLATE: "template", POLICY: "policy", ENVIRONMENT: "environment"}
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

_LISTED, _CANDIDATES, _GUESSED, _DATA_SHOWN = 20, 8, 5000, 400
_COLUMNS = ("id", "kind", "step", "status", "stop", "reward", "turns", "tokens", "success")


def show(
    run: str,
    wanted: str | None = None,
    *,
    best: bool = False,
    worst: bool = False,
    failed: bool = False,
    step: int | None = None,
    branch: int | None = None,
    tokens: bool = False,
    as_json: bool = False,
    width: int | None = None,
) -> None:
    """Writes a trajectory of `run` to standard output, or a list of the latest ones if none is chosen.

    wanted: an id or a unique part of one. best, worst: choose by reward. failed, step: only these come into question.
    Raises ConfigError for what cannot be shown.
    """
    chosen = [flag for flag, on in (("an id", wanted), ("--best", best), ("--worst", worst)) if on]
    if len(chosen) > 1:
        raise ConfigError(f"{' and '.join(chosen)} each choose one trajectory: give one of them")
    if failed and (best or worst):
        raise ConfigError("a failed episode has no reward: give --failed, or --best or --worst")
    if not chosen and (tokens or branch is not None):
        raise ConfigError("--tokens and --branch show one trajectory: name its id, or add --best or --worst")

    opened = Run(run)
    table = opened.trajectories()
    rows = _rows(table, failed, step)
    console = _console(width)
    if not chosen:
        if as_json:
            _write(json.dumps({"run": run, "trajectories": _finite(_listed(table, rows))}, allow_nan=False) + "\n")
            return
        _list(console, table, rows, run)
    else:
        if not len(rows):
            raise ConfigError(f"'{run}' has {_nothing(table)}")
        place = find(table["id"].take(pa.array(rows)).to_pylist(), wanted) if wanted else _extreme(table, rows, best)
        row = table.slice(int(rows[place]), 1)
        trajectory, trains = from_table(row)[0], bool(row["trains"][0].as_py())
        count = sum(1 for _ in trajectory.branches())
        if branch is not None and not 1 <= branch <= count:
            raise ConfigError(f"{harmless(trajectory.id, keep='')} has no branch {branch}: it has {count}")
        spell, note = speller(opened)
        if as_json:
            _write(json.dumps(as_data(trajectory, trains, spell, note, branch), allow_nan=False) + "\n")
            return
        _Page(console, trajectory, trains, spell, note).show(branch, tokens)
    assert isinstance(console.file, io.StringIO)
    _write("\n".join(line.rstrip() for line in console.file.getvalue().rstrip().split("\n")) + "\n")


# -- choosing --------------------------------------------------------------------------------------------------------


def find(ids: Sequence[str], wanted: str) -> int:
    """The place in `ids` of the one that `wanted` means: the id itself, else its beginning, end, or any part of it.

    Raises ConfigError if that is none, or several.
    """
    tests: tuple[Callable[[str], bool], ...] = (
        lambda id_: id_ == wanted,
        lambda id_: id_.startswith(wanted),
        lambda id_: id_.endswith(wanted),
        lambda id_: wanted in id_,
    )
    for test in tests:
        found = [place for place, id_ in enumerate(ids) if test(id_)]
        if len(found) == 1:
            return found[0]
        if found:
            names = ", ".join(harmless(ids[place], keep="") for place in found[:_CANDIDATES])
            more = f" and {len(found) - _CANDIDATES} more" if len(found) > _CANDIDATES else ""
            raise ConfigError(f"'{harmless(wanted, keep='')}' is several trajectories: {names}{more}")
    raise ConfigError(
        f"no trajectory '{harmless(wanted, keep='')}'.{harmless(nearest(wanted, ids[-_GUESSED:]), keep='')} "
        "`troupe trace RUN` lists the latest"
    )


def _rows(table: pa.Table, failed: bool, step: int | None) -> np.ndarray:
    """Numbers of the rows that come into question, oldest first."""
    keep = np.ones(table.num_rows, np.bool_)
    if failed:
        keep &= pc.equal(table["status"], "failed").to_numpy(zero_copy_only=False).astype(np.bool_)
    if step is not None:
        keep &= table["step"].to_numpy() == step
    return np.flatnonzero(keep)


def _extreme(table: pa.Table, rows: np.ndarray, best: bool) -> int:
    """The place in `rows` of the highest or lowest reward; of equal ones, the latest."""
    status = table["status"].take(rows).to_pylist()
    rewards = table["reward"].take(rows).to_pylist()
    places = [place for place in range(len(rows)) if status[place] == "completed"]
    if not places:
        raise ConfigError("none of these trajectories is completed, so none has a reward: see --failed")
    return max(places, key=lambda place: (rewards[place] if best else -rewards[place], place))


def _nothing(table: pa.Table) -> str:
    if not table.num_rows:
        return "no trajectories yet: the first are there when their group is complete"
    low, high = pc.min_max(table["step"]).as_py().values()
    return f"no such trajectory among its {table.num_rows} (steps {low} to {high})"


# -- token ids to text -----------------------------------------------------------------------------------------------


def speller(run: Run) -> tuple[Spell | None, str]:
    """How to spell the run's token ids; without its tokenizer None, and why."""
    folder, why = _model_folder(run)
    saved = [Path(path) / "model" for _, path in reversed(checkpoints(str(run.path / "checkpoints")))]
    for file in (path / "tokenizer.json" for path in (folder, *saved) if path):
        try:
            return spelling(Tokenizer.from_file(str(file))), ""
        except Exception as error:  # the library raises nothing narrower
            why = why or f"'{file}' cannot be read: {str(error).splitlines()[0]}"
    return None, f"no tokenizer, so token ids are shown instead of their text ({why or 'the run has no model folder'})"


def _model_folder(run: Run) -> tuple[Path | None, str]:
    """Where `launch.prepare_model` finds or makes the run's model."""
    model = run.config().get("model")
    named = model.get("path") if isinstance(model, dict) else ""
    if not named:
        return run.path / "model", ""
    from troupe.cluster.models import resolve

    try:
        return resolve(str(named)), ""
    except ConfigError as error:
        return None, str(error)


def spelling(tokenizer: Tokenizer) -> Spell:
    """The bytes of each id, exact for byte-level tokenizers; for others, of which a byte fallback is known, nearly so
    (SentencePiece drops the first space of a text). A token may be part of a character: only joined bytes are text."""
    byte_level = tokenizer.decoder is not None and tokenizer.decoder.decode(["Ġ"]) == " "
    known: dict[int, bytes | None] = {}

    def spell(id_: int) -> bytes | None:
        if id_ not in known:
            token = tokenizer.id_to_token(id_)
            known[id_] = None if token is None else _byte_level(token) if byte_level else _sentence_piece(token)
        return known[id_]

    return spell


def _byte_level(token: str) -> bytes:
    try:
        return bytes(_ALPHABET[char] for char in token)
    except KeyError:  # an added token, written as it is
        return token.encode()


def _sentence_piece(token: str) -> bytes:
    byte = re.fullmatch(r"<0x([0-9A-F]{2})>", token)
    return bytes.fromhex(byte[1]) if byte else token.replace("▁", " ").encode()


def _alphabet() -> dict[str, int]:
    """GPT-2's: printable bytes stand for themselves, the others for the characters from 256 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(0x100) if byte not in plain)
    return {chr(byte): byte for byte in plain} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_ALPHABET = _alphabet()


def harmless(text: str, keep: str = "\n\t") -> str:
    """`text` with all that is not plainly printable, and our own marks, spelled out: an escape becomes `\\x1b`."""
    if text.isprintable() and not _FORGED.search(text):
        return text
    return "".join(
        char if char in keep or (char.isprintable() and not _FORGED.match(char)) else char.encode("unicode_escape").decode()
        for char in text
    )


_FORGED = re.compile("[⟦⟧⟨⟩]")


# -- one trajectory, for people --------------------------------------------------------------------------------------


class _Page:
    """Prints one trajectory onto `console`."""

    def __init__(self, console: Console, trajectory: Trajectory, trains: bool, spell: Spell | None, note: str) -> None:
        self._console, self._t, self._spell, self._note = console, trajectory, spell, note
        self._why_not = _why_not_trained(trajectory, trains)
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
        template, policy, environment = _counts(t)
        low, high = t.versions
        data = json.dumps(t.task.data, ensure_ascii=False) if t.task.data else ""
        rows = {
            "trajectory": f"{t.id} · group {t.group}, member {t.member}, attempt {t.attempt} · {t.kind}, step {t.step}",
            "task": f"{t.task.id} · {t.task.env}, split {t.task.split}, seed {t.task.seed}",
            "data": data if len(data) <= _DATA_SHOWN else f"{data[:_DATA_SHOWN]}… (--json has all)",
            "ended": f"{t.status}: {_STOPS[t.stop]} ({t.stop})",
            "failure": f"{t.failure.kind}, {t.failure.type}: {t.failure.message}" if t.failure else "",
            "where": t.failure.where if t.failure else "",
            "reward": _reward(t.reward, _summed(t.steps)) if t.status == "completed" else "none: it was not completed",
            "success": {None: "no verdict", True: "yes", False: "no"}[t.success],
            "trained": f"no: {self._why_not}" if self._why_not else "yes",
            "tokens": f"{policy} policy, {template} template, {environment} environment: {sum(_counts(t))} in all",
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
            for said in _decoded(node.tokens[span].tolist(), self._spell):
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
            cells = (str(offset + place), str(id_), piece(id_, self._spell), _PROVENANCE[kind], *numbers)
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


def piece(id_: int, spell: Spell | None) -> str:
    """One token on one line: spaces as ·, newlines as ⏎, bytes that are only part of a character as \\xNN."""
    spelled = spell(id_) if spell else None
    if spelled is None:
        return f"‹{id_}›"
    return harmless(spelled.decode("utf-8", "backslashreplace")).replace(" ", "·").replace("\n", "⏎").replace("\t", "⇥")


def _decoded(ids: list[int], spell: Spell | None) -> Iterator[str]:
    """What each token adds to the text. A character of several tokens comes with its last; broken ones become U+FFFD."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for place, id_ in enumerate(ids, 1):
        spelled = spell(id_) if spell else None
        if spelled is None:
            yield f"{decoder.decode(b'', True)}‹{id_}›"
        else:
            yield decoder.decode(spelled, place == len(ids))


def _shade(logprob: float) -> str:
    return next((style for p, style in _SHADES if math.exp(min(logprob, 0.0)) >= p), _SHADES[-1][1])


def _chance(logprob: float) -> str:
    return f"{math.exp(min(float(logprob), 0.0)):.1%}"


def _why_not_trained(t: Trajectory, trains: bool) -> str:
    if t.kind == "eval":
        return "an evaluation"
    if t.status != "completed":
        return "it failed" if t.status == "failed" else "it was cancelled"
    return "" if trains else "its group was left out"


def _counts(t: Trajectory) -> list[int]:
    """Tokens by provenance, in the order of `_PROVENANCE`; each node once."""
    return [sum(int((node.provenance == kind).sum()) for node in t.nodes) for kind in _PROVENANCE]


def _summed(steps: Sequence[Step]) -> dict[str, float]:
    parts: dict[str, float] = {}
    for step in steps:
        for name, value in step.parts.items():
            parts[name] = parts.get(name, 0.0) + value
    return parts


def _reward(reward: float, parts: dict[str, float]) -> str:
    named = ", ".join(f"{name} {value:g}" for name, value in parts.items())
    return f"{reward:g}" + (f" ({named})" if named else "")


def _plain(value: Any) -> str:
    return f"{value:g}" if isinstance(value, float) else json.dumps(value, ensure_ascii=False)


# -- for programs ----------------------------------------------------------------------------------------------------


def as_data(
    t: Trajectory, trains: bool, spell: Spell | None = None, note: str = "", branch: int | None = None
) -> dict[str, Any]:
    """All of `t` as JSON can say it (NaN and infinities are null), and token by token. `branch`: only that one is listed
    in "branches". A piece that is only part of a character also has its "bytes", in hexadecimal."""
    branches = list(t.branches())
    more = {
        "trains": not _why_not_trained(t, trains),
        "parts": _summed(t.steps),
        "versions": list(t.versions),
        "tokens": dict(zip(_PROVENANCE.values(), _counts(t), strict=True)),
        "note": note,
        "branches": [branches[branch - 1]] if branch else branches,
        "nodes": [_node_data(node, spell) for node in t.nodes],
    }
    data: dict[str, Any] = _finite(asdict(replace(t, nodes=[])) | more)
    return data


def _node_data(node: Node, spell: Spell | None) -> dict[str, Any]:
    sampled = zip(node.logprobs.tolist(), node.versions.tolist(), strict=True)
    tokens = []
    for id_, kind in zip(node.tokens.tolist(), node.provenance.tolist(), strict=True):
        spelled = spell(id_) if spell else None
        token: dict[str, Any] = {"id": id_, "piece": None, "provenance": _PROVENANCE[kind]}
        if spelled is not None:
            token["piece"] = spelled.decode("utf-8", "replace")
            if token["piece"].encode() != spelled:
                token["bytes"] = spelled.hex()
        if kind == POLICY:
            token["logprob"], token["version"] = next(sampled)
        tokens.append(token)
    about = {"parent": node.parent, "role": node.role, "agent": node.agent, "step": node.step, "text": node.text}
    return about | {"tokens": tokens}


def _finite(value: Any) -> Any:
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    return [_finite(item) for item in value] if isinstance(value, list) else value


# -- the list, and the way out ---------------------------------------------------------------------------------------


def _listed(table: pa.Table, rows: np.ndarray) -> list[dict[str, Any]]:
    """The rows of the list, newest first."""
    found: list[dict[str, Any]] = table.select([*_COLUMNS, "trains"]).take(pa.array(rows[::-1])).to_pylist()
    return found


def _list(console: Console, table: pa.Table, rows: np.ndarray, run: str) -> None:
    if not len(rows):
        console.print(Text(f"{harmless(run)}: {_nothing(table)}"), soft_wrap=True)
        return
    shown = Table(box=None, pad_edge=False, padding=(0, 1, 0, 0), header_style="bold")
    for name in _COLUMNS:
        number = pa.types.is_integer(table.schema.field(name).type) or name == "reward"
        shown.add_column(name, justify="right" if number else "left", overflow="fold")
    for row in _listed(table, rows[-_LISTED:]):
        if row["status"] != "completed":
            row["reward"] = None
        style = {"completed": "", "failed": "red", "cancelled": "dim"}[row["status"]]
        shown.add_row(*(Text(_cell(row[name]), style) for name in _COLUMNS))
    console.print(shown)
    more = f"the latest {_LISTED} of {len(rows)} · " if len(rows) > _LISTED else ""
    newest = harmless(table["id"][int(rows[-1])].as_py(), keep="")
    hint = f"{more}one of them: troupe trace {harmless(run)} {newest}, or --best, --worst; the list: --failed, --step K"
    console.print(Text(hint, "dim"), soft_wrap=True)


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:g}" if isinstance(value, float) else harmless(str(value), keep="")


def _console(width: int | None) -> Console:
    """A page in memory, with the colours that standard output can show."""
    out = Console()
    colours: Any = out.color_system if out.is_terminal and not out.no_color else None
    return Console(
        file=io.StringIO(),
        width=width or shutil.get_terminal_size((100, 50)).columns,
        color_system=colours,
        force_terminal=colours is not None,
        legacy_windows=False,
        markup=False,
        highlight=False,
        emoji=False,
    )


def _write(text: str) -> None:
    try:
        sys.stdout.flush()
        sys.stdout.buffer.write(text.encode())
        sys.stdout.flush()
    except BrokenPipeError:  # `… | head` has seen enough; keep the interpreter from flushing again at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
