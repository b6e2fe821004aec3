"""An owned server process (`actors/engines/server.py`): it starts in time or says why, and it never outlives its owner."""

import asyncio
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from troupe.actors.engines.server import Server, free_port
from troupe.protocol.errors import ConfigError, TimedOut

FAMILY = """
import os, pathlib, subprocess, sys, time
code = "import os, time; os.setsid(); time.sleep(600)"
child = subprocess.Popen([sys.executable, "-c", code])
pathlib.Path(sys.argv[1]).write_text(f"{os.getpid()} {child.pid}")
time.sleep(600)
"""
"""A program whose child has left its process group."""

OWNER = """
import asyncio, pathlib, sys, time
from troupe.actors.engines.server import Server
async def go():
    pids = pathlib.Path(sys.argv[1])
    async def ready(): return pids.exists() and " " in pids.read_text()
    scratch = pids.with_name("scratch")
    scratch.mkdir()
    command = [sys.executable, "-c", sys.argv[2], sys.argv[1]]
    await Server("s", command, pids.with_name("log"), scratch=str(scratch)).start(ready, 60)
    print("up", flush=True)
    time.sleep(600)
asyncio.run(go())
"""


def _wait(what: Callable[[], bool], limit_s: float = 30.0) -> bool:
    deadline = time.monotonic() + limit_s
    while not what() and time.monotonic() < deadline:
        time.sleep(0.02)
    return what()


def _gone(pids: list[int]) -> bool:
    def alive(pid: int) -> bool:
        try:
            return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
        except OSError:
            return False

    return not any(map(alive, pids))


def _family(tmp_path: Path) -> tuple[Server, Path]:
    pids = tmp_path / "pids"
    return Server("the family", [sys.executable, "-c", FAMILY, str(pids)], tmp_path / "log"), pids


async def _up(server: Server, pids: Path) -> list[int]:
    async def ready() -> bool:
        return pids.exists() and " " in pids.read_text()

    await server.start(ready, 60)
    return [int(pid) for pid in pids.read_text().split()]


async def test_a_stopped_server_takes_along_all_that_it_started(tmp_path: Path) -> None:
    server, pids = _family(tmp_path)
    family = await _up(server, pids)
    assert server.alive
    await server.stop()
    assert _wait(lambda: _gone(family)) and not server.alive
    await server.stop()


@pytest.mark.parametrize("victim", ["the owner", "the keeper", "the server"])
def test_nobody_outlives_the_death_of(victim: str, tmp_path: Path) -> None:
    pids = tmp_path / "pids"
    owner = subprocess.Popen([sys.executable, "-c", OWNER, str(pids), FAMILY], stdout=subprocess.PIPE)
    try:
        assert owner.stdout is not None and owner.stdout.readline() == b"up\n"
        parent, child = (int(pid) for pid in pids.read_text().split())
        keeper = int(Path(f"/proc/{parent}/stat").read_text().rpartition(")")[2].split()[1])
        os.kill({"the owner": owner.pid, "the keeper": keeper, "the server": parent}[victim], signal.SIGKILL)
        # A killed keeper leaves the program to the kernel; what that had started is the program's own to take along.
        assert _wait(lambda: _gone([parent] + ([] if victim == "the keeper" else [child])))
        if victim == "the keeper":
            os.kill(child, signal.SIGKILL)
        else:  # which keeps the folder for as long as the owner is there
            owner.kill()
            assert _wait(lambda: _gone([keeper]) and not (tmp_path / "scratch").exists())
    finally:
        owner.kill()
        owner.wait()
        assert owner.stdout is not None
        owner.stdout.close()


async def test_a_start_that_takes_too_long_names_the_limit_and_ends_with_the_servers_words(tmp_path: Path) -> None:
    code = "print('still reading weights', flush=True); import time; time.sleep(600)"
    server = Server("the slow one", [sys.executable, "-c", code], tmp_path / "log")

    async def never() -> bool:
        return False

    with pytest.raises(TimedOut, match=r"the slow one has not started within 1\.5 s; .*still reading weights"):
        await server.start(never, 1.5)
    assert not server.alive


async def test_a_server_that_ends_at_once_says_how_and_why(tmp_path: Path) -> None:
    async def never() -> bool:
        return False

    server = Server("the broken one", [sys.executable, "-c", "raise SystemExit('no such model')"], tmp_path / "log")
    with pytest.raises(ConfigError, match=r"the broken one does not start \(exit code 1\); .*no such model"):
        await server.start(never, 60)
    server = Server("the absent one", ["/no/such/python"], tmp_path / "log2")
    with pytest.raises(ConfigError, match=r"exit code 127.*/no/such/python: No such file"):
        await server.start(never, 60)


@pytest.mark.parametrize("stays", [True, False])
async def test_a_log_is_named_if_it_can_be_read_later(tmp_path: Path, stays: bool) -> None:
    async def never() -> bool:
        return False

    scratch = tmp_path / "scratch"
    log = (tmp_path if stays else scratch) / "log"
    server = Server("the broken one", [sys.executable, "-c", "raise SystemExit('no model')"], log, scratch=str(scratch))
    with pytest.raises(ConfigError) as refused:
        await server.start(never, 60)
    assert "no model" in str(refused.value) and (str(log) in str(refused.value)) == stays


async def test_a_server_that_is_killed_is_told_with_its_signal(tmp_path: Path) -> None:
    server, pids = _family(tmp_path)
    family = await _up(server, pids)
    os.kill(family[0], signal.SIGKILL)
    async with asyncio.timeout(30):
        lost = await server.ended()
    assert "killed by signal 9" in str(lost) and _wait(lambda: _gone(family))


def test_a_free_port_is_free() -> None:
    import socket

    with socket.socket() as probe:
        probe.bind(("127.0.0.1", free_port()))
