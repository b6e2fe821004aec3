"""A recipe reaches a cluster that is up already, and what is wrong is said before anything is shipped."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from troupe.cluster.submit import MAX_MIB, is_local, submit
from troupe.protocol.errors import ConfigError

RECIPE = """
steps = 1
[env]
name = "frozen_lake"
actors = 1
slots = 8
[rollout]
groups_per_step = 1
group_size = 4
max_tokens = 8
[model.tiny]
hidden = 32
layers = 2
heads = 2
[eval]
tasks = 0
"""


@pytest.fixture
def project(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with a recipe, as the working folder."""
    folder = tmp_path / "project"
    (folder / "recipes").mkdir(parents=True)
    (folder / "recipes" / "small.toml").write_text(RECIPE)
    monkeypatch.chdir(folder)
    return folder


@pytest.fixture
def listener() -> Iterator[str]:
    """Something on this machine that accepts connections."""
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        yield f"http://127.0.0.1:{server.getsockname()[1]}"


def test_an_address_where_nothing_answers_is_one_clear_line(project: Path) -> None:
    with socket.socket() as closed:
        closed.bind(("127.0.0.1", 0))
        port = closed.getsockname()[1]
    with pytest.raises(ConfigError, match=rf"^no Ray cluster answers at http://127.0.0.1:{port} .*ray start --head.*$"):
        submit("recipes/small.toml", address=f"127.0.0.1:{port}")


@pytest.mark.parametrize("address", ["ray://127.0.0.1:10001", "http://", "http://host:port"])
def test_an_address_that_is_none_is_refused(project: Path, address: str) -> None:
    with pytest.raises(ConfigError, match="--address"):
        submit("recipes/small.toml", address=address)


def test_a_wrong_recipe_is_refused_before_the_cluster_hears_of_it(project: Path) -> None:
    with pytest.raises(ConfigError, match=r"Did you mean 'recipes/small\.toml'"):
        submit("recipes/smal.toml", address="http://127.0.0.1:1")
    with pytest.raises(ConfigError, match=r"unknown key 'rollout.group_siz'"):
        submit("recipes/small.toml", address="http://127.0.0.1:1", overrides=["rollout.group_siz=2"])


def test_a_recipe_outside_of_what_is_shipped_is_refused(project: Path) -> None:
    (project.parent / "other.toml").write_text(RECIPE)
    with pytest.raises(ConfigError, match="not below this folder"):
        submit("../other.toml", address="http://127.0.0.1:1")


def test_a_run_folder_that_exists_is_refused(project: Path, listener: str) -> None:
    (project / "runs" / "old").mkdir(parents=True)
    (project / "runs" / "old" / "x").touch()
    with pytest.raises(ConfigError, match="exists: name another with --run-dir"):
        submit("recipes/small.toml", address=listener, run_dir="runs/old")


def test_too_big_a_folder_is_refused_naming_what_is_big_and_ignored_files_do_not_count(project: Path, listener: str) -> None:
    for name in ("data.bin", "runs.bin"):
        with open(project / name, "wb") as file:
            file.truncate((MAX_MIB + 1) * 2**20)
    (project / ".rayignore").write_text("runs.bin\n")
    with pytest.raises(ConfigError, match=rf"{MAX_MIB + 1} MiB, the limit is {MAX_MIB}; the biggest are data.bin"):
        submit("recipes/small.toml", address=listener)


def test_this_machine_is_known_from_others() -> None:
    assert is_local("127.0.0.1") and is_local("localhost")
    assert not is_local("192.0.2.1")  # reserved for documentation (RFC 5737)


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_submitted_run_ends_in_its_folder_and_a_broken_one_fails(project: Path) -> None:
    with _head() as address:
        # A process of its own, as of its users: Ray reads how it is to authenticate when it is first imported.
        command = [sys.executable, "-m", "troupe", "submit", "recipes/small.toml", "--address", address]
        done = subprocess.run([*command, "--seed", "3", "--run-dir", "runs/a"], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout + done.stderr
        summary = json.loads((project / "runs" / "a" / "summary.json").read_text())
        assert summary["steps"] == 1
        assert "seed = 3" in (project / "runs" / "a" / "config.toml").read_text()
        assert any("step" in line and "1/1" in line for line in done.stdout.splitlines()), done.stdout
        broken = subprocess.run([*command, "--set", "model.path=nowhere"], capture_output=True, text=True)
        assert broken.returncode == 1 and "ended as failed" in broken.stderr and "Traceback" not in broken.stderr


class _head:
    """A Ray head of its own, as docs/jobs.md starts one."""

    def __enter__(self) -> str:
        self._folder = tempfile.TemporaryDirectory(prefix="t")
        ports = [_free_port() for _ in range(4)]
        options = ["--dashboard-host=127.0.0.1", f"--dashboard-port={ports[0]}", f"--port={ports[1]}"]
        options += [f"--ray-client-server-port={ports[2]}", f"--dashboard-agent-listen-port={ports[3]}"]
        ray = str(Path(sys.executable).with_name("ray"))
        self._process = subprocess.Popen(
            [ray, "start", "--head", "--block", "--num-cpus=2", f"--temp-dir={self._folder.name}", *options],
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            start_new_session=True,
        )
        address = f"http://127.0.0.1:{ports[0]}"
        while self._process.poll() is None:
            try:
                urllib.request.urlopen(f"{address}/api/version", timeout=5)
                return address
            except urllib.error.HTTPError:  # it asks for a token: it is there
                return address
            except OSError:
                time.sleep(0.3)
        raise AssertionError("ray start --head ended")

    def __exit__(self, *_: object) -> None:
        self._process.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(30)
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._folder.cleanup()


def _free_port() -> int:
    with socket.socket() as trial:
        trial.bind(("127.0.0.1", 0))
        return int(trial.getsockname()[1])
