"""The check in a process of its own, watched from outside.

Promises: whatever the world does, `examine` returns a report or raises ConfigError within about `limit_s`, and every process
of the check has ended by then. A world that blocks its process (at import, in an `inline` method, in a long call outside of
Python) is named with the line where it stands.
"""

from __future__ import annotations

import asyncio
import contextlib
import faulthandler
import os
import re
import select
import shutil
import signal
import subprocess
import sys
import sysconfig
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from json import dumps, loads  # a world may replace those of the module
from pathlib import Path
from typing import Any

from troupe.envs import registry
from troupe.envs.check.others import mute, started
from troupe.envs.check.report import Finding, Report
from troupe.envs.check.suite import PROMISES, Suite
from troupe.protocol.errors import ConfigError

_PULSE_S = 0.2
_GRACE_S = 3.0
"""Beyond a call's own time, before a process that says nothing is taken to hang."""
_START_S = 60.0
_FRAME = re.compile(r'File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)')
_STACK = "stack"
_BESIDE = ("drive.py", "calls.py", "returned.py", "registry.py")
"""Files of ours beside the check's own folder that may stand on the stack of a world's call."""


def examine(
    name: str,
    options: Mapping[str, Any] | None = None,
    episodes: int = 20,
    timeout_s: float = 30.0,
    *,
    others: int = 2,
    limit_s: float = 120.0,
    import_s: float = 30.0,
    show: Callable[[str], None] = lambda promise: None,
) -> Report:
    """Runs the suite on the world called `name`, as `check` does. Raises ConfigError if there is none, or none can be made.

    import_s: that importing it may take. show: told of each promise when it is begun.
    """
    request = {
        "name": name,
        "options": dict(options or {}),
        "episodes": episodes,
        "timeout_s": timeout_s,
        "others": others,
        "limit_s": limit_s,
    }
    folder = tempfile.mkdtemp(prefix="troupe-check-")
    process = started("apart", folder=folder)
    try:
        watched = _Watched(process, Path(folder), name, import_s, timeout_s, limit_s)
        return watched.follow(dumps(request).encode(), show)
    finally:
        with contextlib.suppress(OSError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        for pipe in (process.stdin, process.stdout):
            if pipe is not None:
                with contextlib.suppress(OSError):
                    pipe.close()
        shutil.rmtree(folder, ignore_errors=True)


class _Watched:
    def __init__(
        self, process: subprocess.Popen[bytes], folder: Path, name: str, import_s: float, timeout_s: float, limit_s: float
    ) -> None:
        self._process, self._folder, self._limit_s = process, folder, limit_s
        self._import_s, self._timeout_s = import_s, timeout_s
        self._report = Report(name)
        self._at = PROMISES[0]
        self._buffer = b""

    def follow(self, request: bytes, show: Callable[[str], None]) -> Report:
        """Reads what the process says until it has said all, or nothing for too long."""
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(request)
            self._process.stdin.close()
        patience, until = _START_S, time.monotonic() + _START_S + self._import_s + self._limit_s + 2 * self._timeout_s
        last = time.monotonic()
        while True:
            left = min(last + patience, until) - time.monotonic()
            if left <= 0:
                return self._given_up(patience, time.monotonic() >= until)
            line = self._line(left)
            if line is None:
                continue
            last = time.monotonic()
            match line:
                case {"report": found}:
                    return _report_of(found)
                case {"config_error": message}:
                    raise ConfigError(message)
                case {"at": at}:
                    self._at, patience = at, self._timeout_s + _GRACE_S
                    show(at)
                case {"found": found}:
                    self._report.findings.append(Finding(**found))
                case {"importing": _}:
                    patience = self._import_s
                case {"pulse": _}:
                    pass
                case {"ended": _}:
                    return self._died()

    def _line(self, left: float) -> dict[str, Any] | None:
        """The next thing that it says; None if that is not yet, "ended" if it says nothing more."""
        assert self._process.stdout is not None
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._process.stdout], [], [], min(left, 1.0))
            if not ready:
                return {"ended": True} if self._process.poll() is not None else None
            read = os.read(self._process.stdout.fileno(), 1 << 16)
            if not read:
                return {"ended": True}
            self._buffer += read
        line, _, self._buffer = self._buffer.partition(b"\n")
        found: dict[str, Any] = loads(line)
        return found

    # -- how it may end otherwise ------------------------------------------------------------------------------------

    def _given_up(self, patience: float, in_all: bool) -> Report:
        self._process.send_signal(signal.SIGUSR1)
        time.sleep(0.3)  # it writes down where it stands
        place = self._place()
        if in_all:
            return self._closed(f"the check was given up after {self._limit_s:g} s{place}", "not looked at: the time is over")
        seconds = self._import_s if patience == self._import_s else self._timeout_s
        return self._closed(f"has not returned for {seconds:g} s{place}", "not looked at: the world hangs")

    def _died(self) -> Report:
        code = self._process.wait()
        how = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        return self._closed(f"its process has ended with {how}{self._place()}", "not looked at: the world ended its process")

    def _closed(self, detail: str, rest: str) -> Report:
        report = self._report
        report.findings.append(Finding(self._at, "broken", detail))
        report.findings += [Finding(name, "unknown", rest) for name in PROMISES[PROMISES.index(self._at) + 1 :]]
        return report

    def _place(self) -> str:
        """Where it stands, by the innermost line that is neither Python's nor ours."""
        with contextlib.suppress(OSError):
            frames = list(_FRAME.finditer((self._folder / _STACK).read_text(errors="replace")))
            library, ours = sysconfig.get_paths()["stdlib"], str(Path(__file__).resolve().parents[1])
            theirs = [f for f in frames if not f["file"].startswith(("<frozen", library)) and not _within(f["file"], ours)]
            if theirs:
                return f": {theirs[0]['file']}, line {theirs[0]['line']}, in {theirs[0]['name']}"
        return ""


def _within(file: str, folder: str) -> bool:
    """Is it one of the check's own files? A built-in world is not."""
    path = Path(file).resolve()
    return path.parent.name == "check" or (
        path.name in ("drive.py", "calls.py", "returned.py", "registry.py") and str(path.parent) == folder
    )


def _report_of(found: dict[str, Any]) -> Report:
    findings = [Finding(**finding) for finding in found.pop("findings")]
    seconds = {name: (p50, top) for name, (p50, top) in found.pop("seconds").items()}
    return Report(findings=findings, seconds=seconds, **found)


# -- in the process --------------------------------------------------------------------------------------------------


def main() -> None:
    """Checks one world, says how it goes, and is gone at once, whatever the world has started."""
    answers = mute()
    stack = open(Path(tempfile.gettempdir()) / _STACK, "w")  # noqa: SIM115 - as long as the process
    faulthandler.enable(stack)
    faulthandler.register(signal.SIGUSR1, stack)

    def say(**what: Any) -> None:
        os.write(answers, dumps(what).encode() + b"\n")

    request = loads(sys.stdin.buffer.read())
    say(importing=True)
    try:
        world = registry.find(request["name"])
        say(report=asdict(asyncio.run(_run(world, request, say))))
    except ConfigError as error:
        say(config_error=str(error))
    os._exit(0)


async def _run(world: Any, request: dict[str, Any], say: Callable[..., None]) -> Report:
    def tell(news: Finding | str) -> None:
        say(**({"at": news} if isinstance(news, str) else {"found": asdict(news)}))

    with _pulse(say):
        return await Suite(world, tell=tell, **request).run()


@contextlib.contextmanager
def _pulse(say: Callable[..., None]) -> Iterator[None]:
    """Says that the event loop still turns."""

    async def beat() -> None:
        while True:
            say(pulse=True)
            await asyncio.sleep(_PULSE_S)

    task = asyncio.ensure_future(beat())
    try:
        yield
    finally:
        task.cancel()
