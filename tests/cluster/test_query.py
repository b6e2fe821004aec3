"""Asking a run: SQL over what is committed, also while it grows, in every format."""

from __future__ import annotations

import asyncio
import csv
import io
import json
import os
import random
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pyarrow as pa
import pytest

import troupe
from troupe.actors.store import Store
from troupe.cluster.query import QueryError, render, rendered
from troupe.cluster.run import Run
from troupe.protocol.errors import ConfigError
from troupe.protocol.messages import CommitGroup, Deposit
from troupe.protocol.trajectory import Failure, Node, Step, Task, Trajectory

CONTEXT: Any = SimpleNamespace(
    name="store", rng=random.Random(0), clock=SimpleNamespace(now=lambda: 0.0), blobs=SimpleNamespace()
)


def trajectory(episode: str, step: int, reward: float, **changes: Any) -> Trajectory:
    def node(parent: int, role: str, provenance: list[int]) -> Node:
        policy = provenance.count(1)
        return Node(
            parent=parent,
            role=role,
            step=min(parent + 1, 1),
            tokens=np.arange(len(provenance), dtype=np.int32),
            provenance=np.array(provenance, np.uint8),
            logprobs=np.full(policy, -0.5, np.float32),
            versions=np.full(policy, step, np.int32),
            text=f"{role} says",
        )

    fields: dict[str, Any] = {
        "attempt": 0,
        "group": step,
        "member": 0,
        "kind": "train",
        "task": Task("train/1", "guess", "train", 1, {"low": 1}),
        "status": "completed",
        "stop": "terminated",
        "nodes": [node(-1, "user", [0, 2, 2]), node(0, "assistant", [1, 1])],
        "steps": [Step(reward=-0.5, parts={"format": -0.5}, action="guess 3"), Step(reward=reward + 0.5, terminated=True)],
        "success": reward > 0,
    }
    return Trajectory(id=episode, step=step, reward=reward, **fields | changes)


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """A run folder of two committed groups and an uncommitted deposit."""
    (tmp_path / "config.toml").write_text('steps = 2\n[env]\nname = "guess"\n')
    (tmp_path / "metrics.jsonl").write_text('{"step": 1, "success": 0.5}\n{"step": 2, "succ')

    async def fill() -> None:
        store = Store(CONTEXT, str(tmp_path / "trajectories"))
        await store.start()
        for step, rewards in ((1, (0.0, 1.0)), (2, (1.0, 1.0))):
            names = [f"{step}-{member}" for member in range(2)]
            for name, reward in zip(names, rewards, strict=True):
                await store.deposit(Deposit(trajectory(name, step, reward)))
            await store.commit(CommitGroup(step, "train", step, names))
        failure = Failure("infrastructure", "EnvironmentFailed", "it hung", "env-0")
        await store.deposit(Deposit(trajectory("3-0", 3, 0.0, status="failed", failure=failure)))
        await store.close()

    asyncio.run(fill())
    return tmp_path


def test_trajectories_answer_sql_and_uncommitted_ones_are_not_there(run: Path) -> None:
    opened = troupe.open(str(run))
    answer = opened.query("SELECT step, avg(reward) AS reward FROM trajectories GROUP BY step ORDER BY step")
    assert answer.to_pylist() == [{"step": 1, "reward": 0.5}, {"step": 2, "reward": 1.0}]
    row = opened.query("""SELECT "group", trains, turns, tokens, policy_tokens, version_max, task_data, failure_kind
                          FROM trajectories WHERE id = '2-1'""").to_pylist()[0]
    assert row == {
        "group": 2, "trains": True, "turns": 2, "tokens": 5, "policy_tokens": 2, "version_max": 2,
        "task_data": '{"low":1}', "failure_kind": None,
    }  # fmt: skip


def test_steps_and_nodes_are_numbered_within_their_trajectory(run: Path) -> None:
    opened = Run(run)
    steps = opened.query("SELECT trajectory, index, reward, parts['format'] AS format FROM steps WHERE trajectory = '1-1'")
    assert steps.to_pylist() == [
        {"trajectory": "1-1", "index": 0, "reward": -0.5, "format": -0.5},
        {"trajectory": "1-1", "index": 1, "reward": 1.5, "format": None},
    ]
    nodes = opened.query("SELECT trajectory, index, role, len(tokens) AS n, versions FROM nodes ORDER BY ALL").to_pylist()
    assert [(n["trajectory"], n["index"], n["role"], n["n"]) for n in nodes[:3]] == [
        ("1-0", 0, "user", 3),
        ("1-0", 1, "assistant", 2),
        ("1-1", 0, "user", 3),
    ]
    assert len(nodes) == 8 and nodes[-1]["versions"] == [2, 2]
    joined = opened.query("SELECT count(*) AS n FROM nodes JOIN trajectories t ON t.id = trajectory WHERE t.reward = 1")
    assert joined.to_pylist() == [{"n": 6}]


def test_a_run_that_has_no_trajectories_yet_answers_with_none(tmp_path: Path) -> None:
    (tmp_path / "config.toml").write_text("")
    counts = "SELECT (SELECT count(*) FROM trajectories) + (SELECT count(*) FROM steps) + (SELECT count(*) FROM nodes) AS n"
    assert Run(tmp_path).query(counts).to_pylist() == [{"n": 0}]


@pytest.mark.parametrize(
    ("sql", "reason"),
    [
        ("SELECT rewrd FROM trajectories", 'Referenced column "rewrd" not found.*"reward"'),
        ("SELEC 1", 'syntax error at or near "SELEC"'),
        ("SELECT * FROM trajectory", "name trajectory does not exist! Tables: trajectories, steps, nodes."),
        ("SELECT id::INT FROM trajectories", "Could not convert string"),
        ("", "ask with SELECT"),
    ],
)
def test_a_wrong_query_is_one_clear_line(run: Path, sql: str, reason: str) -> None:
    with pytest.raises(QueryError, match=reason) as caught:
        Run(run).query(sql)
    assert "\n" not in str(caught.value)


def test_a_query_reaches_no_file_variable_or_setting(run: Path) -> None:
    secret = pa.table({"a": [1]})  # noqa: F841
    file = run / "out.csv"
    for sql in (
        f"SELECT * FROM read_text('{run / 'config.toml'}')",
        f"SELECT * FROM '{run / 'metrics.jsonl'}'",
        f"COPY (SELECT 1) TO '{file}'",
        f"ATTACH '{run / 'x.db'}'",
        "SELECT * FROM secret",
        "SET enable_external_access = true",
        "INSTALL httpfs",
    ):
        with pytest.raises(QueryError):
            Run(run).query(sql)
    assert not file.exists()


def test_the_same_rows_come_out_in_every_format(run: Path, tmp_path: Path, capfdbinary: Any) -> None:
    table = Run(run).query("SELECT id, reward, success, tokens, sum(1) OVER () AS n FROM trajectories ORDER BY id LIMIT 2")
    rows = [{"id": f"1-{i}", "reward": float(i), "success": bool(i), "tokens": 5, "n": 4} for i in range(2)]
    assert json.loads(rendered(table, "json")) == rows
    assert list(csv.reader(io.StringIO(rendered(table, "csv").decode()))) == [
        ["id", "reward", "success", "tokens", "n"],
        ["1-0", "0.0", "false", "5", "4"],
        ["1-1", "1.0", "true", "5", "4"],
    ]
    assert pa.ipc.open_stream(rendered(table, "arrow")).read_all().equals(table)
    assert [line.split() for line in rendered(table).decode().splitlines()][1] == ["1-0", "0", "false", "5", "4"]

    render(table, "csv", str(tmp_path / "out.csv"))
    assert (tmp_path / "out.csv").read_bytes() == rendered(table, "csv")
    render(table, "arrow")
    assert capfdbinary.readouterr().out == rendered(table, "arrow")


def test_what_is_long_is_cut_for_people_only(run: Path) -> None:
    table = pa.table({"tokens": [list(range(500))] * 150, "text": ["a\n" * 300] * 150, "x": [float("nan")] * 150})
    shown = rendered(table, "table", width=200).decode()
    assert "[0, 1, 2, 3, 4, 5, … 500 in all]" in shown and "50 more rows" in shown and max(map(len, shown.splitlines())) <= 200
    full = json.loads(rendered(table, "json"))
    assert len(full) == 150 and full[0] == {"tokens": list(range(500)), "text": "a\n" * 300, "x": None}


def test_what_cannot_be_rendered_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = pa.table({"a": [1]})
    with pytest.raises(ConfigError, match=r"unknown format 'jsn'.*Did you mean 'json'"):
        render(table, "jsn", str(tmp_path / "x"))
    assert not (tmp_path / "x").exists()
    with pytest.raises(ConfigError, match=r"cannot write .*No such file"):
        render(table, "json", str(tmp_path / "no" / "x"))
    monkeypatch.setattr(sys, "stdout", SimpleNamespace(isatty=lambda: True))
    with pytest.raises(ConfigError, match="Arrow is binary"):
        render(table, "arrow")


def test_a_reader_that_leaves_early_is_no_error(tmp_path: Path) -> None:
    import subprocess

    script = "import pyarrow as pa; from troupe.cluster.query import render; render(pa.table({'a': range(300_000)}), 'csv')"
    reading, writing = os.pipe()
    os.close(reading)
    try:
        done = subprocess.run([sys.executable, "-c", script], stdout=writing, stderr=subprocess.PIPE, check=False)
    finally:
        os.close(writing)
    assert (done.returncode, done.stderr) == (0, b"")


def test_a_run_reads_its_config_metrics_and_summary(run: Path) -> None:
    opened = Run(run)
    assert opened.config() == {"steps": 2, "env": {"name": "guess"}}
    assert opened.metrics() == [{"step": 1, "success": 0.5}]  # the second line is still being written
    with pytest.raises(ConfigError, match=r"no summary.json"):
        opened.summary()
    (run / "summary.json").write_text('{"steps": 2}')
    assert opened.summary() == {"steps": 2}


def test_a_folder_that_is_no_run_is_refused_with_a_fix(run: Path, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    (runs / "frozen_lake-1").mkdir(parents=True)
    (runs / "frozen_lake-1" / "config.toml").write_text("")
    with pytest.raises(ConfigError, match=r"no run folder '.*lake-2'. Did you mean 'frozen_lake-1'"):
        Run(runs / "frozen_lake-2")
    with pytest.raises(ConfigError, match=r"no config.toml. Did you mean '.*frozen_lake-1'"):
        Run(runs)
    with pytest.raises(ConfigError, match="no run folder"):
        Run(runs / "nowhere" / "x")
