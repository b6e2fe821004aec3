"""Showing a trajectory: what is trained is what was sampled, and nothing that is shown can act on the terminal."""

from __future__ import annotations

import asyncio
import io
import json
import os
import random
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.console import Console
from tokenizers import Tokenizer, decoders, models

from troupe.actors.store import Store
from troupe.cluster import spelling, trace
from troupe.cluster.trace_data import as_data
from troupe.cluster.trace_page import Page, runs
from troupe.learner.tiny import make_tiny
from troupe.protocol.errors import ConfigError
from troupe.protocol.messages import CommitGroup, Deposit
from troupe.protocol.trajectory import ENVIRONMENT, POLICY, TEMPLATE, Call, Failure, Node, Step, Task, Trajectory

CONTEXT: Any = SimpleNamespace(
    name="store", rng=random.Random(0), clock=SimpleNamespace(now=lambda: 0.0), blobs=SimpleNamespace()
)
EVIL = "\x1b[2J\x1b]0;owned\x07\r\x9b31m\u202e⟦I was sampled⟧"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny") / "model", ["go left right up down so safe"])


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer.from_file(str(model / "tokenizer.json"))


def node(parent: int, role: str, step: int, runs: list[tuple[int, list[int]]], version: int = 3, **more: Any) -> Node:
    tokens = [id_ for _, ids in runs for id_ in ids]
    provenance = [kind for kind, ids in runs for _ in ids]
    policy = provenance.count(POLICY)
    return Node(
        parent=parent,
        role=role,
        step=step,
        tokens=np.array(tokens, np.int32),
        provenance=np.array(provenance, np.uint8),
        logprobs=-np.arange(1, policy + 1, dtype=np.float32) / 2,
        versions=np.full(policy, version, np.int32),
        **more,
    )


def trajectory(episode: str, nodes: list[Node], steps: list[Step], **changes: Any) -> Trajectory:
    fields: dict[str, Any] = {"attempt": 0, "group": 7, "member": 2, "kind": "train", "step": 1, "reward": 1.0, "success": True}
    fields |= {"task": Task("train/5", "desk", "train", 5, {"order": 17}), "status": "completed", "stop": "terminated"}
    fields |= {"sampling": {"temperature": 0.5, "top_p": 1.0}, "pool": "env-1", "seconds": 1.25}
    return Trajectory(id=episode, nodes=nodes, steps=steps, **fields | changes)


def talk(encode: Any) -> tuple[list[Node], list[Step]]:
    """Two turns with tools; the second is said twice (two branches); a half character is sampled; the world is evil."""
    smile = encode("😀")
    nodes = [
        node(-1, "user", 0, [(TEMPLATE, [1, *encode("user\n")]), (ENVIRONMENT, encode("go left")), (TEMPLATE, [2])]),
        node(0, "assistant", 0, [(TEMPLATE, [1]), (POLICY, [*encode(" right\nup"), *smile[:1], 2])]),
        node(1, "tool", 1, [(TEMPLATE, [1, *encode("tool\n")]), (ENVIRONMENT, encode(EVIL)), (TEMPLATE, [2])]),
        node(2, "assistant", 1, [(TEMPLATE, [1]), (POLICY, [*encode("down"), 2])], version=4),
        node(1, "assistant", 1, [(TEMPLATE, [1]), (POLICY, [*encode("so safe"), *smile, 2])], agent="helper"),
    ]
    calls = [Call("a", "find_order", '{"order": 17}', "ok", 0.02), Call("b", "find\x1b", "{broken", "malformed")]
    steps = [
        Step(reward=0.25, parts={"polite": 0.25}, state_key="lobby", generate_s=0.5, env_s=0.1, calls=calls, finish="length"),
        Step(reward=0.75, parts={"polite": 0.25, "outcome": 0.5}, invalid=True, terminated=True),
    ]
    return nodes, steps


@pytest.fixture
def run(tmp_path: Path, model: Path, tokenizer: Tokenizer) -> Path:
    """A run of a training group, a group that a filter left out, a failed episode and an evaluation."""
    (tmp_path / "config.toml").write_text(f'[model]\npath = "{model}"\n')

    def encode(text: str) -> list[int]:
        return list(tokenizer.encode(text, add_special_tokens=False).ids)

    nodes, steps = talk(encode)
    broken = Failure("infrastructure", "EnvironmentFailed", "it hung\x1b[0m", "env-1: Desk.step")
    groups: list[tuple[int, bool, list[Trajectory]]] = [
        (1, True, [trajectory("t1-00", nodes, steps), trajectory("t1-01", nodes[:2], steps[:1], reward=0.0, success=False)]),
        (
            2,
            True,
            [trajectory("t2-00", [], [], step=2, status="failed", stop="failed", reward=0.0, success=None, failure=broken)],
        ),
        (3, False, [trajectory(f"t3-{n:02d}", nodes[:2], steps[:1], step=2, reward=0.5) for n in range(24)]),
        (4, False, [trajectory("e4-00", nodes[:4], steps, kind="eval", step=2, reward=-1.0, success=None)]),
    ]

    async def fill() -> None:
        store = Store(CONTEXT, str(tmp_path / "trajectories"))
        await store.start()
        for group, trains, members in groups:
            for member in members:
                await store.deposit(Deposit(member))
            first = members[0]
            await store.commit(CommitGroup(group, first.kind, first.step, [m.id for m in members], trains))
        await store.close()

    asyncio.run(fill())
    return tmp_path


def shown(capfdbinary: Any, run: Path, *args: Any, **options: Any) -> str:
    trace.show(str(run), *args, **{"width": 110} | options)
    return str(capfdbinary.readouterr().out.decode())


# -- promises of the pieces ------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 255 + 5 + 20)))
def test_the_pieces_of_any_ids_joined_are_their_text(tokenizer: Tokenizer, ids: list[int]) -> None:
    spell = spelling.spelling(tokenizer)
    known = [id_ for id_ in ids if id_ < tokenizer.get_vocab_size()]
    assert b"".join(spell(id_) or b"" for id_ in ids).decode("utf-8", "replace") == tokenizer.decode(
        known, skip_special_tokens=False
    )
    assert spell(10_000_000) is None


def test_pieces_of_a_tokenizer_with_byte_fallback_are_their_text() -> None:
    vocab = {"▁go": 0, "▁left": 1, **{f"<0x{byte:02X}>": 2 + n for n, byte in enumerate("é".encode())}}
    tokenizer = Tokenizer(models.BPE(vocab, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    spell = spelling.spelling(tokenizer)
    assert b"".join(spell(id_) or b"" for id_ in (0, 1, 2, 3, 1)).decode() == " " + tokenizer.decode([0, 1, 2, 3, 1])


RUNS = st.lists(st.tuples(st.sampled_from([TEMPLATE, POLICY, ENVIRONMENT]), st.lists(st.integers(0, 290), max_size=6)))


@given(RUNS)
def test_what_is_marked_as_sampled_is_what_has_provenance_policy(
    tokenizer: Tokenizer, parts: list[tuple[int, list[int]]]
) -> None:
    told = node(-1, "assistant", -1, parts)
    spell = spelling.spelling(tokenizer)
    page = Page(Console(file=io.StringIO()), trajectory("x", [told], []), True, spell, "")
    body = page._body(told).plain
    marked = re.findall("⟦([^⟧]*)⟧", body)
    expected = []
    for kind, span in runs(told.provenance):
        said = b"".join(spell(int(id_)) or f"‹{id_}›".encode() for id_ in told.tokens[span]).decode("utf-8", "replace")
        if kind == POLICY and said:
            expected.append(spelling.harmless(said).replace("\n", "⏎"))
    assert "".join(marked) == "".join(expected)
    assert body.count("⟦") == body.count("⟧") == len(marked)


@given(st.text(st.characters()))
def test_nothing_that_is_said_can_act_on_a_terminal_or_forge_a_mark(text: str) -> None:
    safe = spelling.harmless(text)
    assert all(char in "\n\t" or char.isprintable() for char in safe) and not re.search("[⟦⟧⟨⟩]", safe)
    assert spelling.harmless(safe) == safe
    assert "\n" not in spelling.harmless(text, keep="")


def test_a_token_that_is_half_a_character_is_shown_as_its_bytes() -> None:
    spell = {0: b"\xf0\x9f", 1: b"\x98\x80", 2: b" a\n"}.get
    assert [spelling.piece(id_, spell) for id_ in range(4)] == ["\\xf0\\x9f", "\\x98\\x80", "·a⏎", "‹3›"]
    assert "".join(spelling.decoded([2, 0, 1, 2, 0], spell)) == " a\n😀 a\n\ufffd"


# -- one trajectory --------------------------------------------------------------------------------------------------


def test_a_trajectory_is_told_turn_by_turn(run: Path, capfdbinary: Any) -> None:
    page = shown(capfdbinary, run, "t1-00")
    for line in (
        "t1-00 · group 7, member 2, attempt 0 · train, step 1",
        'data         {"order": 17}',
        "completed: the episode was over (terminated)",
        "reward       1 (polite 0.5, outcome 0.5)",
        "versions     3 to 4",
        "temperature 0.5 · top_p 1",
        "1.25 s in env-1",
        "turn 1 of 2",
        "reward 0.25 (polite 0.25) · generated in 0.50 s, world 0.10 s · state lobby",
        "! the turn was cut by its token limit",
        "! the action was invalid",
        "! the episode ended here",
        '→ find_order ok 0.02 s  {"order": 17}',
        "→ find\\x1b malformed 0.00 s  {broken",
        "⟦ right⏎⟧\n    ⟦up\ufffd<|im_end|>⟧",
        "⟨<|im_start|>user⏎⟩go left⟨<|im_end|>⟩",
        "so safe😀<|im_end|>⟧",
        "assistant (helper)",
        "⟦sampled and trained⟧",
    ):
        assert re.sub(" +", " ", line) in re.sub(" +", " ", page), line
    assert page.count("find_order") == 1
    assert not re.search(r"[\x00-\x09\x0b-\x1f\x7f-\x9f\u202e]", page)
    assert "\\u27e6I was sampled\\u27e7" in page


def test_what_branches_share_is_shown_once_unless_one_is_asked_for(run: Path, capfdbinary: Any) -> None:
    page = shown(capfdbinary, run, "t1-00")
    assert page.count("go left") == 1 and page.count("down") == 1 and page.count("so safe") == 1
    assert "branch 2 of 2" in page and "its first 2 messages" in page
    second = shown(capfdbinary, run, "t1-00", branch=2)
    assert "go left" in second and "so safe" in second and "down" not in second
    assert "its first 2 messages" in second
    with pytest.raises(ConfigError, match="t1-00 has no branch 3: it has 2"):
        trace.show(str(run), "t1-00", branch=3)


def test_the_token_list_has_each_token_with_its_origin(run: Path, tokenizer: Tokenizer, capfdbinary: Any) -> None:
    page = shown(capfdbinary, run, "t1-01", tokens=True)
    rows = [line.split() for line in page.splitlines() if re.match(r" +\d+ +\d+ ", line)]
    data = json.loads(shown(capfdbinary, run, "t1-01", as_json=True))
    tokens = [token for told in data["nodes"] for token in told["tokens"]]
    assert [(int(row[0]), int(row[1]), row[3]) for row in rows] == [
        (place, token["id"], token["provenance"]) for place, token in enumerate(tokens)
    ]
    assert [row[4:] for row in rows if row[3] == "policy"][:2] == [["-0.500", "60.7%", "3"], ["-1.000", "36.8%", "3"]]


def test_it_says_why_a_trajectory_does_not_train(run: Path, capfdbinary: Any) -> None:
    assert "sampled, not trained (an evaluation)" in shown(capfdbinary, run, "e4")
    assert "no: its group was left out" in shown(capfdbinary, run, "t3-07")
    page = shown(capfdbinary, run, "t2")
    assert "no: it failed" in page and "infrastructure, EnvironmentFailed: it hung\\x1b[0m" in page
    assert "env-1: Desk.step" in page and "none: it was not completed" in page


def test_json_holds_everything_and_is_plain_ascii(run: Path, tokenizer: Tokenizer, capfdbinary: Any) -> None:
    text = shown(capfdbinary, run, "t1-00", as_json=True)
    assert text.isascii() and "\x1b" not in text and text.count("\n") == 1
    data = json.loads(text)
    assert data["trains"] and data["versions"] == [3, 4] and data["branches"] == [[0, 1, 2, 3], [0, 1, 4]]
    assert data["steps"][0]["calls"][1]["status"] == "malformed" and data["parts"] == {"polite": 0.5, "outcome": 0.5}
    assert sum(data["tokens"].values()) == sum(len(told["tokens"]) for told in data["nodes"])
    for path in data["branches"]:
        tokens = [token for index in path for token in data["nodes"][index]["tokens"]]
        said = b"".join(bytes.fromhex(t["bytes"]) if "bytes" in t else t["piece"].encode() for t in tokens)
        ids = [token["id"] for token in tokens]
        assert said.decode("utf-8", "replace") == tokenizer.decode(ids, skip_special_tokens=False)
        assert all(("logprob" in t) == ("version" in t) == (t["provenance"] == "policy") for t in tokens)


def test_without_its_tokenizer_a_trajectory_is_shown_by_ids(run: Path, model: Path, capfdbinary: Any) -> None:
    (run / "config.toml").write_text('[model]\npath = "gone/model"\n')
    page = shown(capfdbinary, run, "t1-01", tokens=True)
    assert "no tokenizer, so token ids are shown instead of their text (No model 'gone/model'" in page
    assert "⟨‹1›" in page and re.search("⟦‹[0-9]+›.*‹2›⟧", page)
    saved = run / "checkpoints" / "step-20" / "model"
    saved.mkdir(parents=True)
    (saved / "tokenizer.json").write_bytes((model / "tokenizer.json").read_bytes())
    assert "go left" in shown(capfdbinary, run, "t1-01")
    (saved / "tokenizer.json").write_text("{")
    assert "‹1›" in shown(capfdbinary, run, "t1-01")


def test_numbers_that_are_none_are_shown_and_are_null_in_json() -> None:
    broken = node(-1, "assistant", 0, [(POLICY, [5, 6])])
    broken.logprobs[:] = [float("nan"), float("-inf")]
    odd = trajectory("x", [broken], [Step(reward=float("nan"))], status="failed", stop="failed", seconds=float("inf"))
    console = Console(file=(out := io.StringIO()), width=100)
    Page(console, odd, False, None, "").show(None, True)
    assert "⟦‹5›‹6›⟧" in out.getvalue() and "reward nan" in out.getvalue()
    data = json.loads(json.dumps(as_data(odd, False), allow_nan=False))
    assert [token["logprob"] for token in data["nodes"][0]["tokens"]] == [None, None] and data["seconds"] is None


# -- choosing --------------------------------------------------------------------------------------------------------


def test_an_id_is_found_by_any_part_that_is_its_own() -> None:
    ids = ["t01-00", "t01-01", "t02-00", "t0", "e7f3a9-00"]
    assert [ids[trace.find(ids, word)] for word in ("t01-01", "t0", "e", "02-00", "7f3a")] == [
        "t01-01", "t0", "e7f3a9-00", "t02-00", "e7f3a9-00",
    ]  # fmt: skip
    with pytest.raises(ConfigError, match=r"'t01' is several trajectories: t01-00, t01-01$"):
        trace.find(ids, "t01")
    with pytest.raises(ConfigError, match=r"x00, x01, x02, x03, x04, x05, x06, x07 and 4 more"):
        trace.find([f"x{n:02d}" for n in range(12)], "x")
    with pytest.raises(ConfigError, match=r"no trajectory 't03-00'. Did you mean 't0.-00'\?"):
        trace.find(ids, "t03-00")


def test_without_an_id_the_latest_are_listed(run: Path, capfdbinary: Any) -> None:
    lines = shown(capfdbinary, run).splitlines()
    assert lines[0].split() == ["id", "kind", "step", "status", "stop", "reward", "turns", "tokens", "success"]
    assert [line.split()[0] for line in lines[1:3]] == ["e4-00", "t3-23"] and len(lines) == 22
    assert lines[-1].startswith("the latest 20 of 28 · one of them: troupe trace")
    assert shown(capfdbinary, run, failed=True).splitlines()[1].split() == [
        "t2-00", "train", "2", "failed", "failed", "–", "0", "0", "–",
    ]  # fmt: skip
    assert [line.split()[0] for line in shown(capfdbinary, run, step=1).splitlines()[1:3]] == ["t1-01", "t1-00"]
    listed = json.loads(shown(capfdbinary, run, as_json=True))["trajectories"]
    assert len(listed) == 28 and listed[0]["id"] == "e4-00" and listed[0]["trains"] is False
    assert "no such trajectory among its 28 (steps 1 to 2)" in shown(capfdbinary, run, step=9)


def test_best_and_worst_choose_by_reward(run: Path, capfdbinary: Any) -> None:
    assert "t1-00 ·" in shown(capfdbinary, run, best=True)
    assert "e4-00 ·" in shown(capfdbinary, run, worst=True)
    assert "t1-01 ·" in shown(capfdbinary, run, worst=True, step=1)
    assert "t3-23 ·" in shown(capfdbinary, run, best=True, step=2)  # of equal ones the latest


@pytest.mark.parametrize(
    ("wanted", "options", "reason"),
    [
        ("t9", {}, "no trajectory 't9'"),
        (None, {"best": True, "worst": True}, "--best and --worst each choose one"),
        ("t1-00", {"best": True}, "an id and --best each choose one"),
        (None, {"failed": True, "worst": True}, "has no reward"),
        (None, {"tokens": True}, "name its id"),
        (None, {"branch": 1}, "name its id"),
        ("t1-00", {"step": 9}, r"no such trajectory among its 28 \(steps 1 to 2\)"),
    ],
)
def test_what_cannot_be_shown_is_one_clear_line(run: Path, wanted: str | None, options: Any, reason: str) -> None:
    with pytest.raises(ConfigError, match=reason) as caught:
        trace.show(str(run), wanted, **options)
    assert "\n" not in str(caught.value) and caught.value.exit_code == 2


def test_a_run_without_trajectories_says_so(tmp_path: Path, capfdbinary: Any) -> None:
    (tmp_path / "config.toml").write_text("")
    assert "no trajectories yet" in shown(capfdbinary, tmp_path)
    with pytest.raises(ConfigError, match="no trajectories yet"):
        trace.show(str(tmp_path), best=True)


# -- the command -----------------------------------------------------------------------------------------------------


def command(*args: str, **env: str) -> subprocess.CompletedProcess[str]:
    base = {k: v for k, v in os.environ.items() if k not in ("NO_COLOR", "FORCE_COLOR", "TERM")}
    return subprocess.run(
        [sys.executable, "-m", "troupe", "trace", *args], env=base | env, capture_output=True, text=True, check=False
    )


def test_colours_are_for_terminals_and_never_against_no_color(run: Path) -> None:
    piped = command(str(run), "t1-00")
    assert piped.returncode == 0 and "\x1b" not in piped.stdout and "⟦" in piped.stdout
    coloured = command(str(run), "t1-00", FORCE_COLOR="1", TERM="xterm-256color")
    assert "\x1b[1;36m right" in coloured.stdout and "⟦" not in coloured.stdout
    assert set(re.findall("\x1b[^m]*m?", coloured.stdout)) <= set(re.findall(r"\x1b\[[0-9;]*m", coloured.stdout))
    assert "\x1b" not in command(str(run), "t1-00", FORCE_COLOR="1", NO_COLOR="1", TERM="xterm-256color").stdout


def test_the_command_fails_with_one_line_and_code_2_and_speaks_utf8_anywhere(run: Path) -> None:
    failed = command(str(run), "t9")
    assert failed.returncode == 2 and failed.stdout == "" and len(failed.stderr.splitlines()) == 1
    assert failed.stderr.startswith("troupe: no trajectory 't9'.")
    assert command(str(run), "--width", "9").returncode == 2
    assert command(str(run), "t1-00", "--tokens", PYTHONIOENCODING="ascii", PYTHONUTF8="0").returncode == 0


def test_neither_ray_nor_torch_is_imported(run: Path) -> None:
    script = (
        "import sys; from troupe.cluster.trace import show; show(sys.argv[1], best=True); "
        "print([m for m in ('ray', 'torch', 'transformers') if m in sys.modules], file=sys.stderr)"
    )
    done = subprocess.run([sys.executable, "-c", script, str(run)], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stderr.strip() == "[]"


def test_a_reader_that_leaves_early_is_no_error(run: Path) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    script = "import sys; from troupe.cluster.trace import show; show(sys.argv[1], best=True, tokens=True)"
    try:
        done = subprocess.run([sys.executable, "-c", script, str(run)], stdout=writing, stderr=subprocess.PIPE, check=False)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")
