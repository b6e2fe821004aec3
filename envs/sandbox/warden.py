"""The first process inside of a sandbox: it runs programs one after the other, watches them, and ends all that they started.

It is sent in as text (`python3 -c`), so it imports the standard library only and never Troupe. One request, one answer; both
are frames: lengths of a header and a body (`>IQ`), the header as JSON, the body as bytes.

Promises:
- when a run has been answered, no process that it started is alive, and nothing that it wrote to its pipes is unread;
- a run is ended when it takes too long, too much CPU time, memory, output or too many files, whoever of its processes does;
- programs can neither end, trace, read nor limit the warden where it is process 1, nor speak in its name;
- when its owner is gone (end of file on stdin) the warden kills all and exits.
"""

from __future__ import annotations

import base64
import contextlib
import ctypes
import json
import os
import resource
import select
import shutil
import signal
import stat
import struct
import subprocess
import sys
import time
from typing import Any, NoReturn

FRAME = struct.Struct(">IQ")
WATCH_S = 0.05
INODES = 20_000  # files of a run; each costs the kernel memory that no size limit counts
PR_SET_PDEATHSIG, PR_SET_DUMPABLE, PR_SET_CHILD_SUBREAPER = 1, 4, 36
PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER = 38, 22, 2
Answer = tuple[dict[str, Any], bytes]
TICK = os.sysconf("SC_CLK_TCK")
PAGE = os.sysconf("SC_PAGE_SIZE")
SOCKET = 208 * 1024  # bytes of a socket's buffer, as Linux has it


class Warden:
    """root: the folder in which programs run. limits: SandboxSettings as a dict. nproc: RLIMIT_NPROC of programs, 0 for none.

    uid: what programs become, None: they stay who the warden is.
    alone: it is process 1 of a namespace, and every other process there is one that it has to end.
    code: a filter of system calls for programs, as classic BPF; empty for none.
    """

    def __init__(self, root: str, limits: dict[str, Any], nproc: int, uid: int | None, alone: bool, code: bytes) -> None:
        self.root = os.path.realpath(root)
        self.limits = limits
        self.nproc = nproc
        self.uid = uid
        self.alone = alone
        self.filter = Filter(len(code) // 8, code)
        self.prctl = ctypes.CDLL(None, use_errno=True).prctl
        self.bell, wake = os.pipe()
        for fd in (self.bell, wake):
            os.set_blocking(fd, False)
        signal.signal(signal.SIGINT, signal.SIG_DFL)  # process 1 does not feel what it does not handle
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(wake, warn_on_full_buffer=False)
        self.prctl(PR_SET_DUMPABLE, 0)
        self.sockets = sockets_hold()
        if not alone:
            self.prctl(PR_SET_CHILD_SUBREAPER, 1)
            signal.signal(signal.SIGTERM, lambda *_: self.leave())
            self.prctl(PR_SET_PDEATHSIG, signal.SIGTERM)

    def serve(self) -> NoReturn:
        """Answers requests until the owner is gone."""
        while True:
            header, body = read_frame()
            if header is None:
                self.leave()
            try:
                answer, out = getattr(self, "do_" + header.pop("op"))(body, **header)
            except OSError as error:
                answer, out = {"error": os.strerror(error.errno) if error.errno else str(error)}, b""
            except (ValueError, MemoryError, subprocess.SubprocessError) as error:
                answer, out = {"error": str(error) or "no memory"}, b""
            write_frame(answer, out)

    def leave(self) -> NoReturn:
        """Kills all and exits."""
        self.end_all()
        if not self.alone:
            shutil.rmtree(self.root, ignore_errors=True)
        os._exit(0)

    # -- requests ----------------------------------------------------------------------------------------------------

    def do_hello(self, body: bytes) -> Answer:
        """Says that the sandbox works."""
        return {}, b""

    def do_write(self, body: bytes, path: str) -> Answer:
        """Writes `body` to a file below root; folders are made."""
        target = self.inside(path)
        os.makedirs(os.path.dirname(target), exist_ok=True)
        fd = os.open(target, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK | os.O_NOFOLLOW, 0o644)
        with open(fd, "wb") as file:
            self.regular(fd)
            file.write(body)
        return {}, b""

    def do_read(self, body: bytes, path: str, limit: int) -> Answer:
        """The bytes of a file below root, if they are at most `limit`."""
        fd = os.open(self.inside(path), os.O_RDONLY | os.O_NONBLOCK | os.O_NOFOLLOW)
        with open(fd, "rb") as file:
            self.regular(fd)
            data = file.read(limit + 1)
        if len(data) > limit:
            raise ValueError(f"it has more than {limit} bytes")
        return {}, data

    def do_run(self, body: bytes, command: list[str], wall_s: float) -> Answer:
        """Runs a program with `body` as its stdin. Out: {exit_code, killed_for, wall_s, stdout: bytes of the body}."""
        begin = time.monotonic()
        ooms = oom_kills()
        try:
            child = subprocess.Popen(
                command,
                cwd=self.root,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                preexec_fn=self.restrict,
                start_new_session=True,
            )
        except (OSError, ValueError) as error:
            self.end_all()
            why = getattr(error, "strerror", None) or str(error)
            answer = {"exit_code": 127, "killed_for": "", "wall_s": time.monotonic() - begin, "stdout": 0}
            return answer, f"{command[0]}: {why}\n".encode(errors="replace")
        run = Run(child, body, self.limits["output_bytes"])
        cause = self.follow(run, begin + wall_s)
        self.end_all(run)
        run.drain()
        if not cause and (run.overflow or oom_kills() > ooms):
            cause = "output" if run.overflow else "memory"
        answer = {"exit_code": run.exit_code, "killed_for": cause, "wall_s": time.monotonic() - begin, "stdout": len(run.out)}
        return answer, bytes(run.out + run.err)

    # -- a run -------------------------------------------------------------------------------------------------------

    def follow(self, run: Run, deadline: float) -> str:
        """Moves bytes until the program ends or a limit is reached; returns the limit's name, or "" """
        run.poll.register(self.bell, select.POLLIN)
        run.poll.register(0, 0)  # reports only that the owner is gone
        before = resource.getrusage(resource.RUSAGE_CHILDREN)
        spent = before.ru_utime + before.ru_stime
        self.ticks: dict[tuple[int, bytes], int] = {}  # of each process that was seen, by number and start
        watch = 0.0
        while run.exit_code is None:
            now = time.monotonic()
            if now >= deadline:
                return "wall"
            if now >= watch:
                cause = self.excess(spent)
                if cause:
                    return cause
                watch = time.monotonic() + max(WATCH_S, 10 * (time.monotonic() - now))
            wait = min(watch, deadline) - time.monotonic()
            for fd, _ in run.poll.poll(max(0.0, wait) * 1000):
                if fd == 0:
                    self.leave()
                elif fd == self.bell:
                    with contextlib.suppress(BlockingIOError):
                        os.read(self.bell, 512)
                else:
                    run.move(fd)
            if run.overflow:
                return "output"
            self.reap(run)
        return ""

    def excess(self, spent: float) -> str:
        """The limit that the processes of this run exceed together, or "". spent: CPU seconds of earlier runs."""
        done = resource.getrusage(resource.RUSAGE_CHILDREN)
        cpu = done.ru_utime + done.ru_stime - spent
        memory = 0
        others = self.others()
        if self.alone and len(others) > self.limits["pids"]:
            return "pids"
        for pid in others:
            with contextlib.suppress(OSError, ValueError, IndexError):
                fields = fields_of(pid)
                user, system, *children = map(int, fields[11:15])
                cpu += (user + system + sum(children)) / TICK
                self.ticks[pid, fields[19]] = user + system
                memory += memory_of(pid)
        cpu = max(cpu, sum(self.ticks.values()) / TICK)  # who ignores SIGCHLD is told nothing of his children's time
        if self.alone:
            memory += max(0, sockets_hold() - self.sockets)
        if memory > self.limits["memory_mb"] * 2**20:
            return "memory"
        if cpu > self.limits["cpu_s"]:
            return "cpu"
        if self.alone:
            for path in (self.root, "/tmp", "/dev/shm"):
                with contextlib.suppress(OSError):
                    of = os.statvfs(path)
                    if of.f_files - of.f_ffree > INODES:
                        return "disk"
        return ""

    def others(self) -> list[int]:
        """Every process that a program may have started."""
        pids = [int(name) for name in os.listdir("/proc") if name.isdigit()]
        if self.alone:
            return [pid for pid in pids if pid != os.getpid()]
        parents = {}
        for pid in pids:
            with contextlib.suppress(OSError, ValueError, IndexError):
                parents[pid] = int(fields_of(pid)[1])
        found: set[int] = set()
        new = {os.getpid()}
        while new:
            new = {pid for pid, parent in parents.items() if parent in new} - found
            found |= new
        return list(found)

    def end_all(self, run: Run | None = None) -> None:
        """Kills all but the warden, again and again until nobody is left."""
        for _ in range(5000):
            with contextlib.suppress(ProcessLookupError):
                if self.alone:
                    os.kill(-1, signal.SIGKILL)
            if not self.alone:
                for pid in self.others():
                    with contextlib.suppress(ProcessLookupError, PermissionError):
                        os.kill(pid, signal.SIGKILL)
            if not self.reap(run):
                return
            time.sleep(0.001)
        os._exit(1)  # somebody cannot be killed: the end of the namespace takes everybody along

    def reap(self, run: Run | None = None) -> bool:
        """Takes note of processes that have ended; whether there are others."""
        try:
            while True:
                pid, status = os.waitpid(-1, os.WNOHANG)
                if pid == 0:
                    return True
                if run is not None and pid == run.child.pid:
                    run.exit_code = run.child.returncode = os.waitstatus_to_exitcode(status)
        except ChildProcessError:
            return False

    def restrict(self) -> None:
        """Between fork and exec of a program: limits that the kernel holds for each process."""
        memory, disk = self.limits["memory_mb"] * 2**20, self.limits["disk_mb"] * 2**20
        cpu = int(self.limits["cpu_s"]) + 1
        self.prctl(PR_SET_DUMPABLE, 1)
        self.prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
        with contextlib.suppress(OSError), open("/proc/self/oom_score_adj", "w") as file:
            file.write("1000")
        bounds = {
            resource.RLIMIT_CORE: 0,
            resource.RLIMIT_FSIZE: disk,
            resource.RLIMIT_NOFILE: 256,
            resource.RLIMIT_CPU: cpu,
            resource.RLIMIT_DATA: memory,
        }
        if self.nproc:
            bounds[resource.RLIMIT_NPROC] = self.nproc
        for what, bound in bounds.items():
            resource.setrlimit(what, (bound, bound))
        with contextlib.suppress(OSError):
            os.nice(5)  # the warden is asked first
        if self.uid is not None:
            os.setresuid(self.uid, self.uid, self.uid)
        if self.filter.count:
            self.prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
            if self.prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.byref(self.filter)):
                raise OSError(ctypes.get_errno(), "no filter of system calls can be put on a program")

    # -- files -------------------------------------------------------------------------------------------------------

    def inside(self, path: str) -> str:
        """The real path of `path`, which must be below root. Nothing runs meanwhile, so nothing can change it."""
        real = os.path.realpath(os.path.join(self.root, path))
        if os.path.commonpath([real, self.root]) != self.root or real == self.root:
            raise ValueError("it leads out of the sandbox's folder")
        return real

    def regular(self, fd: int) -> None:
        """Refuses what is no file: a pipe, a device, a folder."""
        if not stat.S_ISREG(os.fstat(fd).st_mode):
            raise ValueError("it is not a regular file")


class Filter(ctypes.Structure):
    """The kernel's `sock_fprog`: instructions of eight bytes each."""

    _fields_ = (("count", ctypes.c_ushort), ("code", ctypes.c_char_p))


class Run:
    """A program and its three pipes. out, err: what it wrote, at most `limit` bytes each."""

    def __init__(self, child: subprocess.Popen[bytes], stdin: bytes, limit: int) -> None:
        assert child.stdin and child.stdout and child.stderr
        self.child = child
        self.pipes = (child.stdin, child.stdout, child.stderr)
        self.rest = memoryview(stdin)
        self.limit = limit
        self.out, self.err = bytearray(), bytearray()
        self.overflow = False
        self.exit_code: int | None = None
        self.poll = select.poll()
        self.into = {child.stdout.fileno(): self.out, child.stderr.fileno(): self.err}
        for fd in self.into:
            os.set_blocking(fd, False)
            self.poll.register(fd, select.POLLIN)
        os.set_blocking(child.stdin.fileno(), False)
        self.poll.register(child.stdin.fileno(), select.POLLOUT)

    def move(self, fd: int) -> bool:
        """Moves what can be moved through one pipe; whether more may come."""
        try:
            if fd not in self.into:
                if self.rest:
                    self.rest = self.rest[os.write(fd, self.rest[:65536]) :]
                if not self.rest:
                    self.poll.unregister(fd)
                    self.pipes[0].close()
                return bool(self.rest)
            data = os.read(fd, 65536)
            kept = self.into[fd]
            room = self.limit - len(kept)
            kept += data[:room]
            self.overflow |= len(data) > room
            if not data:
                self.poll.unregister(fd)
            return bool(data)
        except BlockingIOError:
            return False
        except BrokenPipeError:
            self.poll.unregister(fd)
            self.rest = memoryview(b"")
            return False

    def drain(self) -> None:
        """Reads what is left in the pipes of a run whose processes are all dead, and closes them."""
        for fd in self.into:
            with contextlib.suppress(KeyError):
                while self.move(fd):
                    pass
        for pipe in self.pipes:
            with contextlib.suppress(OSError):
                pipe.close()


def fields_of(pid: int) -> list[bytes]:
    """The fields of /proc/PID/stat after the command's name: [1] is the parent, [11:15] CPU ticks, its dead children's too, and
    [19] when it started."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        return file.read().rpartition(b")")[2].split()


def memory_of(pid: int) -> int:
    """Bytes that a process and its page tables hold; what it shares counts in part, if it lets itself be looked at."""
    tables = 0
    with contextlib.suppress(StopIteration), open(f"/proc/{pid}/status", "rb") as file:
        tables = next(int(line.split()[1]) * 1024 for line in file if line.startswith(b"VmPTE:"))
    with contextlib.suppress(OSError, ValueError), open(f"/proc/{pid}/smaps_rollup", "rb") as file:
        held = [int(line.split()[1]) * 1024 for line in file if line.startswith((b"Pss:", b"SwapPss:"))]
        if held:
            return tables + sum(held)
    with open(f"/proc/{pid}/statm", "rb") as file:
        return tables + int(file.read().split()[1]) * PAGE


def sockets_hold() -> int:
    """Bytes that all sockets of this network namespace may hold: a buffer each, and what is queued in TCP's, which grow."""
    held = 0
    with contextlib.suppress(OSError, ValueError, IndexError), open("/proc/net/sockstat") as file:
        held = int(file.readline().split()[2]) * SOCKET
    for path in ("/proc/net/tcp", "/proc/net/tcp6"):
        with contextlib.suppress(OSError, ValueError, IndexError), open(path) as file:
            next(file, "")
            held += sum(int(size, 16) for line in file for size in line.split()[4].split(":"))
    return held


def oom_kills() -> int:
    """How often the kernel has killed for this control group's memory, where that can be read."""
    for path in ("/sys/fs/cgroup/memory.events", "/sys/fs/cgroup/memory/memory.oom_control"):
        with contextlib.suppress(OSError, StopIteration), open(path) as file:
            return next(int(line.split()[1]) for line in file if line.startswith("oom_kill "))
    return 0


def read_exactly(count: int) -> bytes:
    """`count` bytes of stdin; fewer if it ends."""
    data = bytearray()
    while len(data) < count:
        piece = os.read(0, min(count - len(data), 1 << 20))
        if not piece:
            break
        data += piece
    return bytes(data)


def read_frame() -> tuple[dict[str, Any] | None, bytes]:
    """(header, body) of the next request; (None, b"") at the end."""
    prefix = read_exactly(FRAME.size)
    if len(prefix) < FRAME.size:
        return None, b""
    head, size = FRAME.unpack(prefix)
    header, body = read_exactly(head), read_exactly(size)
    if len(header) + len(body) < head + size:
        return None, b""
    return json.loads(header), body


def write_frame(header: dict[str, Any], body: bytes) -> None:
    """Answers the owner."""
    head = json.dumps(header).encode()
    data = memoryview(FRAME.pack(len(head), len(body)) + head + body)
    while data:
        data = data[os.write(1, data) :]


def main() -> None:
    """argv[1]: JSON of owner (for the reaper), root, uid (None: stay who you are), apart, path (of programs), nproc, limits,
    filter (base64).

    apart: the warden keeps being root beside `uid`, which keeps programs away from it where process 1 is not protected.
    """
    given = json.loads(sys.argv[1])
    uid, apart = given["uid"], given["apart"]
    if uid is not None:
        os.setgroups([])
        os.setresgid(uid, uid, uid)
        os.setresuid(*((0, uid, 0) if apart else (uid, uid, uid)))
    os.umask(0o022)
    home = given["root"]
    os.environ.clear()
    os.environ.update(PATH=given["path"], HOME=home, LANG="C.UTF-8", PYTHONDONTWRITEBYTECODE="1")
    code = base64.b64decode(given["filter"])
    Warden(home, given["limits"], given["nproc"], uid if apart else None, os.getpid() == 1, code).serve()


if __name__ == "__main__":
    main()
