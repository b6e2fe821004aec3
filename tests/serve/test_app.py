"""The door itself, on real Ray and Ray Serve."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from troupe.protocol.errors import ConfigError
from troupe.serve.app import check_port, door


@pytest.fixture
def short() -> Iterator[Path]:
    """A temporary folder whose name is short enough for Ray's sockets; what is left in it was left behind."""
    with tempfile.TemporaryDirectory(prefix="t") as folder:
        yield Path(folder)


HELLO: Any = [{"role": "user", "content": "hello world"}]


def test_a_port_in_use_is_refused_in_one_line_before_anything_starts(run: Path) -> None:
    with socket.socket() as other:
        other.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as Serve listens
        other.bind(("127.0.0.1", 0))
        other.listen()
        port = other.getsockname()[1]
        with pytest.raises(ConfigError, match=f"port {port} on 127.0.0.1 is in use"):
            door(port)
        refused = _troupe("serve", str(run), "--port", str(port))
        assert refused.wait(60) == 2
        assert refused.stdout is not None
        lines = refused.stdout.read().splitlines()
        assert len(lines) == 1 and f"port {port} on 127.0.0.1 is in use" in lines[0]
    check_port("127.0.0.1", port)


def test_a_port_or_host_that_is_none_is_refused() -> None:
    with pytest.raises(ConfigError, match="from 1 to 65535"):
        check_port("127.0.0.1", 70000)
    with pytest.raises(ConfigError, match="--host"):
        check_port("no such host", 8000)


def test_a_run_is_served_gets_newer_weights_and_leaves_nothing_behind(run: Path, short: Path) -> None:
    port = _free_port()
    url = f"http://127.0.0.1:{port}"
    server = _troupe("serve", str(run), "--port", str(port), "--checkpoint", "step-1", TMPDIR=str(short))
    try:
        told = _read_until(server, "Serving tiny at")
        assert f"{url}/v1" in told and "version 1" in told
        with openai.OpenAI(base_url=f"{url}/v1", api_key="any") as client, httpx.Client(base_url=url) as web:
            answer = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=12, seed=1)
            assert answer.usage is not None and answer.usage.completion_tokens == 12
            stream = client.chat.completions.create(
                model="tiny", messages=HELLO, max_tokens=12, seed=1, stream=True, stream_options={"include_usage": True}
            )
            chunks = list(stream)
            text = "".join(c.choices[0].delta.content or "" for c in chunks if c.choices)
            assert text == answer.choices[0].message.content
            assert chunks[-1].usage == answer.usage
            assert web.get("/healthz").json()["version"] == 1
            assert web.post("/weights", json={"version": 2}, timeout=60).json()["version"] == 2
            answer = client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=2)
            assert answer.system_fingerprint == "weights-2"
        _, pids = _descendants(server.pid)
    finally:
        server.send_signal(signal.SIGINT)
    assert server.wait(60) == 0
    check_port("127.0.0.1", port)
    assert not list(short.iterdir())
    _gone(pids)


@pytest.mark.slow
def test_a_killed_generator_is_replaced_while_it_serves(run: Path, short: Path) -> None:
    port = _free_port()
    server = _troupe("serve", str(run), "--port", str(port), TMPDIR=str(short))
    try:
        _read_until(server, "Serving tiny at")
        with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="any", timeout=60) as client:
            client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=2)
            hosted, _ = _descendants(server.pid)
            for pid in hosted:  # the keeper too: both must come back
                os.kill(pid, signal.SIGKILL)
            _read_until(server, "starting a new")
            answer = _until(lambda: client.chat.completions.create(model="tiny", messages=HELLO, max_tokens=2))
            assert answer.system_fingerprint == "weights-2"
    finally:
        server.send_signal(signal.SIGTERM)
    assert server.wait(60) == 0


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_the_door_is_open_during_training_and_answers_with_what_was_announced(tmp_path: Path, short: Path) -> None:
    port, folder = _free_port(), tmp_path / "trained"
    recipe = tmp_path / "small.toml"
    recipe.write_text(
        'steps = 4\n[env]\nname = "frozen_lake"\nactors = 1\nslots = 8\n'
        "[rollout]\ngroups_per_step = 2\ngroup_size = 4\nmax_tokens = 8\n"
        "[model.tiny]\nhidden = 32\nlayers = 2\nheads = 2\n[eval]\ntasks = 4\n"
    )
    training = _troupe("train", str(recipe), "--run-dir", str(folder), "--serve", "--port", str(port), TMPDIR=str(short))
    seen: dict[int, str] = {}
    refused: set[int] = set()
    with httpx.Client(base_url=f"http://127.0.0.1:{port}", timeout=30) as web:
        while training.poll() is None:
            try:
                held = web.get("/weights")
                if held.status_code == 200:
                    seen[held.json()["version"]] = held.json()["checksum"]
                    refused.add(web.post("/weights", json={"version": 0}).status_code)
            except httpx.TransportError:
                pass  # not open yet, or no more
            time.sleep(0.1)
    assert training.stdout is not None
    assert training.returncode == 0, training.stdout.read()
    assert refused == {409}
    rows = [json.loads(line) for line in (folder / "journal.jsonl").read_text().splitlines()]
    announced = {row["version"]: row["checksum"] for row in rows if row["event"] == "announced"}
    assert seen and seen.items() <= announced.items()
    assert not list(short.glob("troupe-*"))


def _troupe(*arguments: str, **environment: str) -> subprocess.Popen[str]:
    plain = {name: value for name, value in os.environ.items() if name != "PYTHONUNBUFFERED"}  # as it is for most people
    return subprocess.Popen(
        [sys.executable, "-m", "troupe", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env={**plain, "OMP_NUM_THREADS": "1", **environment},
    )


def _read_until(process: subprocess.Popen[str], text: str) -> str:
    assert process.stdout is not None
    read = []
    for line in process.stdout:
        read.append(line)
        if text in line:
            return line
    raise AssertionError(f"'{text}' was never said:\n{''.join(read)}")


def _until(call: Callable[[], Any]) -> Any:
    for _ in range(100):
        try:
            return call()
        except openai.APIError:
            time.sleep(0.3)
    return call()


def _descendants(pid: int) -> tuple[list[int], list[int]]:
    """Processes below `pid`: those that host an actor of ours, and all."""
    listed = subprocess.run(["ps", "-eo", "pid,ppid,args"], capture_output=True, text=True, check=True).stdout
    rows = [line.split(None, 2) for line in listed.splitlines()[1:]]
    below = {pid}
    for _ in range(5):
        below |= {int(p) for p, parent, *_ in rows if int(parent) in below}
    below.discard(pid)
    return [int(p) for p, _, *a in rows if int(p) in below and a and a[0].startswith("ray::_Hosted")], sorted(below)


def _gone(pids: list[int]) -> None:
    """Waits until all of them are gone."""
    assert pids
    while any(os.path.exists(f"/proc/{pid}") for pid in pids):
        time.sleep(0.2)


def _free_port() -> int:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return int(trial.getsockname()[1])
