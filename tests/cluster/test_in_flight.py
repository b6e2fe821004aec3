"""What becomes of turns in flight on real Ray when new weights come and when their generator goes (docs/asynchrony.md).

The engines write down every answer that they give (`witnessed.py`), and the weights of each version are kept. So each turn
in the store is taken apart into the answers that it was made of, and each of these is scored by plain transformers with the
weights that it names.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections import Counter, defaultdict
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoModelForCausalLM

from tests.actors.engines.suite import logits_across, logprobs_of
from tests.cluster import test_kills as kills
from tests.cluster.test_elastic_generators import metrics, scale
from tests.cluster.test_train import ENVIRONMENT, ROOT, await_event, journal
from tests.laws.test_bounded_staleness import Turn, ages, turns_in
from troupe.protocol import arrow, stored
from troupe.protocol.messages import Generated
from troupe.protocol.trajectory import Trajectory

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.slow, pytest.mark.timeout(1800)]

STEPS, STALE, SECONDS = 20, 4, 0.03  # a turn takes several training steps


@dataclass(eq=False)
class Answer:
    """What an engine answered to one request."""

    generator: str
    request: str
    prompt: tuple[int, ...]
    got: Generated

    @property
    def said(self) -> tuple[int, ...]:
        return tuple(self.got.tokens.tolist())

    def begins(self, said: tuple[int, ...], versions: tuple[int, ...], logprobs: np.ndarray) -> bool:
        n = len(self.got.tokens)
        same = (self.said, tuple(self.got.versions.tolist())) == (said[:n], versions[:n])
        return same and np.array_equal(self.got.logprobs, logprobs[:n])


@dataclass
class Played:
    """A finished run."""

    folder: Path
    answers: list[Answer]

    def __post_init__(self) -> None:
        self.rows: list[Trajectory] = arrow.from_table(stored.committed(self.folder / "trajectories").drop_columns(["trains"]))
        self._to: defaultdict[tuple[int, ...], list[Answer]] = defaultdict(list)
        for answer in self.answers:
            if answer.said:
                self._to[answer.prompt].append(answer)

    def turns(self) -> list[tuple[Trajectory, Turn]]:
        return [(t, turn) for t in self.rows for turn in turns_in(t)]

    def pieces(self, turn: Turn) -> list[Answer]:
        """The answers that the turn is made of, one after the other: tokens, logprobs and versions are theirs."""
        prompt, said, versions, logprobs = turn
        found: list[Answer] = []
        while said:
            begun = [a for a in self._to[prompt] if a.begins(said, versions, logprobs)]
            assert begun, f"no engine sampled {said}"
            found.append(max(begun, key=lambda answer: len(answer.said)))
            n = len(found[-1].said)
            prompt, said, versions, logprobs = (*prompt, *said[:n]), said[n:], versions[n:], logprobs[n:]
        return found


def play(tmp_path: Path, mode: str, in_flight: str, steps: int, scaled: bool) -> Played:
    """Trains; with `scaled` one of two generators is taken away amid its turns."""
    recipe, world, run, seen = (tmp_path / name for name in ("recipe.toml", "sleepy.py", "run", "seen"))
    seen.mkdir()
    world.write_text(kills.WORLD)
    changes = {
        "sleepy.py": str(world),
        f"steps = {kills.STEPS}\ncheckpoint_every = 10": f"steps = {steps}\ncheckpoint_every = 1\nkeep_checkpoints = 100",
        "turns = 3, sleep = 0.2": "turns = 2",
        "slots = 4": "slots = 12",
        "max_tokens = 6": f'max_tokens = 120\nmode = "{mode}"\nin_flight = "{in_flight}"',
        "max_staleness = 2\nattempts = 50\noversample = 0.5\n": "attempts = 1\n"
        + (f"max_staleness = {STALE}\n" * (mode == "async")),
        "tasks = 4\nevery = 10": "tasks = 0",
    }
    text = kills.RECIPE
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    recipe.write_text(text)
    script = str(ROOT / "tests" / "cluster" / "witnessed.py")
    command = [sys.executable, script, str(seen), str(SECONDS), "train", str(recipe), "--run-dir", str(run)]
    with open(tmp_path / "output", "w") as output:
        process: Any = subprocess.Popen(command, cwd=ROOT, env=ENVIRONMENT, stdout=output, stderr=subprocess.STDOUT, text=True)
        try:
            if scaled:
                await_event(run, process, limit_s=600, event="announced", version=2)
                assert "generators 2 → 1\n" in scale(run, 1)
            code = process.wait(timeout=600)
        except AssertionError as error:
            raise AssertionError(Path(output.name).read_text()) from error
        finally:
            process.kill()
            process.wait()
        assert code == 0, Path(output.name).read_text()
    return Played(run, [answer for file in sorted(seen.iterdir()) for answer in answers(file)])


def answers(file: Path) -> list[Answer]:
    found = []
    for row in map(json.loads, file.read_text().splitlines()):
        got = Generated(
            np.array(row["tokens"], np.int32),
            np.array(row["logprobs"], np.float32),
            np.array(row["versions"], np.int32),
            row["finish"],
        )
        found.append(Answer(file.name.rpartition("-")[0], row["request"], tuple(row["prompt"]), got))
    return found


def assert_whole(run: Played, steps: int, most: int) -> None:
    """Each step trained all of its groups, nothing broke or was tried again, and no trained token is too old."""
    summary = json.loads((run.folder / "summary.json").read_text())
    assert summary["finished"] and summary["restarts"] == {}
    nothing = ("episodes_failed", "episodes_retried", "groups_dropped", "groups_stale")
    assert not any(summary[name] for name in nothing), {name: summary[name] for name in nothing}
    table = stored.committed(run.folder / "trajectories")
    assert len(run.rows) == steps * kills.GROUPS * kills.SIZE and all(table["trains"].to_pylist())
    assert Counter(t.step for t in run.rows) == dict.fromkeys(range(1, steps + 1), kills.GROUPS * kills.SIZE)
    assert {(t.status, t.attempt) for t in run.rows} == {("completed", 0)}
    for t in run.rows:
        assert ages(t).min() >= 0 and ages(t).max() <= most, f"{t.id}: {ages(t)}"


def assert_true(run: Played) -> None:
    """Each answer's logprobs are those of the weights that it names, token by token, by plain transformers."""
    models = {}
    for folder in (run.folder / "checkpoints").iterdir():
        models[int(folder.name.removeprefix("step-"))] = AutoModelForCausalLM.from_pretrained(folder / "model").eval()
    for answer in run.answers:
        if answer.said:
            expected = logprobs_of(logits_across(models, np.array(answer.prompt), answer.got), answer.got.tokens)
            np.testing.assert_allclose(answer.got.logprobs, expected, atol=1e-4, err_msg=answer.request)


@pytest.mark.parametrize("in_flight", ["finish", "update", "restart"])
def test_turns_meet_new_weights_and_the_end_of_their_generator(tmp_path: Path, in_flight: str) -> None:
    run = play(tmp_path, "async", in_flight, STEPS, scaled=True)
    assert_whole(run, STEPS, most=STALE)
    assert_true(run)
    retired = [row["actor"] for row in journal(run.folder) if row["event"] == "retired"]
    assert retired == ["generator-1"] and {answer.generator for answer in run.answers} == {"generator-0", "generator-1"}
    assert_kept(run, in_flight)


def assert_kept(run: Played, in_flight: str) -> None:
    """What `in_flight` promises of each turn, and that some turns were met by new weights and by the end of a generator."""
    made_of = [(turn, run.pieces(turn)) for _, turn in run.turns()]
    mixed = [pieces for (_, _, versions, _), pieces in made_of if len(set(versions)) > 1]
    in_parts = [pieces for _, pieces in made_of if len(pieces) > 1]
    both = [pieces for pieces in in_parts if pieces in mixed]
    kept = Counter(piece for _, pieces in made_of for piece in pieces)
    cut = {answer for answer in run.answers if answer.got.finish == "abort" and answer.said}
    dropped = {answer for answer in run.answers if answer.said} - kept.keys()
    assert set(kept.values()) == {1}, "an answer is in two turns"
    if in_flight == "update":
        assert not dropped, "tokens that nobody has"
        assert any(len(pieces) == 1 for pieces in mixed), "no turn met new weights"
        assert in_parts and cut == {first for first, *_ in in_parts}, "no turn was handed over"
        assert both, "no turn that was handed over had met new weights"
        for first, second in in_parts:
            assert (first.generator, second.generator) == ("generator-1", "generator-0")
            assert first.request == second.request and second.prompt == first.prompt + first.said
        return
    assert not mixed and not in_parts
    assert cut == dropped, "an answer is lost, or one that was cut is kept"
    if in_flight == "finish":
        assert not cut
        assert max(row["sync_s"] for row in metrics(run.folder)) > 5 * SECONDS, "no weights waited for a turn"
        return
    anew = {answer.request: answer for answer in kept}
    again = [(old, anew[old.request]) for old in dropped]
    assert all(new.prompt == old.prompt and new.got.versions[0] >= old.got.versions[-1] for old, new in again)
    assert any(new.generator == old.generator for old, new in again), "no turn met new weights"
    assert any(old.generator == "generator-1" != new.generator for old, new in again), "none began anew elsewhere"


@pytest.mark.parametrize("in_flight", ["finish", "restart"])
def test_one_step_off_is_of_one_version_and_cuts_nothing(tmp_path: Path, in_flight: str) -> None:
    run = play(tmp_path, "one-step-off", in_flight, 5, scaled=False)
    assert_whole(run, 5, most=1)
    assert_true(run)
    assert all(set(ages(t)) == {min(1, t.step - 1)} for t in run.rows)
    assert all(len(run.pieces(turn)) == 1 for _, turn in run.turns()) and len(run.turns()) == len(run.answers)
    assert not [answer for answer in run.answers if answer.got.finish == "abort"]
