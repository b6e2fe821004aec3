"""What programs try in a sandbox stays in it: limits hold, the host is neither read nor reached, and nothing is left."""

import asyncio
import os
import signal
import subprocess
import sys
import tempfile
import time
from contextlib import asynccontextmanager, nullcontext, suppress
from pathlib import Path

import pytest

from troupe.envs import sandbox
from troupe.envs.sandbox import SandboxSettings, bubblewrap, docker, seccomp
from troupe.envs.sandbox.owner import LABEL, PREFIX, alive, me
from troupe.envs.sandbox.pool import Pool
from troupe.envs.sandbox.reaper import reap
from troupe.protocol.errors import ConfigError, EnvironmentFailed, InvalidAction, NotReady, Overloaded

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


# -- what every back-end does ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", ALL)
async def test_programs_run_and_share_files(backend):
    async with opened(backend) as box:
        result = await box.run(
            code="import sys; print(sys.stdin.read()[::-1]); sys.stderr.write('e'); sys.exit(3)", stdin="abc"
        )
        assert (result.stdout, result.stderr, result.exit_code, result.killed_for) == (b"cba\n", b"e", 3, "")
        assert not result.ok and not result.timed_out
        await box.write("a/b.txt", "héllo")
        result = await box.run(["python3", "-c", "print(open('a/b.txt').read()); open('c', 'wb').write(bytes(3))"])
        assert result.ok and result.stdout.decode() == "héllo\n"
        assert await box.read("c") == bytes(3)
        literal = "$(id); `id` | cat"
        assert (await box.run(["python3", "-c", "import sys; print(sys.argv[1])", literal])).stdout.decode() == literal + "\n"
        assert (await box.run(["no-such-program"])).exit_code == 127
        big = b"x" * 300_000
        assert (await box.run(code="import sys; print(len(sys.stdin.buffer.read()))", stdin=big)).stdout == b"300000\n"
        assert (await box.run(code="pass", stdin=big)).ok, "a program need not read its stdin"


@pytest.mark.parametrize("backend", ALL)
async def test_a_run_that_never_ends_is_ended_and_the_next_one_works(backend):
    async with opened(backend, cpu_s=0.5) as box:
        result = await box.run(code="import time; print('before', flush=True); time.sleep(600)", timeout_s=0.5)
        assert result.timed_out and result.killed_for == "wall" and result.stdout == b"before\n" and result.exit_code == -9
        ignores = "import signal\nfor s in set(signal.Signals) - {9, 19}: signal.signal(s, signal.SIG_IGN)\nwhile 1: pass"
        assert (await box.run(code=ignores)).killed_for == "cpu"
        assert (await box.run(code="print(1)")).stdout == b"1\n"


@pytest.mark.parametrize("backend", ALL)
async def test_nothing_of_a_run_outlives_it(backend):
    marker = f"left-{os.getpid()}-{backend}"
    daemon = (
        "import os, subprocess, sys\n"
        f"subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)', '{marker}'], start_new_session=True)\n"
        "if os.fork() == 0:\n os.setsid()\n import time; time.sleep(600)\n"
    )
    async with opened(backend) as box:
        result = await box.run(code=daemon)
        assert result.ok and result.wall_s < 15
        assert [line for line in leftovers(marker) if "Popen" not in line] == []
        if backend != "subprocess":
            seen = await box.run(
                code="import os; print([p for p in os.listdir('/proc') if p.isdigit()] == ['1', str(os.getpid())])"
            )
            assert seen.stdout == b"True\n"


@pytest.mark.parametrize("backend", ALL)
async def test_huge_output_is_cut_and_ends_the_run(backend):
    async with opened(backend, output_bytes=1000) as box:
        result = await box.run(code="while 1: print('y' * 100)")
        assert result.killed_for == "output" and len(result.stdout) == 1000
        result = await box.run(code="import sys; sys.stderr.write('e' * 1001)")
        assert result.killed_for == "output" and len(result.stderr) == 1000, "also if it has ended before that is seen"
        assert (await box.run(code="print('y' * 999)")).ok


@pytest.mark.parametrize("backend", ALL)
async def test_files_are_those_of_the_folder_whatever_links_say(backend, tmp_path):
    (tmp_path / "secret").write_text("secret")
    links = (
        f"import os; os.symlink('{tmp_path}/secret', 'file'); os.symlink('{tmp_path}', 'folder'); os.mkfifo('pipe');"
        "os.symlink('/proc/self/environ', 'me'); os.symlink('/dev/zero', 'zeros'); open('big', 'w').write('x' * 100)"
    )
    async with opened(backend) as box:
        assert (await box.run(code=links)).ok
        for path in ("file", "folder/secret", "../etc/passwd", "/etc/passwd", "me", "zeros", "pipe", ".", "nothing"):
            with pytest.raises(InvalidAction):
                await box.read(path)
        for path in ("file", "folder/new", "../new", "/etc/new", "me", "zeros", "pipe", "."):
            with pytest.raises(InvalidAction):
                await box.write(path, "x")
        with pytest.raises(InvalidAction, match="more than 99 bytes"):
            await box.read("big", limit=99)
        assert (tmp_path / "secret").read_text() == "secret" and len(list(tmp_path.iterdir())) == 1


@pytest.mark.parametrize("backend", ALL)
async def test_memory_of_one_process_is_limited(backend):
    async with opened(backend, memory_mb=64) as box:
        result = await box.run(code="x = bytearray(1 << 30); print('got it')")
        assert not result.ok and b"got it" not in result.stdout
        assert (await box.run(code="print(1)")).ok


# -- the escape suite -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("backend", HOLDS)
async def test_a_fork_bomb_ends_with_its_run(backend):
    bomb = "import os\nwhile 1:\n try: os.fork()\n except OSError: pass"
    async with opened(backend, pids=24, cpu_s=60) as box:
        with gvisor_may_end(backend):
            result = await box.run(code=bomb, timeout_s=1)
            assert result.killed_for == ("pids" if backend == "gvisor" else "wall") and result.wall_s < 20
        if box.closed:
            return
        count = (
            "import os, time\nn = 0\ntry:\n while n < 100:\n  if os.fork() == 0: time.sleep(60)\n  n += 1\n"
            "except OSError: pass\nprint(n)"
        )
        result = await box.run(code=count)
        if backend == "gvisor":  # where no kernel refuses, the warden counts
            assert result.killed_for == "pids"
        else:
            assert 1 <= int(result.stdout) <= 24


@pytest.mark.parametrize("backend", HOLDS)
async def test_a_memory_bomb_of_many_processes_is_ended(backend):
    many = "import os, time\nfor _ in range(4): os.fork()\nx = bytearray(40 << 20)\ntime.sleep(60)"
    async with opened(backend, memory_mb=96) as box:
        result = await box.run(code=many, timeout_s=20)
        assert result.killed_for == "memory" and result.stdout == b""
        assert (await box.run(code="print(1)")).ok


@pytest.mark.parametrize("backend", HOLDS)
async def test_memory_that_is_in_nobodys_figures_cannot_be_had(backend):
    code = """
import mmap, os
anonymous, shared, private, huge = mmap.MAP_ANONYMOUS, mmap.MAP_SHARED, mmap.MAP_PRIVATE, 0x40000
tries = {'shared': lambda: mmap.mmap(-1, 1 << 21, anonymous | shared), 'checked': lambda: mmap.mmap(-1, 1 << 21, anonymous | 3),
         'huge': lambda: mmap.mmap(-1, 1 << 21, anonymous | private | huge)}
for path in ('/dev/zero', '/dev/full'):
    tries[path] = lambda path=path: mmap.mmap(os.open(path, os.O_RDWR), 1 << 21)
had = []
for name, each in tries.items():
    try: each()[:1] = b'x'; had.append(name)
    except OSError: pass
mmap.mmap(-1, 1 << 21, anonymous | private)[:1] = b'x'
print(had)
"""
    async with opened(backend, memory_mb=96) as box:
        found = await box.run(code=code)
        # Docker's control group counts what is mapped from its /dev/zero, gVisor all that its kernel holds.
        assert found.stdout in {"bubblewrap": (b"[]\n",), "docker": (b"[]\n", b"['/dev/zero']\n")}.get(backend, (found.stdout,))
        held = "import mmap\nkept = []\nfor _ in range(24):\n    kept.append(mmap.mmap(-1, 32 << 20))\n"
        held += "    for at in range(0, 32 << 20, 4096): kept[-1][at : at + 4096] = bytes(4096); kept[-1].madvise(4)\n"
        with gvisor_may_end(backend):
            result = await box.run(code=held + "print('got it')", timeout_s=20)
            assert result.stdout == b"" and not result.ok


@pytest.mark.parametrize("backend", ("bubblewrap",))
async def test_devices_are_those_that_take_nothing_from_others(backend):
    code = "import os\nprint(sorted(os.listdir('/dev')), open('/dev/zero', 'rb').read(2), os.path.exists('/dev/ptmx'))"
    async with opened(backend) as box:
        found = (await box.run(code=code, stdin=b"")).stdout.decode()
        names = ["fd", "full", "null", "random", "shm", "stderr", "stdin", "stdout", "urandom", "zero"]
        assert found == f"{names} {bytes(2)!r} False\n"


@pytest.mark.parametrize("backend", HOLDS)
async def test_cpu_time_counts_also_of_children_that_nobody_waits_for(backend):
    code = """
import os, signal, time
signal.signal(signal.SIGCHLD, signal.SIG_IGN)
while True:
    if os.fork() == 0:
        began = time.process_time()
        while time.process_time() < began + 0.4: pass
        os._exit(0)
    time.sleep(0.5)
"""
    async with opened(backend, cpu_s=2, wall_s=60) as box:
        assert (await box.run(code=code)).killed_for == "cpu"


@pytest.mark.parametrize("backend", HOLDS)
async def test_a_full_disk_is_the_programs_own(backend):
    fill = (
        "import errno, sys\ntry:\n"
        " for n in range(1000): open(f'{sys.argv[1]}/f{n}', 'wb').write(bytes(1 << 20))\n"
        "except OSError as e: print(errno.errorcode[e.errno], n)"
    )
    files = "import os\nos.makedirs('many')\nfor n in range(10**7): os.close(os.open(f'many/{n}', os.O_CREAT))"
    async with opened(backend, disk_mb=8, cpu_s=60) as box:
        for folder, most in ((".", 8), ("/tmp", 16), ("/dev/shm", 16)):
            error, count = (await box.run(["python3", "-c", fill, folder])).stdout.split()
            assert error == b"ENOSPC" and int(count) <= most
        emptied = await box.run(code="import os\nfor n in os.listdir(): os.unlink(n)")
        assert emptied.ok
        with gvisor_may_end(backend):
            result = await box.run(code=files)
            assert backend == "gvisor" or result.killed_for == "disk" or b"No space left" in result.stderr


@pytest.mark.parametrize("backend", HOLDS)
async def test_there_is_no_network(backend):
    server = await asyncio.start_server(lambda r, w: None, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    code = (
        "import socket, os\nprint(sorted(n for _, n in socket.if_nameindex()))\n"
        f"for where in (('127.0.0.1', {port}), ('1.1.1.1', 53)):\n"
        " try: socket.create_connection(where, timeout=2); print('reached')\n"
        " except OSError: pass\n"
        "for kind in (socket.AF_PACKET,):\n"
        " try: socket.socket(kind, socket.SOCK_RAW); print('raw')\n"
        " except OSError: pass\n"
        "print([p for p in ('/var/run/docker.sock', '/run/docker.sock', '/run/dbus') if os.path.exists(p)])\n"
    )
    async with server, opened(backend) as box:
        result = await box.run(code=code)
        assert result.stdout.decode().splitlines() == ["['lo']", "[]"], result.stderr


@pytest.mark.parametrize("backend", HOLDS)
async def test_the_host_cannot_be_read_or_written(backend, tmp_path):
    secret = tmp_path / "secret"
    secret.write_text("s")
    secret.chmod(0o666)
    tmp_path.chmod(0o777)
    code = f"""
import os, glob
for path in ({str(secret)!r}, '/etc/shadow', '/etc/ssh', '/home', '/var/lib/docker', {str(Path(__file__).parent)!r}, 
             '/proc/1/root', '/proc/1/fd/0', '/proc/1/fd/1', '/proc/1/mem', '/proc/kcore', '/dev/sda', '/dev/mem', '/dev/kmsg'):
    try:
        (os.listdir if os.path.isdir(path) else lambda p: open(p, 'rb').read(1) or 1/0)(path)
        if path != '/home' or os.listdir(path): print('read', path)
    except (OSError, ZeroDivisionError): pass
for path in ('/x', '/usr/x', '/etc/x', '/bin/x', '/dev/x',
             '/proc/sys/kernel/hostname', '/proc/sysrq-trigger', '/proc/1/oom_score_adj'):
    try: open(path, 'w').write('x'); print('wrote', path)
    except OSError: pass
print(os.getuid() != 0, os.geteuid() != 0, sorted(os.environ))
status = dict(line.split(':', 1) for line in open('/proc/self/status'))
print(int(status['CapPrm'], 16), int(status['CapEff'], 16), status.get('NoNewPrivs', '1').strip())
try: print('SECRET' in open('/proc/1/environ').read())
except OSError: print(False)
"""
    os.environ["TROUPE_TEST_SECRET"] = "s"
    async with opened(backend) as box:
        lines = (await box.run(code=code)).stdout.decode().splitlines()
        assert lines[0].startswith("True True") and "TROUPE" not in lines[0], lines
        assert lines[1:] == ["0 0 1", "False"]


@pytest.mark.parametrize("backend", HOLDS)
async def test_signals_reach_neither_the_host_nor_the_warden(backend):
    bystander = spawn("import time; time.sleep(600)")
    code = f"""
import os, signal
for target in (1, {os.getpid()}, {bystander.pid}, -1):
    for s in signal.Signals:
        if target != -1 or s not in (9, 19):
            try: signal.signal(s, signal.SIG_IGN)
            except OSError: pass
            try: os.kill(target, s)
            except OSError: pass
print('done')
"""
    try:
        async with opened(backend) as box:
            assert (await box.run(code=code)).stdout == b"done\n"
            await box.run(code="import os; os.kill(os.getppid(), 9); os.kill(-1, 9)")
            assert (await box.run(code="print(1)")).ok
        assert bystander.poll() is None
    finally:
        bystander.kill()
        bystander.wait()


@pytest.mark.parametrize("backend", ("bubblewrap", DOCKER))  # gVisor's own kernel may be asked for anything
async def test_the_kernel_offers_no_new_namespaces_mounts_or_tracing(backend):
    code = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
calls = {'unshare user': lambda: libc.unshare(0x10000000), 'mount': lambda: libc.mount(b'none', b'/tmp', b'tmpfs', 0, None),
         'trace': lambda: libc.ptrace(16, 1, 0, 0), 'setuid': lambda: libc.setuid(0), 'chroot': lambda: libc.chroot(b'/work'),
         'mknod': lambda: libc.mknod(b'sda', 0o60666, os.makedev(8, 0))}
print([name for name, call in calls.items() if call() == 0])
"""
    async with opened(backend) as box:
        result = await box.run(code=code)
        assert result.stdout == b"[]\n", result


@pytest.mark.parametrize("backend", ("bubblewrap", DOCKER))
async def test_a_program_limits_or_slows_nobody_but_itself(backend):
    code = """
import ctypes, os, resource
libc = ctypes.CDLL(None, use_errno=True)
every = [getattr(resource, name) for name in dir(resource) if name.startswith('RLIMIT_')]
tries = {f'limit {what}': lambda what=what, n=n: resource.prlimit(1, what, (n, n)) for what in every for n in (3, 1, 0)}
tries |= {f'priority {which}': lambda which=which: os.setpriority(which, 1 if which == 0 else 0, 19) for which in (0, 2)}
tries |= {f'policy {name}': lambda name=name: os.sched_setscheduler(1, getattr(os, name), os.sched_param(0))
          for name in ('SCHED_IDLE', 'SCHED_BATCH')}
tries |= {'parameters': lambda: os.sched_setparam(1, os.sched_param(0)), 'cores': lambda: os.sched_setaffinity(1, {0})}
numbers = {'x86_64': (251, 314, 312, 310, 311, 440), 'aarch64': (30, 274, 272, 270, 271, 440)}
for number in numbers.get(os.uname().machine, ()):
    data = ctypes.create_string_buffer(b'\\x30\\0\\0\\0\\x03', 64)
    def call(number=number, data=data):
        if libc.syscall(number, 1, 1 if number in (30, 251) else data, 7 << 13 if number in (30, 251) else 0, 0, 0, 0) < 0:
            raise OSError(ctypes.get_errno(), 'refused')
    tries[f'call {number}'] = call
done = []
for name, each in tries.items():
    try: each(); done.append(name)
    except (OSError, ValueError): pass
print(done)
"""
    async with opened(backend) as box:
        result = await box.run(code=code)
        assert result.stdout == b"[]\n", result
        assert (await box.run(code="print(1)")).ok
        own = (
            "import os, resource; resource.setrlimit(resource.RLIMIT_NOFILE, (9, 9)); os.nice(1); os.sched_setaffinity(0, {0})"
        )
        assert (await box.run(code=own)).ok, "of itself it may"


@pytest.mark.parametrize("backend", HOLDS)
async def test_what_the_kernel_keeps_for_programs_is_memory_too(backend):
    refused = """
import ctypes, os
libc = ctypes.CDLL(None, use_errno=True)
calls = {'queue': lambda: libc.msgget(0, 0o1600), 'semaphores': lambda: libc.semget(0, 9, 0o1600),
         'shared': lambda: libc.shmget(0, 4096, 0o1600), 'named queue': lambda: libc.syscall(
             {'x86_64': 240}.get(os.uname().machine, 180), b'q', 0o102, 0o600, None),
         'watch': lambda: libc.inotify_init1(0), 'lend': lambda: libc.vmsplice(1, None, 0, 0)}
print([name for name, call in calls.items() if call() >= 0])
"""
    sockets = """
import os, socket, time
for _ in range(20):
    if os.fork() == 0:
        kept = []
        try:
            while 1:
                kept.append(socket.socketpair())
                for each in kept[-1]:
                    each.setblocking(False)
                    each.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 1 << 30)
                    try:
                        while 1: each.send(bytes(65536))
                    except BlockingIOError: pass
        except OSError: pass
        time.sleep(60)
time.sleep(60)
"""
    tables = """
import mmap, time
x = mmap.mmap(-1, 1 << 38, prot=mmap.PROT_READ, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | 0x4000)
for at in range(0, 1 << 38, 1 << 21): x[at]
time.sleep(60)
"""
    async with opened(backend, memory_mb=96, pids=32) as box:
        if backend != "gvisor":
            assert (await box.run(code=refused)).stdout == b"[]\n"
        for bomb in (sockets, tables):
            with gvisor_may_end(backend):
                result = await box.run(code=bomb, timeout_s=20)
                assert backend == "gvisor" or result.killed_for == "memory", (bomb, result)


@pytest.mark.parametrize("backend", ("bubblewrap", DOCKER))
async def test_ordinary_programs_find_the_sockets_processes_and_pipes_that_they_need(backend):
    code = """
import asyncio, multiprocessing, socket, sys, threading
async def main():
    server = await asyncio.start_server(lambda r, w: (w.write(b'hello'), w.close()), '127.0.0.1', 0)
    reader, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
    said = await reader.read()
    child = await asyncio.create_subprocess_exec(sys.executable, '-c', 'print(1)', stdout=-1, stdin=-1)
    return said, (await child.communicate(b''))[0]
if __name__ == '__main__':
    print(asyncio.run(main()))
    with multiprocessing.Pool(2) as pool: print(pool.map(abs, [-1, -2]))
    here, there = multiprocessing.Pipe()
    here.send('x'); print(there.recv())
"""
    async with opened(backend) as box:
        await box.write("main.py", code)
        result = await box.run(["python3", "main.py"])
        assert result.stdout == b"(b'hello', b'1\\n')\n[1, 2]\nx\n", result


async def test_a_warden_that_cannot_run_a_program_breaks_the_sandbox_and_says_why():
    async with opened("subprocess") as box:
        ask = box._ask

        async def broken(header, *rest):
            return await ask({"op": "read", "path": "nothing", "limit": 1}, *rest)

        box._ask = broken
        with pytest.raises(EnvironmentFailed, match="could not run a program: No such file"):
            await box.run(code="print(1)")
        assert box.closed


# -- owners ---------------------------------------------------------------------------------------------------------------


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


# -- settings -------------------------------------------------------------------------------------------------------------


async def test_subprocess_is_refused_unless_the_code_is_trusted():
    with pytest.raises(ConfigError, match="trusted = true"):
        await sandbox.open(SandboxSettings(backend="subprocess"))


async def test_without_any_back_end_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setattr(sandbox, "missing", lambda name: f"install {name}")
    with pytest.raises(ConfigError, match=r"docker: install docker; bubblewrap: install bubblewrap"):
        await sandbox.open()


async def test_bad_calls_are_refused_before_they_reach_the_sandbox():
    async with opened("subprocess") as box:
        for bad in ({"command": "ls -l"}, {"command": ["ls"], "code": "1"}, {}, {"code": "1", "timeout_s": 0}):
            with pytest.raises(ConfigError):
                await box.run(**bad)
        for code in ("#" * 200_000, "a\0b"):
            with pytest.raises(InvalidAction):
                await box.run(code=code)
        assert (await box.run(code="print(1)")).ok


def test_the_filter_is_a_well_formed_program_for_both_machines():
    assert seccomp.program("riscv64") == b""
    for machine in ("x86_64", "aarch64"):
        code = seccomp.program(machine)
        lines = [code[at : at + 8] for at in range(0, len(code), 8)]
        assert len(code) % 8 == 0 and lines[-1][0] == 0x06
        assert all(
            at + 1 + max(line[2], line[3]) < len(lines) for at, line in enumerate(lines) if line[0] in (0x15, 0x35, 0x45)
        )
