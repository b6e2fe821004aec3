"""What a step of a world costs: in an environment pool, and over OpenEnv's wire.

    python bench/envs.py [--openenv-python PYTHON] [--quick] [--only CASE]

One JSON line a case: {"name", "value", "unit", "compared_with", "context"}. All sides play episodes of 8 turns in a world that
says back what it hears, 64 at once, in alternating rounds on the same machine; the figures are steps a second of CPU time, the
median over the rounds, so that what else the machine does weighs little. OpenEnv 0.10 runs in an interpreter of its own:
PYTHON, or `.venv-openenv` (make test-openenv).

steps_vs_openenv: a pool's actor class in this process, with an engine that answers at once: agent loop, recorder, renderer and
world. Beside it OpenEnv's own server and its own client, their CPU time together: where a step is taken there. The
context also has `unlike_steps_per_core_s`, a pool whose agent says something else in each turn, so that nothing is remembered
as it was written, and `openenv_tool_steps_per_core_s`, OpenEnv's environment of tools only (MCP) with one that says back what
it hears: 8 sessions, one round. Members of a group of eight have the same task, as in a run; tasks are new in each wave.
served_vs_openenv: `troupe env serve` beside OpenEnv's own server, with OpenEnv's own client on both: the server's CPU time.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np
import typer
from rollout import GROUP, LIMITS, FixedEngine, Here

from troupe.actors import rendering
from troupe.actors.env_pool import EnvPool
from troupe.actors.host import settle
from troupe.learner.tiny import make_tiny
from troupe.protocol.messages import Generate, Generated, Routes, RunEpisode, Sampling
from troupe.protocol.trajectory import Task

ROOT = Path(__file__).parents[1]
PEER = str(ROOT / "tests/envs/openenv_peer.py")
TURNS = 8
AT_ONCE = 64
CASES = ("steps_vs_openenv", "served_vs_openenv")
_START_S = 120.0
_LETTERS = 6


def main(
    openenv_python: str = typer.Option(str(ROOT / ".venv-openenv/bin/python"), help="an interpreter that has openenv 0.10"),
    quick: bool = typer.Option(False, help="short: shows that it works, its figures mean nothing"),
    only: str = typer.Option("", help="the one case to run"),
) -> None:
    if only and only not in CASES:
        raise typer.BadParameter(f"no case '{only}'; known: {', '.join(CASES)}")
    if not Path(openenv_python).exists():
        raise typer.BadParameter(f"--openenv-python: no interpreter {openenv_python}: make test-openenv makes one")
    rounds, seconds = (1, 1.0) if quick else (5, 4.0)
    about = {"turns": TURNS, "at_once": AT_ONCE, "rounds": rounds, "load": round(os.getloadavg()[0], 2)}
    about |= {"cores": os.cpu_count(), "openenv": _version(openenv_python), "websockets": version("websockets")}
    pool: list[float] = []
    unlike: list[float] = []
    ours: list[dict[str, float]] = []
    theirs: list[dict[str, float]] = []
    with tempfile.TemporaryDirectory() as folder, _server(_theirs(openenv_python)) as far, _server(_ours()) as near:
        model = str(make_tiny(Path(folder) / "model", ["hello echo train heldout system user assistant 0 1 2 3 4"]))
        bench, other = Pool(model), Pool(model, unlike=True)
        for number in range(rounds + 1):  # alternately; the first round warms up
            theirs.append(_driven(openenv_python, *far, seconds))
            if only != CASES[1]:
                pool.append(bench.steps_per_core_s(seconds))
                unlike.append(other.steps_per_core_s(seconds))
            if only != CASES[0]:
                ours.append(_driven(openenv_python, *near, seconds))
            print(f"round {number} of {rounds}: load {os.getloadavg()[0]:.1f}", file=sys.stderr)
    for kept in (pool, unlike, ours, theirs):
        del kept[:1]
    if pool:
        with _server(_theirs(openenv_python, "till")) as tooled:
            called = _per_core_s(_driven(openenv_python, *tooled, seconds, sessions=8, kind="tools"))
        whole = [_per_core_s(one) for one in theirs]
        kinds = {"unlike_steps_per_core_s": round(statistics.median(unlike)), "openenv_tool_steps_per_core_s": round(called)}
        _line(CASES[0], pool, whole, "OpenEnv's server and its client, the CPU time of both", kinds | about)
    if ours:
        about |= {"wall_steps_s": _median(ours, "seconds"), "openenv_wall_steps_s": _median(theirs, "seconds")}
        about |= {"open_ms": _opened(ours), "openenv_open_ms": _opened(theirs)}
        served, peer = ([one["steps"] / one["server_cpu_s"] for one in side] for side in (ours, theirs))
        _line(CASES[1], served, peer, "OpenEnv's own server, the same client on both", about)


# -- a pool in this process ------------------------------------------------------------------------------------------


class Pool:
    """An environment pool whose messages are plain calls. unlike: its agent never says the same twice."""

    def __init__(self, model: str, unlike: bool = False) -> None:
        told = rendering.load(model)
        engine = (Unlike if unlike else FixedEngine)([*told.encode("hello"), told.stop_ids[0]])
        self._pool = EnvPool(Here(engine), "echo", {"turns": TURNS}, model, AT_ONCE)  # type: ignore[arg-type]
        self._waves = 0

    def steps_per_core_s(self, seconds: float) -> float:
        settle()  # as an actor's host does
        return asyncio.run(self._steps(seconds))

    async def _steps(self, seconds: float) -> float:
        await self._pool.routes(Routes(["generator"]))
        steps, began, cpu = 0, time.perf_counter(), time.process_time()
        while time.perf_counter() < began + seconds:
            self._waves += 1
            numbers = range(self._waves * AT_ONCE, (self._waves + 1) * AT_ONCE)
            done = await asyncio.gather(*(self._pool.run_episode(_episode(number)) for number in numbers))
            steps += sum(episode.turns for episode in done)
            if any(episode.status != "completed" for episode in done):
                raise RuntimeError(f"an episode broke: {done}")
        return steps / (time.process_time() - cpu)


class Unlike(FixedEngine):
    """Says six letters by chance. They were drawn before: to draw them is no part of a step."""

    def __init__(self, answer: list[int]) -> None:
        super().__init__([*[0] * _LETTERS, answer[-1]])
        self._drawn = np.full((1 << 16, _LETTERS + 1), answer[-1], np.int32)  # more than anything remembers
        self._drawn[:, :_LETTERS] = np.random.default_rng(0).integers(70, 90, (1 << 16, _LETTERS))
        self._turns = itertools.cycle(list(self._drawn))

    async def generate(self, request: Generate) -> Generated:
        said = await super().generate(request)
        return Generated(next(self._turns), said.logprobs, said.versions, "stop", "unlike")


def _episode(number: int) -> RunEpisode:
    return RunEpisode(
        episode=f"e{number}",
        attempt=0,
        group=number // GROUP,
        member=number % GROUP,
        kind="train",
        step=1,
        task=Task(f"train/{number // GROUP}", "echo", "train", number // GROUP),
        sampling=Sampling(max_tokens=8),
        limits=LIMITS,
        seed=number,
    )


# -- servers, and the client -----------------------------------------------------------------------------------------


def _theirs(python: str, world: str = "echo") -> list[str]:
    return [python, PEER, "serve", "{port}", world, str(2 * AT_ONCE)]


def _ours() -> list[str]:
    more = ["--set", f"turns={TURNS}", "--sessions", str(2 * AT_ONCE)]
    return [sys.executable, "-m", "troupe", "env", "serve", "echo", "--port", "{port}", *more]


@contextmanager
def _server(command: list[str]) -> Iterator[tuple[str, int]]:
    """(URL, process id) of a server."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen([part.format(port=port) for part in command], stdout=subprocess.DEVNULL)
    try:
        until = time.monotonic() + _START_S
        while True:
            with socket.socket() as trial:
                if trial.connect_ex(("127.0.0.1", port)) == 0:
                    break
            if process.poll() is not None or time.monotonic() > until:
                raise RuntimeError(f"it does not start: {' '.join(command)}")
            time.sleep(0.1)
        yield f"http://127.0.0.1:{port}", process.pid
    finally:
        process.terminate()
        process.wait(30)


def _driven(python: str, url: str, pid: int, seconds: float, sessions: int = AT_ONCE, kind: str = "") -> dict[str, float]:
    """What OpenEnv's client did, and the CPU time of the server meanwhile."""
    command = [python, PEER, "bench", url, str(sessions), str(seconds), kind]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as client:
        assert client.stdin and client.stdout
        if client.stdout.readline() != "warm\n":
            raise RuntimeError("OpenEnv's client has failed")
        before = _cpu(pid)
        print(file=client.stdin, flush=True)
        told: dict[str, float] = json.loads(client.stdout.readline())
        told["server_cpu_s"] = _cpu(pid) - before
        print(file=client.stdin, flush=True)
    return told


def _cpu(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


# -- figures ---------------------------------------------------------------------------------------------------------


def _per_core_s(one: dict[str, float]) -> float:
    """Steps a second of CPU time of the server and the client together."""
    return one["steps"] / (one["cpu_s"] + one["server_cpu_s"])


def _median(rounds: list[dict[str, float]], per: str) -> float:
    return round(statistics.median(one["steps"] / one[per] for one in rounds), 1)


def _opened(rounds: list[dict[str, float]]) -> float:
    """Milliseconds to open a session."""
    return round(1e3 * statistics.median(one["open_s"] for one in rounds) / AT_ONCE, 2)


def _version(python: str) -> str:
    code = "from importlib.metadata import version; print(version('openenv'))"
    return subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout.strip()


def _line(name: str, ours: list[float], theirs: list[float], compared_with: str, about: dict[str, Any]) -> None:
    """ours, theirs: steps a second of CPU time, by round."""
    mine, peer = statistics.median(ours), statistics.median(theirs)
    context = {
        "steps_per_core_s": round(mine),
        "low_high": [round(min(ours)), round(max(ours))],
        "openenv_steps_per_core_s": round(peer),
        "openenv_low_high": [round(min(theirs)), round(max(theirs))],
        **about,
    }
    line = {"name": name, "value": round(mine / peer, 2), "unit": "x", "compared_with": compared_with, "context": context}
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    typer.run(main)
