"""`troupe env serve`: a process that serves a world until it is told to stop.

Promises: a port that is taken is refused before anything starts; Ctrl-C and SIGTERM close every session and end quietly; a
world that never gives the event loop back (an `inline` one, or an `async` one that computes for ever) ends the process, and the
line that it hangs in is named.
"""

from __future__ import annotations

import asyncio
import itertools
import os
import signal
import socket
import sys
import threading
import time
import traceback
from collections.abc import AsyncIterator, Callable, Iterator, Mapping
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import uvicorn

from troupe.envs.base import TextWorld
from troupe.envs.openenv.server import application
from troupe.envs.openenv.session import Served
from troupe.envs.openenv.sessions import Sessions
from troupe.protocol.errors import ConfigError, TimedOut

SESSIONS = 256
IDLE_S = 1_800.0
STEP_S = 30.0
_GRACE_S = 10.0
_START_S = 30.0
_FRAME = 16 * 2**20


def serve(
    world: type[TextWorld],
    options: Mapping[str, Any],
    *,
    host: str = "127.0.0.1",
    port: int = 8000,
    sessions: int = SESSIONS,
    idle_s: float = IDLE_S,
    step_s: float = STEP_S,
    ready: Callable[[str], None] = print,
) -> None:
    """Serves until SIGINT or SIGTERM. port 0: any free one. ready: is told the URL. Raises ConfigError."""
    server = _server(world, options, sessions, idle_s, step_s)
    with _listening(host, port) as door:
        shown = f"http://{f'[{host}]' if ':' in host else host}:{door.getsockname()[1]}"

        async def run() -> None:
            threading.Thread(target=_watch, args=(asyncio.get_running_loop(), step_s + _GRACE_S), daemon=True).start()
            serving = asyncio.ensure_future(server.serve([door]))
            await _started(server, serving)
            ready(shown)
            await serving

        with asyncio.Runner(loop_factory=server.config.get_loop_factory()) as runner:
            runner.run(run())


@asynccontextmanager
async def serving(
    world: type[TextWorld],
    options: Mapping[str, Any],
    *,
    sessions: int = SESSIONS,
    idle_s: float = IDLE_S,
    step_s: float = STEP_S,
) -> AsyncIterator[str]:
    """The same in this event loop, on a free port, for the time of the block; yields the URL."""
    server = _server(world, options, sessions, idle_s, step_s)
    server.signals = False
    with _listening("127.0.0.1", 0) as door:
        task = asyncio.ensure_future(server.serve([door]))
        try:
            await _started(server, task)
            yield f"http://127.0.0.1:{door.getsockname()[1]}"
        finally:
            server.should_exit = True
            await task


class _Server(uvicorn.Server):
    """Stops at a signal and does not raise it again afterwards: whoever called goes on, or ends as it likes.

    signals: False leaves them to the process that it is a part of."""

    signals = True

    @contextmanager
    def capture_signals(self) -> Iterator[None]:
        if not self.signals or threading.current_thread() is not threading.main_thread():
            yield
            return
        before = {number: signal.signal(number, self.handle_exit) for number in (signal.SIGINT, signal.SIGTERM)}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)


def _server(world: type[TextWorld], options: Mapping[str, Any], sessions: int, idle_s: float, step_s: float) -> _Server:
    served = Served(world, options, step_s, itertools.count().__next__)
    served.driver()  # wrong options are told now, not to the first client
    config = uvicorn.Config(
        application(Sessions(served, sessions, idle_s)),
        log_level="error",
        access_log=False,
        ws="websockets-sansio",
        ws_per_message_deflate=False,  # costs more time than it saves on the way to a trainer beside it
        ws_max_size=_FRAME,
        timeout_graceful_shutdown=int(_GRACE_S),
    )
    return _Server(config)


@contextmanager
def _listening(host: str, port: int) -> Iterator[socket.socket]:
    if not 0 <= port < 65536:
        raise ConfigError(f"port {port}: a port is a number from 0 (any free one) to 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"--host '{host}': {error.strerror or error}") from error
    with socket.socket(family, kind, protocol) as door:
        door.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            door.bind(address)
            door.listen(1024)
        except OSError as error:
            why = f"({error.strerror}): stop what listens there, or choose another with --port"
            raise ConfigError(f"port {port} on {host} cannot be opened {why}") from error
        yield door


async def _started(server: uvicorn.Server, serving: asyncio.Future[None]) -> None:
    until = time.monotonic() + _START_S
    while not server.started and not serving.done():
        if time.monotonic() > until:
            raise TimedOut(f"the server has not started for {_START_S:g} s")
        await asyncio.sleep(0.01)


def _watch(loop: asyncio.AbstractEventLoop, limit_s: float) -> None:
    """Ends the process when its loop stands still: no code inside of it could notice."""
    thread = threading.main_thread().ident
    while not loop.is_closed():
        turned = threading.Event()
        try:
            loop.call_soon_threadsafe(turned.set)
        except RuntimeError:  # it was closed meanwhile
            return
        if not turned.wait(limit_s) and not loop.is_closed():
            frame = traceback.extract_stack(sys._current_frames().get(thread or 0))[-1]
            where = f"{os.path.basename(frame.filename)}, line {frame.lineno}, in {frame.name}"
            print(f"troupe: the world has held the server up for {limit_s:g} s: {where}", file=sys.stderr, flush=True)
            os._exit(1)
        time.sleep(1.0)
