"""What the tests of sandboxes share: back ends by name, and a look at what is left of one."""

import os
import subprocess
import sys
import time
from contextlib import asynccontextmanager, nullcontext, suppress
from pathlib import Path

import pytest

from troupe.envs import sandbox
from troupe.envs.sandbox import SandboxSettings, docker
from troupe.envs.sandbox.owner import LABEL
from troupe.protocol.errors import EnvironmentFailed

DOCKER = pytest.param("docker", marks=pytest.mark.slow)
HOLDS = ("bubblewrap", DOCKER, pytest.param("gvisor", marks=pytest.mark.slow))
ALL = (*HOLDS, "subprocess")
MB = 2**20


@asynccontextmanager
async def opened(backend, **settings):
    async with await sandbox.open(SandboxSettings(**choice(backend), **settings)) as box:
        yield box


def choice(backend) -> dict:
    """Settings that choose what is tested under this name; skips, with the reason, what this machine lacks."""
    name = "docker" if backend == "gvisor" else backend
    if why := sandbox.missing(name):
        pytest.skip(why)
    if backend == "gvisor" and not docker.has_gvisor():
        pytest.skip("the Docker daemon has no runtime runsc (gVisor)")
    runtime = {"docker": "runc", "gvisor": "runsc"}.get(backend, "")
    return {"backend": name, "runtime": runtime, "trusted": backend == "subprocess"}


def spawn(code: str, *args: str, **options) -> subprocess.Popen:
    """A Python of its own, not in a sandbox."""
    return subprocess.Popen([sys.executable, "-c", code, *args], stdout=subprocess.PIPE, **options)


def leftovers(marker: str) -> list[str]:
    """Command lines of this machine with `marker` in them."""
    found = []
    for each in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            line = each.read_bytes()
        except OSError:
            continue
        if marker.encode() in line and int(each.parent.name) != os.getpid():
            found.append(line.decode(errors="replace"))
    return found


def gvisor_may_end(backend):
    """A bomb may exhaust the kernel that gVisor runs in the container: the container ends, and the host has not noticed."""
    return suppress(EnvironmentFailed) if backend == "gvisor" else nullcontext()


def containers_of(pid: int) -> list[str]:
    """Containers of sandboxes that process `pid` owns."""
    if sandbox.missing("docker"):
        return []
    found = docker._client().containers.list(all=True, filters={"label": LABEL}, ignore_removed=True)
    return [each.name for each in found if each.labels[LABEL].split(".")[1] == str(pid)]


def gone(check, within_s: float = 20.0) -> bool:
    """Whether `check` becomes empty."""
    end = time.monotonic() + within_s
    while check():
        if time.monotonic() > end:
            return False
        time.sleep(0.05)
    return True
