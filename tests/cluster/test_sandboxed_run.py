"""Sandboxes in a real run's pools on real Ray: none is left after `kill -9` of a pool, after Ctrl-C, or at the end."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.test_train import await_event, finish, living, start
from troupe.envs.sandbox import missing

pytestmark = [pytest.mark.slow, pytest.mark.xdist_group("ray"), pytest.mark.timeout(600)]

WORLD = """
from troupe.envs.base import Turn
from troupe.envs.sandboxed import SandboxedWorld


class Holder(SandboxedWorld):
    max_turns = 3
    inline = True

    def __init__(self):
        super().__init__("bubblewrap", False, 6, 5.0)

    async def reset(self, task):
        self.box = await self.sandboxes.take()
        return f"Say something. {task.split} {task.seed}"

    async def step(self, text):
        await self.box.run(["sleep", "0.5"])
        return Turn("More.", reward=self.rng.random())

    def play(self, rng, noise):
        return "something"

    @classmethod
    def corpus(cls):
        yield "Say something. More. train heldout 0 1 2 3 4 5 6 7 8 9"
"""


@pytest.fixture
def world(tmp_path: Path) -> str:
    if why := missing("bubblewrap"):
        pytest.skip(why)
    (tmp_path / "holder.py").write_text(WORLD)
    return f"{tmp_path / 'holder.py'}:Holder"


def sandboxes(owner: int) -> list[int]:
    """Processes of bubblewrap that a process has started."""
    found = []
    for each in Path("/proc").glob("[0-9]*/stat"):
        try:
            name, _, rest = each.read_text().partition("(")[2].rpartition(")")
        except OSError:
            continue
        if int(rest.split()[1]) == owner and name == "bwrap":
            found.append(int(each.parent.name))
    return found


def held(owner: int) -> list[int]:
    """The same, as soon as there are three."""
    deadline = time.monotonic() + 120
    while len(found := sandboxes(owner)) < 3:
        assert time.monotonic() < deadline and living([owner]), "the pool opens sandboxes"
        time.sleep(0.02)
    return found


def gone(pids: list[int]) -> bool:
    deadline = time.monotonic() + 20
    while living(pids) and time.monotonic() < deadline:
        time.sleep(0.05)
    return not living(pids)


@contextmanager
def running(run: Path, world: str, **changes: Any) -> Iterator[subprocess.Popen[str]]:
    process = start("--env", world, "--run-dir", str(run), **{"cold_start.steps": 0, **changes})
    try:
        yield process
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=90)


def test_no_sandbox_outlives_a_pool_that_is_killed_or_a_run_that_is_interrupted(tmp_path: Path, world: str) -> None:
    run = tmp_path / "run"
    with running(run, world, **{"steps": 50, "env.actors": 2}) as process:
        pools = {name: await_event(run, process, event="started", actor=name)["pid"] for name in ("env-0", "env-1")}
        boxes = held(pools["env-0"])
        os.kill(pools["env-0"], signal.SIGKILL)
        assert gone(boxes), "kill -9 of a pool leaves no sandbox"

        boxes = held(pools["env-1"])
        process.send_signal(signal.SIGINT)
        output, _ = process.communicate(timeout=90)
        assert process.returncode == 130, output
        assert gone(boxes), "Ctrl-C leaves no sandbox"


def test_a_run_with_sandboxes_ends_and_leaves_none(tmp_path: Path, world: str) -> None:
    run = tmp_path / "run"
    with running(run, world, **{"steps": 2, "eval.tasks": 2}) as process:
        boxes = held(await_event(run, process, event="started", actor="env-0")["pid"])
        output = finish(process)
        summary = json.loads((run / "summary.json").read_text())
        assert summary["finished"] and summary["episodes_failed"] == 0, output
        assert gone(boxes)
