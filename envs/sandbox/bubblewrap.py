"""Sandboxes of bubblewrap: namespaces of their own, no daemon, no image; 20 to 50 ms each.

Programs see the host's `/usr` and the Python that runs Troupe, both read-only, a `/proc` of their own processes, and three
small memory file systems: `/work`, `/tmp` and `/dev/shm`. There is no network. The kernel ends everything when its first
process ends, and that one ends with its owner.

Opened by root, a sandbox runs as a user id of its own that owns nothing on the host; opened by anybody else, as a user
namespace's nobody. The kernel then counts its processes apart from all others.
"""

from __future__ import annotations

import asyncio
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
from contextlib import suppress
from functools import cache
from pathlib import Path

from troupe.envs.sandbox import owner, seccomp
from troupe.envs.sandbox.base import ProcessChannel, python_of_this_process, warden_command
from troupe.envs.sandbox.settings import SMALL_MB, SandboxSettings
from troupe.protocol.errors import ConfigError

NAME = "bubblewrap"
_STD = ((0, "in"), (1, "out"), (2, "err"))
_HOST = ("/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/alternatives", "/etc/localtime")


@cache
def missing() -> str:
    """Why no sandbox of this kind can be opened here, and what to do; empty if one can."""
    program = shutil.which("bwrap")
    if program is None:
        return "there is no bwrap program: install the package bubblewrap"
    try:
        said = subprocess.run([program, "--version"], capture_output=True, text=True, timeout=10).stdout
        version = tuple(map(int, re.findall(r"\d+", said)[:2]))
        if version < (0, 8):
            return f"{said.strip()} is too old: 0.8 or newer is needed"
        trial = [*_place(program, SandboxSettings()), "--", python_of_this_process(), "-I", "-S", "-c", "pass"]
        tried = subprocess.run(trial, capture_output=True, text=True, timeout=30)
    except (OSError, subprocess.TimeoutExpired) as error:
        return f"bwrap does not run: {error}"
    if tried.returncode:
        return f"bwrap cannot make namespaces here: {' '.join(tried.stderr.split())[-200:]}"
    return ""


async def start(settings: SandboxSettings) -> ProcessChannel:
    """A fresh sandbox. Raises ConfigError if there cannot be one."""
    why = await asyncio.to_thread(missing)
    await asyncio.to_thread(_reap_once)
    program = shutil.which("bwrap")
    if why or program is None:
        raise ConfigError(f"no bubblewrap sandbox: {why}")
    for path in settings.readable:
        if not path.is_absolute() or not path.exists():
            raise ConfigError(f"sandbox.readable: {path} is not an absolute path that exists")
    uid = random.SystemRandom().randrange(2**30, 2**31 - 1) if os.getuid() == 0 else None
    python = python_of_this_process()
    programs = f"{Path(python).parent}:/usr/local/bin:/usr/bin:/bin"
    warden = warden_command(
        python, root="/work", path=programs, settings=settings, uid=uid, nproc=settings.pids + 1, code=seccomp.program()
    )
    process = await asyncio.create_subprocess_exec(
        *_place(program, settings),
        "--",
        *warden,
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        env={},
    )
    return ProcessChannel(process)


def reap() -> list[str]:
    """Ends those that were being started when their owner died: bwrap then may wait for ever. Returns their numbers."""
    ended = []
    for folder in Path("/proc").glob("[0-9]*"):
        with suppress(OSError, ValueError):
            process = os.pidfd_open(int(folder.name))
            try:
                program, *_, given = (folder / "cmdline").read_text().rstrip("\0").split("\0")
                if program.endswith("bwrap") and not owner.alive(json.loads(given)["owner"]):
                    signal.pidfd_send_signal(process, signal.SIGKILL)
                    ended.append(folder.name)
            except (KeyError, TypeError, AttributeError):  # somebody else's
                pass
            finally:
                os.close(process)
    return ended


@cache
def _reap_once() -> None:
    reap()


def _place(program: str, settings: SandboxSettings) -> list[str]:
    """bwrap's arguments: what the sandbox is made of."""
    args = [program, "--as-pid-1", "--die-with-parent", "--new-session", "--clearenv", "--hostname", "sandbox"]
    args += ["--unshare-pid", "--unshare-net", "--unshare-ipc", "--unshare-uts", "--unshare-cgroup-try"]
    if os.getuid() == 0:
        args += ["--cap-drop", "ALL", "--cap-add", "CAP_SETUID", "--cap-add", "CAP_SETGID"]  # given up by the warden
    else:
        args += ["--unshare-user", "--disable-userns", "--uid", "65534", "--gid", "65534"]
    args += ["--proc", "/proc", "--perms", "0755", "--dir", "/dev", "--perms", "0755", "--dir", "/etc"]
    # No pseudo-terminals: the host has so many for all. /dev/full reads as /dev/zero does and cannot be mapped, which would
    # be memory that nobody counts.
    for device in ("null", "full", "random", "urandom"):
        args += ["--dev-bind", f"/dev/{device}", f"/dev/{device}"]
    for name, target in (("zero", "full"), ("fd", "/proc/self/fd"), *((f"std{x}", f"/proc/self/fd/{n}") for n, x in _STD)):
        args += ["--symlink", target, f"/dev/{name}"]
    for path, megabytes in (("/work", settings.disk_mb), ("/tmp", SMALL_MB), ("/dev/shm", SMALL_MB)):
        args += ["--perms", "1777", "--size", str(megabytes * 2**20), "--tmpfs", path]
    for path in _HOST:
        if os.path.islink(path) and os.path.isdir(path):
            args += ["--symlink", os.readlink(path), path]
        elif os.path.exists(path):
            args += ["--ro-bind", path, path]
    for each in dict.fromkeys([sys.base_prefix, *map(str, settings.readable)]):
        if each != "/usr":
            args += ["--ro-bind", each, each]
    return [*args, "--remount-ro", "/", "--chdir", "/work"]
