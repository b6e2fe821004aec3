"""A sandbox: a place in which programs run that nobody has read, one after the other, over files that they share.

A back-end starts the place and hands over a `Channel` to the warden in it (`warden.py`); everything else is the same for all.

Promises:
- one owner each: a sandbox is used by who opened it, one call at a time, and is discarded, never cleaned;
- every call is bounded in time and in bytes; a call that was cancelled or that broke closes the sandbox;
- nothing of it is left when it is closed, or when its owner has died in any way;
- what a program did is a `Result`; a sandbox that itself broke is EnvironmentFailed.
"""

from __future__ import annotations

import asyncio
import base64
import inspect
import json
import math
import struct
import sys
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, Protocol, Self

from troupe.envs.sandbox import owner, warden
from troupe.envs.sandbox.settings import Result, SandboxSettings
from troupe.protocol.errors import ConfigError, EnvironmentFailed, InvalidAction

FRAME = struct.Struct(">IQ")
START_S = 30.0
"""Seconds that a back-end has to start a sandbox."""

_GRACE_S = 10.0  # beyond a run's own time, for ending it and for a busy machine
_FILE_S = 30.0
_HEADER = 64 * 1024
_ARGUMENT = 128 * 1024 - 1  # bytes that Linux takes as one argument
_ARGUMENTS = 1024 * 1024


class Channel(Protocol):
    """The bytes to and from a warden, and the end of it."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def close(self) -> str:
        """Ends the sandbox, whatever state it is in, within some seconds. Returns what it said to complain about, or ""."""


class Sandbox:
    """An open sandbox; `troupe.envs.sandbox.open` makes one. `backend` is the name of what holds it."""

    def __init__(self, backend: str, settings: SandboxSettings, channel: Channel) -> None:
        self.backend = backend
        self.settings = settings
        self._channel = channel
        self._closed = False
        self._lock = asyncio.Lock()

    async def run(
        self,
        command: Sequence[str] = (),
        *,
        code: str = "",
        stdin: str | bytes = b"",
        timeout_s: float | None = None,
    ) -> Result:
        """Runs a program in the sandbox's folder until it and all that it has started have ended.

        command: program and arguments; no shell reads them. code: Python instead of a command. timeout_s: at most the
        settings' `wall_s`. Raises InvalidAction for what no program can be given, EnvironmentFailed if the sandbox broke.
        """
        if isinstance(command, str) or bool(command) == bool(code):
            raise ConfigError("a run takes either a command, as a list of strings, or Python code")
        arguments = list(command) or ["python3", "-c", code]
        sizes = [len(argument.encode(errors="surrogateescape")) for argument in arguments]
        if max(sizes) > _ARGUMENT or sum(sizes) > _ARGUMENTS or any("\0" in argument for argument in arguments):
            raise InvalidAction("code or an argument is longer than 128 KiB or has a NUL in it; write it to a file instead")
        wall_s = min(self.settings.wall_s, math.inf if timeout_s is None else timeout_s)
        if not wall_s > 0:
            raise ConfigError(f"timeout_s is {timeout_s}; it has to be above 0")
        body = stdin.encode(errors="surrogateescape") if isinstance(stdin, str) else stdin
        limit = 2 * self.settings.output_bytes
        answer, out = await self._ask({"op": "run", "command": arguments, "wall_s": wall_s}, body, wall_s + _GRACE_S, limit)
        if "error" in answer:  # the warden could not; no program is the reason
            said = await self.close()
            raise EnvironmentFailed(f"the {self.backend} sandbox could not run a program: {answer['error']} {said}".rstrip())
        cut = int(answer["stdout"])
        return Result(out[:cut], out[cut:], int(answer["exit_code"]), answer["killed_for"], float(answer["wall_s"]))

    async def write(self, path: str, data: str | bytes) -> None:
        """Writes a file, and the folders that it needs, below the sandbox's folder. Raises InvalidAction if that cannot be."""
        body = data.encode() if isinstance(data, str) else data
        answer, _ = await self._ask({"op": "write", "path": path}, body, _FILE_S, 0)
        if "error" in answer:
            raise InvalidAction(f"{path[:200]} cannot be written: {answer['error']}")

    async def read(self, path: str, limit: int = 2**20) -> bytes:
        """The bytes of a regular file below the sandbox's folder.

        Raises InvalidAction if there is no such file, if it has more than `limit` bytes, or if it leads out of the folder.
        """
        answer, data = await self._ask({"op": "read", "path": path, "limit": limit}, b"", _FILE_S, limit)
        if "error" in answer:
            raise InvalidAction(f"{path[:200]} cannot be read: {answer['error']}")
        return data

    async def close(self) -> str:
        """Discards the sandbox with everything in it; may be called again. Returns what it complained about, or ""."""
        if self._closed:
            return ""
        self._closed = True
        return await asyncio.shield(self._channel.close())

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()

    @property
    def closed(self) -> bool:
        """Whether it takes no more calls."""
        return self._closed

    async def hello(self) -> None:
        """Waits until the warden answers. Raises EnvironmentFailed with what the back-end said."""
        await self._ask({"op": "hello"}, b"", START_S, 0)

    async def _ask(self, header: dict[str, Any], body: bytes, limit_s: float, limit: int) -> tuple[dict[str, Any], bytes]:
        async with self._lock:
            if self._closed:
                raise EnvironmentFailed(f"the {self.backend} sandbox is closed; open another one")
            try:
                async with asyncio.timeout(limit_s):
                    return await self._exchange(header, body, limit)
            except (OSError, EOFError, ValueError, TimeoutError) as error:
                said = await self.close()
                what = f"gave no answer for {limit_s:g} s" if isinstance(error, TimeoutError) else "broke"
                raise EnvironmentFailed(f"the {self.backend} sandbox {what} at '{header['op']}': {said or error!r}") from None
            except asyncio.CancelledError:
                await self.close()
                raise

    async def _exchange(self, header: dict[str, Any], body: bytes, limit: int) -> tuple[dict[str, Any], bytes]:
        head = json.dumps(header).encode()
        reader, writer = self._channel.reader, self._channel.writer
        writer.write(FRAME.pack(len(head), len(body)) + head)
        writer.write(body)
        await writer.drain()
        head_size, body_size = FRAME.unpack(await reader.readexactly(FRAME.size))
        if head_size > _HEADER or body_size > limit:
            raise ValueError(f"an answer of {head_size} + {body_size} bytes")
        answer = json.loads(await reader.readexactly(head_size))
        return answer, await reader.readexactly(body_size)


class ProcessChannel:
    """A warden that is a process of this one, spoken to over its stdin and stdout."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        assert process.stdin and process.stdout and process.stderr
        self.reader, self.writer = process.stdout, process.stdin
        self._process, self._stderr = process, process.stderr

    async def close(self) -> str:
        """End of file asks the warden to leave; it is killed if it does not."""
        self.writer.close()
        try:
            async with asyncio.timeout(5.0):
                await self._process.wait()
        except TimeoutError:
            with suppress(ProcessLookupError):
                self._process.kill()
            await self._process.wait()
        said = b""
        with suppress(TimeoutError):
            async with asyncio.timeout(1.0):
                said = await self._stderr.read(4096)
        return " ".join(said.decode(errors="replace").split())[-400:]


def warden_command(
    python: str,
    *,
    root: str,
    path: str,
    settings: SandboxSettings,
    uid: int | None = None,
    apart: bool = False,
    nproc: int = 0,
    code: bytes = b"",
) -> list[str]:
    """How `python` becomes the warden of the folder `root`; see `warden.main`."""
    limits = settings.model_dump(include={"memory_mb", "pids", "cpu_s", "disk_mb", "output_bytes"})
    place = {"root": root, "path": path, "uid": uid, "apart": apart, "nproc": nproc, "filter": base64.b64encode(code).decode()}
    given = json.dumps({"owner": owner.me(), **place, "limits": limits})
    return [python, "-I", "-S", "-c", inspect.getsource(warden), given]


def python_of_this_process() -> str:
    """The interpreter itself, not a virtual environment's link to it."""
    return f"{sys.base_prefix}/bin/python{sys.version_info.major}.{sys.version_info.minor}"
