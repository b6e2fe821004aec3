"""A sandbox runs programs, shares files with them, ends what does not end, and refuses what it cannot keep."""

import os

import pytest

from tests.envs.sandboxes import ALL, leftovers, opened
from troupe.envs import sandbox
from troupe.envs.sandbox import SandboxSettings, seccomp
from troupe.protocol.errors import ConfigError, EnvironmentFailed, InvalidAction


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


async def test_a_warden_that_cannot_run_a_program_breaks_the_sandbox_and_says_why():
    async with opened("subprocess") as box:
        ask = box._ask

        async def broken(header, *rest):
            return await ask({"op": "read", "path": "nothing", "limit": 1}, *rest)

        box._ask = broken
        with pytest.raises(EnvironmentFailed, match="could not run a program: No such file"):
            await box.run(code="print(1)")
        assert box.closed


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
