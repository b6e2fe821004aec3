"""One server process that an engine owns: started, watched, and gone when its owner is.

Promises:
- it listens on 127.0.0.1, on a port that was free, in a session of its own: Ctrl-C reaches its owner only;
- it and all that it started die with the owner, even when that is killed (`keeper.py`);
- a start that fails or takes too long is an error that names the limit and ends with the server's own last words.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import subprocess
import sys
import time
from collections.abc import Awaitable, Callable, Mapping, Sequence
from pathlib import Path

from troupe.protocol.errors import ActorLost, ConfigError, TimedOut

_KEEPER = Path(__file__).with_name("keeper.py")
_LOOK_S = 0.2
_LAST_WORDS = 1200
_END_S = 20.0


def free_port() -> int:
    """A port on 127.0.0.1 that nobody listens on at the moment."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """name: in errors. log: the file that it writes to (its folder is made). scratch: a folder that is removed with it."""

    def __init__(
        self, name: str, command: Sequence[str], log: Path, environment: Mapping[str, str] | None = None, scratch: str = ""
    ) -> None:
        self._scratch = scratch
        self._name, self._command, self._log = name, list(command), log
        self._environment = dict(environment or {})
        self._keeper: subprocess.Popen[bytes] | None = None
        self._report = -1
        self._code: int | None = None

    @property
    def pid(self) -> int:
        """Of the keeper, whose one child is the server."""
        assert self._keeper is not None
        return self._keeper.pid

    async def start(self, ready: Callable[[], Awaitable[bool]], limit_s: float) -> None:
        """Returns once `ready()`. Raises ConfigError if it ends before, TimedOut if it takes longer; then it is gone."""
        self._keeper = self._spawn()
        deadline = time.monotonic() + limit_s
        try:
            while not await ready():
                if not self.alive:
                    raise ConfigError(f"{self._name} does not start ({self._ending()}); {self.last_words()}")
                if time.monotonic() > deadline:
                    raise TimedOut(f"{self._name} has not started within {limit_s:g} s; {self.last_words()}")
                await asyncio.sleep(_LOOK_S)
        except BaseException:
            await self.stop()
            raise

    def _spawn(self) -> subprocess.Popen[bytes]:
        self._log.parent.mkdir(parents=True, exist_ok=True)
        self._report, tell = os.pipe()
        os.set_blocking(self._report, False)
        try:
            with self._log.open("ab") as log:
                return subprocess.Popen(
                    [sys.executable, "-I", str(_KEEPER), str(tell), self._scratch, *self._command],
                    stdin=subprocess.PIPE,
                    stdout=log,
                    stderr=log,
                    pass_fds=[tell],
                    start_new_session=True,
                    env={**os.environ, **self._environment},
                )
        finally:
            os.close(tell)

    async def ended(self) -> ActorLost:
        """Waits until the server is gone; says how."""
        while self.alive:
            await asyncio.sleep(_LOOK_S)
        return self.lost()

    @property
    def alive(self) -> bool:
        return self._keeper is not None and self._exit_code() is None

    def lost(self) -> ActorLost:
        """What a caller is told after the server ended."""
        return ActorLost(f"{self._name} is gone ({self._ending()}); {self.last_words()}")

    async def stop(self) -> None:
        """Ends the server and all that it started. Doing so again does nothing."""
        keeper = self._keeper
        if keeper is None or self._report < 0:
            return
        assert keeper.stdin is not None
        with contextlib.suppress(OSError):
            keeper.stdin.close()  # end of file: the owner is gone
        deadline = time.monotonic() + _END_S
        while keeper.poll() is None and time.monotonic() < deadline:
            await asyncio.sleep(0.02)
        if keeper.poll() is None:
            keeper.kill()  # and the kernel kills the server
            await asyncio.to_thread(keeper.wait)
        self._exit_code()
        os.close(self._report)
        self._report = -1

    def wrote(self, text: str) -> bool:
        """Whether the end of the log, some hundred lines of it, has `text`."""
        with contextlib.suppress(OSError):
            return text.encode() in self._log.read_bytes()[-64 * 1024 :]
        return False

    def last_words(self) -> str:
        """The end of the log, in one line. The log is named if it stays."""
        where = "" if self._scratch and self._log.is_relative_to(self._scratch) else f" {self._log}"
        with contextlib.suppress(OSError):
            text = self._log.read_bytes()[-_LAST_WORDS:].decode(errors="replace")
            lines = [line.strip() for line in text.splitlines() if line.strip()]
            if lines:
                return f"the end of its log{where}: {' | '.join(lines[-6:])}"
        return f"its log{where} is empty"

    def _exit_code(self) -> int | None:
        """Of the server, by what its keeper says; if that was killed, of the keeper. None: it runs."""
        if self._code is None and self._report >= 0 and self._keeper is not None:
            with contextlib.suppress(BlockingIOError):
                said = os.read(self._report, 16)
                self._code = int(said) if said else self._keeper.poll()
        return self._code

    def _ending(self) -> str:
        code = self._exit_code()
        if code is None:
            return "it runs"
        return (
            f"killed by signal {code - 128}"
            if code > 128
            else f"exit code {code}"
            if code >= 0
            else f"killed by signal {-code}"
        )
