"""Nothing of a sandbox outlives its owner, however that ends: owners, pools and the reaper."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

from tests.envs.sandboxes import ALL, choice, containers_of, gone, leftovers, opened, spawn
from troupe.envs.sandbox import SandboxSettings, bubblewrap, docker
from troupe.envs.sandbox.owner import LABEL, PREFIX, alive, me
from troupe.envs.sandbox.pool import Pool
from troupe.envs.sandbox.reaper import reap
from troupe.protocol.errors import ConfigError, EnvironmentFailed, InvalidAction, NotReady, Overloaded

OWNER = """
import asyncio, sys
from troupe.envs import sandbox
async def main():
    choice, marker = sys.argv[1:]
    settings = sandbox.SandboxSettings.model_validate_json(choice)
    box = await sandbox.open(settings)
    idle = await sandbox.open(settings)
    await idle.write('x', marker)
    code = 'import os, time; os.fork(); os.setsid() if os.getpid() != os.getpgid(0) else 0; time.sleep(600)'
    started = asyncio.create_task(box.run(['python3', '-c', code, marker]))
    await asyncio.sleep(0)
    print('ready', flush=True)
    await started
asyncio.run(main())
"""


@pytest.mark.parametrize("backend", ALL)
async def test_an_owner_killed_with_kill_9_leaves_nothing(backend, tmp_path):
    settings = SandboxSettings(**choice(backend), wall_s=600).model_dump_json()
    marker = f"owned-{os.getpid()}-{backend}"
    env = {**os.environ, "TMPDIR": str(tmp_path)}
    owner = spawn(OWNER, settings, marker, env=env)
    try:
        assert owner.stdout.readline() == b"ready\n"
        if backend != "gvisor":  # whose processes the host does not see
            assert gone(lambda: len(leftovers(marker)) < 3), "the owner, its program, and the program's child all run"
        assert len(containers_of(owner.pid)) == (2 if backend in ("docker", "gvisor") else 0)
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
    assert gone(lambda: containers_of(owner.pid))
    assert gone(lambda: leftovers(marker)), leftovers(marker)
    assert gone(lambda: list(tmp_path.iterdir())), list(tmp_path.iterdir())


@pytest.mark.parametrize("backend", ALL)
async def test_a_cancelled_run_closes_its_sandbox(backend):
    marker = f"cancelled-{os.getpid()}-{backend}"
    async with opened(backend) as box:
        task = asyncio.create_task(box.run(["python3", "-c", "import time; time.sleep(600)", marker]))
        await asyncio.sleep(0.5)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert box.closed and gone(lambda: leftovers(marker))
        with pytest.raises(EnvironmentFailed, match="closed"):
            await box.run(code="print(1)")


@pytest.mark.parametrize("backend", ALL)
async def test_a_pool_hands_each_sandbox_to_one_owner_and_resets_by_discarding(backend):
    pool = Pool(SandboxSettings(**choice(backend)), warm=1, limit=2)
    async with pool:
        assert pool.ready == 1
        first = await pool.take()
        second = await pool.take()
        assert first is not second
        await first.write("mine", "1")
        with pytest.raises(Overloaded):
            await pool.take(wait_s=0.1)
        third = await pool.reset(first)
        assert first.closed and third is not first
        with pytest.raises(InvalidAction):
            await third.read("mine")
        await pool.discard(second)
        await pool.discard(second)
        async with pool.lease() as fourth:
            assert (await fourth.run(code="print(4)")).ok
        assert fourth.closed
    assert third.closed and pool.ready == 0
    with pytest.raises(NotReady):
        await pool.take()


async def test_a_pool_that_cannot_open_any_says_so_to_who_takes_one_and_keeps_its_places():
    async with Pool(SandboxSettings(backend="subprocess"), warm=1, limit=1, wait_s=1) as pool:
        for _ in range(3):
            with pytest.raises(ConfigError, match="trusted"):
                await pool.take()


def test_the_reaper_removes_what_dead_owners_left_and_nothing_else(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    boot, pid, started = me().split(".")
    dead = [f"{boot}.{pid}.{int(started) + 1}", f"{boot}.{2**22 + 1}.{started}"]
    kept = [me(), f"elsewhere.{pid}.{started}"]
    assert [alive(name) for name in dead + kept] == [False, False, True, True]
    for name in dead + kept:
        (tmp_path / f"{PREFIX}{name}-abc" / "x").mkdir(parents=True)
    assert sorted(reap()) == sorted(f"{PREFIX}{name}-abc" for name in dead)
    assert sorted(each.name for each in tmp_path.iterdir()) == sorted(f"{PREFIX}{name}-abc" for name in kept)


def test_the_reaper_ends_a_bubblewrap_that_was_being_started_when_its_owner_died():
    boot, pid, started = me().split(".")
    code = "import time; time.sleep(600)"
    left, kept, other = (
        subprocess.Popen(["/usr/bin/bwrap", "-c", code, given], executable=sys.executable)
        for given in (f'{{"owner": "{boot}.{pid}.{int(started) + 1}"}}', f'{{"owner": "{me()}"}}', "[]")
    )
    try:
        assert gone(lambda: b"bwrap" not in Path(f"/proc/{left.pid}/cmdline").read_bytes())
        assert str(left.pid) in bubblewrap.reap() and left.wait(10) == -signal.SIGKILL
        assert kept.poll() is None and other.poll() is None
    finally:
        for process in (left, kept, other):
            process.kill()
            process.wait()


@pytest.mark.slow
async def test_the_reaper_removes_a_container_of_docker_whose_owner_died_before_it_was_started():
    choice("docker")
    boot, pid, started = me().split(".")
    async with opened("docker") as box:
        name = docker._image("")
        left = docker._client().containers.create(name, ["x"], labels={LABEL: f"{boot}.{pid}.{int(started) + 1}"})
        assert left.name in docker.reap()
        assert (await box.run(code="print(1)")).ok, "the living keep theirs"
