"""What a world leaves behind: threads, processes, tasks of the event loop, open files, temporary files, and memory.

Promise: processes that carry this check's temporary folder in their environment, and only those, are ended by it.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import shutil
import signal
import tempfile
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

KINDS = ("thread", "process", "asyncio task", "open file", "temporary file")
_OURS = ("world-", "asyncio_", "check-")  # threads of the driver, of the loop's executor, and of the check
_PROC = Path("/proc")

Left = dict[str, dict[Any, str]]
"""kind → what there is of it: identity → what to call it."""


@contextlib.contextmanager
def own_folder() -> Iterator[str]:
    """A temporary folder in which all others are made meanwhile, also by child processes."""
    before, variable = tempfile.tempdir, os.environ.get("TMPDIR")
    folder = tempfile.mkdtemp(prefix="troupe-check-")
    tempfile.tempdir = os.environ["TMPDIR"] = folder
    try:
        yield folder
    finally:
        tempfile.tempdir = before
        if variable is None:
            os.environ.pop("TMPDIR", None)
        else:
            os.environ["TMPDIR"] = variable
        shutil.rmtree(folder, ignore_errors=True)


def look(folder: str) -> Left:
    """All that there is now. folder: of `own_folder`."""
    gc.collect()
    return {
        "thread": {thread: thread.name for thread in threading.enumerate() if not thread.name.startswith(_OURS)},
        "process": {pid: _command(pid) for pid in processes(folder)},
        "asyncio task": {task: getattr(task.get_coro(), "__qualname__", task.get_name()) for task in asyncio.all_tasks()},
        "open file": _open_files(),
        "temporary file": {path: Path(path).name for path in map(str, Path(folder).iterdir())},
    }


def since(before: Left, now: Left) -> Left:
    """What is there now and was not, of the kinds of which there is more."""
    return {
        kind: {key: name for key, name in now[kind].items() if key not in before[kind]}
        if len(now[kind]) > len(before[kind])
        else {}
        for kind in KINDS
    }


class Watch:
    """What is left of a number of episodes: count them, in a `with` of this. folder: of `own_folder`."""

    def __init__(self, folder: str) -> None:
        self.episodes = 0
        self._folder, self._new, self._bytes = folder, dict[str, dict[Any, str]](), 0

    def __enter__(self) -> Watch:
        self._before, self._size = look(self._folder), resident()
        return self

    def __exit__(self, *exc: object) -> None:
        self._new, self._bytes = since(self._before, look(self._folder)), resident() - self._size

    def still(self, now: Left) -> Left:
        """What they have left, as far as it is there."""
        return {kind: {key: name for key, name in found.items() if key in now[kind]} for kind, found in self._new.items()}

    @property
    def megabytes(self) -> float:
        """By which each of them has made this process larger, on average."""
        return self._bytes / 1e6 / max(1, self.episodes)


def resident() -> int:
    """The memory that this process occupies, in bytes; 0 where nobody says."""
    with contextlib.suppress(OSError):
        return int((_PROC / "self" / "statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    return 0


def processes(folder: str) -> list[int]:
    """Processes, this one left out, that were started with `folder` in their environment; zombies are gone already."""
    found = []
    for entry in _PROC.iterdir() if _PROC.is_dir() else ():
        if entry.name.isdigit() and int(entry.name) != os.getpid():
            with contextlib.suppress(OSError):  # gone, or somebody else's
                if folder.encode() in (entry / "environ").read_bytes() or _forked(entry):
                    found.append(int(entry.name))
    return found


def _forked(entry: Path) -> bool:
    """A fork keeps the environment that this process was started with."""
    fields = (entry / "stat").read_text().rpartition(")")[2].split()
    return fields[0] != "Z" and int(fields[1]) == os.getpid() and (entry / "cmdline").read_bytes() == _own_command()


def _own_command() -> bytes:
    return (_PROC / "self" / "cmdline").read_bytes()


def end(folder: str) -> None:
    """Kills the processes that were left behind."""
    for pid in processes(folder):
        with contextlib.suppress(OSError):
            os.kill(pid, signal.SIGKILL)


def _command(pid: int) -> str:
    with contextlib.suppress(OSError):
        command = (_PROC / str(pid) / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace").strip()
        return f"{command[:60]} (pid {pid})"
    return f"pid {pid}"


def _open_files() -> dict[Any, str]:
    found = {}
    for link in (_PROC / "self" / "fd").iterdir() if _PROC.is_dir() else ():
        with contextlib.suppress(OSError):  # the listing's own
            target = os.readlink(link)
            found[link.name, target] = target
    return found
