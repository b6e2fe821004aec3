"""What a world leaves behind: threads, processes, open files, temporary files; and what it changes in its process.

Promise: processes that carry this check's temporary folder in their environment, and only those, are ended by it.
"""

from __future__ import annotations

import contextlib
import gc
import os
import random
import shutil
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

KINDS = ("thread", "process", "open file", "temporary file")
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
        "open file": _open_files(),
        "temporary file": {path: Path(path).name for path in map(str, Path(folder).iterdir())},
    }


def since(before: Left, now: Left) -> Left:
    """What is there now and was not."""
    return {kind: {key: name for key, name in now[kind].items() if key not in before[kind]} for kind in KINDS}


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


# -- the process itself ----------------------------------------------------------------------------------------------


def _numpy() -> Any:
    module = sys.modules.get("numpy.random")
    return None if module is None else repr(module.get_state())


def _torch() -> Any:
    module = sys.modules.get("torch")
    return None if module is None else module.get_rng_state().tolist()


def _folder_now() -> str:
    try:
        return os.getcwd()
    except OSError:
        return "a folder that is gone"


_CHANCE: dict[str, Callable[[], Any]] = {
    "Python's global random": random.getstate,
    "numpy's global random": _numpy,
    "torch's global random": _torch,
}


class Process:
    """What all worlds of a process share, as it is when this is made."""

    def __init__(self) -> None:
        self._chance = {name: read() for name, read in _CHANCE.items()}
        self._folder = _folder_now()
        self._environment = dict(os.environ)

    def drawn(self) -> list[str]:
        """Global generators that were used or seeded since."""
        return [name for name, read in _CHANCE.items() if self._chance[name] is not None and read() != self._chance[name]]

    def moved(self) -> str:
        """The working folder, if it is another one now."""
        now = _folder_now()
        return "" if now == self._folder else now

    def variables(self) -> list[str]:
        """Environment variables that were changed."""
        now = dict(os.environ)
        return sorted(name for name in now.keys() | self._environment.keys() if now.get(name) != self._environment.get(name))

    def restore(self) -> None:
        """Puts folder and environment back."""
        with contextlib.suppress(OSError):
            os.chdir(self._folder)
        for name in self.variables():
            if name in self._environment:
                os.environ[name] = self._environment[name]
            else:
                os.environ.pop(name, None)
