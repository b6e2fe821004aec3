"""Who owns a sandbox, as text that other processes can check: a process of this boot of this machine, by its start time."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path

PREFIX = "troupe-sandbox-"
LABEL = "troupe.sandbox.owner"


def me() -> str:
    """This process."""
    return _name(os.getpid())


def alive(name: str) -> bool:
    """Whether the process of that name lives. One of another boot or machine cannot be judged, and counts as alive."""
    boot, _, rest = name.partition(".")
    pid = rest.partition(".")[0]
    if boot != _boot() or not pid.isdigit():
        return True
    try:
        return _name(int(pid)) == name
    except (OSError, IndexError):
        return False


def _name(pid: int) -> str:
    started = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    return f"{_boot()}.{pid}.{started}"


@cache
def _boot() -> str:
    """Process numbers mean something only in one boot and one process namespace."""
    return Path("/proc/sys/kernel/random/boot_id").read_text()[:8] + os.readlink("/proc/self/ns/pid").strip("pid:[]")
