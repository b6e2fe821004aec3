"""Runs one program for an owner and dies with it, and so does everything that the program started.

It is run as a script by whoever owns a server (`server.py`), and imports the standard library only:
`python -I keeper.py REPORT FOLDER COMMAND...`, with a pipe as stdin that the owner holds open. REPORT is the number of a
descriptor to write to, FOLDER the owner's scratch folder (empty: none).

Promises:
- the owner is gone (end of file on stdin, however it died): the program and all that it started are killed, FOLDER is removed;
- the program ended: what it left behind is killed, and REPORT is told its exit code (128 + signal, if by one). The keeper stays
  until the owner is gone, for FOLDER's sake;
- the keeper itself is killed: the program is killed by the kernel.
"""

from __future__ import annotations

import contextlib
import ctypes
import os
import select
import shutil
import signal
import subprocess
import sys
import time

PR_SET_PDEATHSIG, PR_SET_CHILD_SUBREAPER = 1, 36


def main(report: int, folder: str, command: list[str]) -> None:
    prctl = ctypes.CDLL(None).prctl
    prctl(PR_SET_CHILD_SUBREAPER, 1)  # whoever loses its parent becomes ours
    bell, wake = os.pipe()
    os.set_blocking(wake, False)
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
    for ignored in (signal.SIGINT, signal.SIGTERM):  # those are the owner's to decide on
        signal.signal(ignored, signal.SIG_IGN)
    wanted, code = -1, None
    try:
        wanted = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            start_new_session=True,
            preexec_fn=lambda: _begin(prctl),
        ).pid
    except OSError as error:
        print(f"{command[0]}: {error.strerror}", file=sys.stderr, flush=True)
        code = 127
    while code is None:
        ready, _, _ = select.select([0, bell], [], [], 1.0)
        if 0 in ready and not os.read(0, 1):
            break
        if bell in ready:
            os.read(bell, 512)
        code = _reap(wanted)
    _end_all()
    if code is not None:
        with contextlib.suppress(OSError):  # the owner is gone, too
            os.write(report, str(code if code >= 0 else 128 - code).encode())
        while os.read(0, 1):
            pass
    if folder:
        shutil.rmtree(folder, ignore_errors=True)


def _begin(prctl: ctypes._NamedFuncPointer) -> None:
    prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    for usual in (signal.SIGINT, signal.SIGTERM):
        signal.signal(usual, signal.SIG_DFL)


def _reap(wanted: int) -> int | None:
    """Takes note of what has ended; the exit code of `wanted` if it has."""
    code = None
    with contextlib.suppress(ChildProcessError):
        while True:
            pid, status = os.waitpid(-1, os.WNOHANG)
            if pid == 0:
                break
            if pid == wanted:
                code = os.waitstatus_to_exitcode(status)
    return code


def _end_all() -> None:
    """Kills all below this process, again and again until nobody is left."""
    for _ in range(2000):
        below = _below(os.getpid())
        for pid in below:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.kill(pid, signal.SIGKILL)
        _reap(0)
        if not below:
            return
        time.sleep(0.005)


def _below(root: int) -> set[int]:
    parents = {}
    for name in os.listdir("/proc"):
        if name.isdigit():
            with contextlib.suppress(OSError, ValueError, IndexError), open(f"/proc/{name}/stat") as file:
                parents[int(name)] = int(file.read().rpartition(")")[2].split()[1])
    found: set[int] = set()
    new = {root}
    while new:
        new = {pid for pid, parent in parents.items() if parent in new} - found
        found |= new
    return found


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2], sys.argv[3:])
