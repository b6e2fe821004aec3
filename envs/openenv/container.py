"""One container of an OpenEnv environment, its port on this machine's loopback alone.

Promises: it is removed when it is closed, and when this process has died in any way: a small process of its own waits for that
and tells the daemon. The owner's label is left for the reaper of sandboxes, should both be killed.
"""

from __future__ import annotations

import inspect
import subprocess
import time
from contextlib import suppress
from functools import cache
from typing import Any

import httpx

from troupe.envs.openenv import keeper
from troupe.envs.sandbox import docker, owner
from troupe.envs.sandbox.base import python_of_this_process
from troupe.envs.tools import short
from troupe.protocol.errors import ConfigError, EnvironmentFailed

try:
    import docker as sdk
    from docker.errors import DockerException, ImageNotFound
except ImportError:  # an extra
    sdk = None

READY_S = 60.0
_PORT = "8000/tcp"
"""Where OpenEnv's own images listen; an image that exposes one port and not this one listens there."""
_CALL_S = 60
_LOOK_S = 0.1
_ALIVE = ("created", "running")


class Container:
    """A running server at `url`. `close` removes it; may be called again."""

    def __init__(self, container: Any, watcher: subprocess.Popen[bytes], url: str) -> None:
        self.url = url
        self._container, self._watcher = container, watcher

    def close(self) -> None:
        """Removes the container, within seconds."""
        with suppress(DockerException, OSError):  # it may be gone already
            self._container.remove(force=True, v=True)
        _dismissed(self._watcher)


def start(image: str) -> Container:
    """A fresh container whose server answers. Raises ConfigError if there cannot be one, EnvironmentFailed if it does not."""
    if why := docker.missing():
        raise ConfigError(f"no container of '{image}': {why}")
    _reap_once()
    try:
        container = _client().containers.create(
            image,
            ports={_port(image): ("127.0.0.1", None)},
            labels={owner.LABEL: owner.me()},
            environment={"MAX_CONCURRENT_ENVS": "1"},
        )  # not removed when it ends by itself: then nobody could read its last words
        watcher = _watched(container)
    except (DockerException, OSError) as error:
        raise EnvironmentFailed(f"docker made no container of '{image}': {short(str(error), 300)}") from None
    started = Container(container, watcher, "")
    try:
        container.start()
        started.url = f"http://127.0.0.1:{_host_port(container, image)}"
        _await_ready(started, container, image)
    except (DockerException, OSError) as error:
        started.close()
        raise EnvironmentFailed(f"docker did not start a container of '{image}': {short(str(error), 300)}") from None
    except BaseException:
        started.close()
        raise
    return started


@cache
def _client() -> Any:
    return sdk.from_env(timeout=_CALL_S)


@cache
def _reap_once() -> None:
    docker.reap()


def _port(image: str) -> str:
    try:
        exposed = list((_client().images.get(image).attrs.get("Config") or {}).get("ExposedPorts") or {})
    except ImageNotFound:
        raise ConfigError(f"the Docker daemon has no image '{image}'; pull or build it first") from None
    return exposed[0] if len(exposed) == 1 else _PORT


def _watched(container: Any) -> subprocess.Popen[bytes]:
    """A process that removes the container at the end of its stdin, which this process holds."""
    path = _client().api.get_adapter("http+docker://localhost").socket_path
    command = [python_of_this_process(), "-I", "-S", "-c", inspect.getsource(keeper), path, container.id]
    return subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )


def _dismissed(watcher: subprocess.Popen[bytes]) -> None:
    if watcher.stdin is not None:
        watcher.stdin.close()
    try:
        watcher.wait(timeout=_CALL_S)
    except subprocess.TimeoutExpired:
        watcher.kill()
        watcher.wait()


def _host_port(container: Any, image: str) -> str:
    for _ in range(50):
        container.reload()
        for bound in container.ports.values():
            if bound:
                return str(bound[0]["HostPort"])
        if container.status not in _ALIVE:
            raise _silent(container, image)
        time.sleep(_LOOK_S)
    raise EnvironmentFailed("docker has published no port: does its daemon have a bridge network?")


def _await_ready(started: Container, container: Any, image: str) -> None:
    until = time.monotonic() + READY_S
    with httpx.Client(base_url=started.url, timeout=5.0, trust_env=False) as http:
        while time.monotonic() < until:
            with suppress(httpx.HTTPError):
                if http.get("/health").status_code == 200:
                    return
            container.reload()
            if container.status not in _ALIVE:
                break
            time.sleep(_LOOK_S)
    raise _silent(container, image)


def _silent(container: Any, image: str) -> EnvironmentFailed:
    said = container.logs(tail=20).decode(errors="replace").strip().splitlines()
    last = f"; it wrote: {short(said[-1], 300)}" if said else ""
    return EnvironmentFailed(f"the server in a container of '{image}' does not answer /health on its port{last}")
