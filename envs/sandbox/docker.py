"""Sandboxes of Docker: a container each, on a local daemon; the kernel counts its memory and its processes as one.

A container has no network, a read-only root, no capabilities, no way to new privileges, and a user who owns nothing. It runs
in gVisor where the daemon has the runtime `runsc`. Its stdin is the connection of its owner: when that closes, for whatever
reason, the container ends and the daemon removes it. A label names the owner for `reap`, for what was never started.
"""

from __future__ import annotations

import asyncio
import os
import socket
import struct
from contextlib import suppress
from functools import cache
from typing import Any

from troupe.envs.sandbox import image, owner, seccomp
from troupe.envs.sandbox.base import warden_command
from troupe.envs.sandbox.settings import SMALL_MB, SandboxSettings
from troupe.envs.sandbox.warden import INODES
from troupe.protocol.errors import ConfigError, EnvironmentFailed

try:
    import docker as sdk
    from docker.errors import DockerException, ImageNotFound
except ImportError:  # an extra
    sdk = None

NAME = "docker"
GVISOR = "runsc"
_PATH = "/usr/local/bin:/usr/bin:/bin"
_NOBODY = 65534
_WARDEN_MB = 48
_GVISOR_MB, _GVISOR_PIDS = 512, 4096
_ATTACH = {"stdin": 1, "stdout": 1, "stderr": 1, "stream": 1}
_PIECE = struct.Struct(">BxxxI")  # the daemon's framing of stdout and stderr in one connection
_CALL_S = 60


@cache
def _client() -> Any:
    return sdk.from_env(timeout=_CALL_S)


@cache
def missing() -> str:
    """Why no sandbox of this kind can be opened here, and what to do; empty if one can."""
    if sdk is None:
        return "the Python package docker is missing: pip install 'troupe-rl[docker]'"
    try:
        _client().ping()
        scheme = _client().api.base_url.partition(":")[0]
    except (DockerException, OSError) as error:
        return f"no Docker daemon answers ({' '.join(str(error).split())[:160]}): start dockerd, or set DOCKER_HOST"
    return "" if scheme == "http+docker" else f"only a daemon behind a local socket is used, DOCKER_HOST is {scheme}"


async def start(settings: SandboxSettings) -> DockerChannel:
    """A fresh container. Raises ConfigError if there cannot be one, EnvironmentFailed if the daemon refuses."""
    why = await asyncio.to_thread(missing)
    if why:
        raise ConfigError(f"no docker sandbox: {why}")
    await asyncio.to_thread(_reap_once)
    name = await asyncio.to_thread(_image, settings.image)
    try:
        container, connection = await asyncio.to_thread(_start, name, settings)
    except (DockerException, OSError) as error:
        raise EnvironmentFailed(f"docker did not start a sandbox: {' '.join(str(error).split())[:300]}") from None
    reader, writer = await asyncio.open_connection(sock=connection)
    return DockerChannel(container, reader, writer)


def reap() -> list[str]:
    """Removes the containers whose owner is gone; returns their names. Does nothing without a daemon."""
    removed: list[str] = []
    if missing():
        return removed
    for container in _client().containers.list(all=True, filters={"label": owner.LABEL}, ignore_removed=True):
        if not owner.alive(container.labels[owner.LABEL]):
            _remove(container)
            removed.append(container.name)
    return removed


class DockerChannel:
    """A warden in a container, spoken to over the connection to its stdin, stdout and stderr."""

    def __init__(self, container: Any, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = asyncio.StreamReader(), writer
        self._container = container
        self._said = b""
        self._pump = asyncio.create_task(self._separate(reader))

    async def _separate(self, source: asyncio.StreamReader) -> None:
        try:
            while True:
                stream, size = _PIECE.unpack(await source.readexactly(_PIECE.size))
                data = await source.readexactly(size)
                if stream == 1:
                    self.reader.feed_data(data)
                else:
                    self._said = (self._said + data)[:4096]
        except (OSError, EOFError):
            self.reader.feed_eof()

    async def close(self) -> str:
        """Removes the container."""
        await asyncio.to_thread(_remove, self._container)
        self.writer.close()
        self._pump.cancel()
        return " ".join(self._said.decode(errors="replace").split())[-400:]


@cache
def _reap_once() -> None:
    reap()


@cache
def _image(name: str) -> str:
    """The image to use; the one of the local Python is made if the daemon does not have it."""
    wanted = name or image.tag()
    try:
        _client().images.get(wanted)
    except ImageNotFound:
        if name:
            raise ConfigError(f"sandbox.image: the daemon has no image '{name}'; pull or build it first") from None
        repository, _, version = wanted.partition(":")
        _client().api.import_image_from_data(image.root(), repository=repository, tag=version)
    return wanted


@cache
def has_gvisor() -> bool:
    """Whether the daemon has gVisor's runtime."""
    return GVISOR in _client().info().get("Runtimes", {})


def _start(name: str, settings: SandboxSettings) -> tuple[Any, socket.socket]:
    small = f"size={SMALL_MB}m,mode=1777,nr_inodes={INODES}"
    memory = settings.memory_mb + settings.disk_mb + 2 * SMALL_MB + _WARDEN_MB  # files in memory count as well
    runtime = settings.runtime or (GVISOR if has_gvisor() else None)
    pids, uid, caps = settings.pids + 1, None, []
    code = seccomp.program()  # beside the daemon's own, by which a program may change the limits of process 1
    if runtime == GVISOR:  # its own kernel runs in the container, needs room, and does not hide process 1 from its own user
        memory, pids, uid, caps = memory + _GVISOR_MB, settings.pids + _GVISOR_PIDS, _NOBODY, ["SETUID", "SETGID"]
        code = b""
    command = warden_command("python3", root="/work", path=_PATH, settings=settings, uid=uid, apart=uid is not None, code=code)
    container = _client().containers.create(
        name,
        command,
        stdin_open=True,
        auto_remove=True,
        labels={owner.LABEL: owner.me()},
        runtime=runtime,
        network_mode="none",
        ipc_mode="private",
        cgroupns="private",
        hostname="sandbox",
        read_only=True,
        user="0:0" if uid else f"{_NOBODY}:{_NOBODY}",
        cap_drop=["ALL"],
        cap_add=caps,
        security_opt=["no-new-privileges"],
        mem_limit=f"{memory}m",
        memswap_limit=f"{memory}m",
        pids_limit=pids,
        nano_cpus=10**9,
        shm_size=f"{SMALL_MB}m",
        tmpfs={"/work": f"exec,size={settings.disk_mb}m,mode=1777,nr_inodes={INODES}", "/tmp": f"exec,{small}"},
        working_dir="/work",
        environment={"PATH": _PATH},
        log_config={"type": "none"},  # or the daemon would keep every answer on the host's disk
    )
    try:
        attached = _client().api.attach_socket(container.id, params=_ATTACH)
        connection = socket.socket(fileno=os.dup(attached.fileno()))
        connection.setblocking(False)
        attached.close()
        container.start()
    except BaseException:
        _remove(container)
        raise
    return container, connection


def _remove(container: Any) -> None:
    with suppress(DockerException, OSError):  # it may be gone already
        container.remove(force=True, v=True)
