"""The public door: the gateway as a Ray Serve application, for a served checkpoint and beside a run in training.

Owns the Serve instance of the cluster while the door is open. Promises:
- a port that is taken is refused before anything is started;
- the door closes with the block that opened it, and with the process that opened it if that is killed outright (law 9);
- Serve stays silent on the terminal: its logs are with Ray's.
"""

from __future__ import annotations

import contextlib
import logging
import os
import socket
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any, Protocol

from troupe.protocol.errors import ConfigError, TimedOut

_APP = "troupe"
_OPEN_S = 60.0
_REQUESTS_AT_ONCE = 2048
_REQUESTS_WAITING = 4096


class Running(Protocol):
    """What the door needs to know of a run; `cluster.launch.Launched` is one."""

    folder: Path
    namespace: str


def door(port: int, host: str = "127.0.0.1") -> Callable[[Running], contextlib.AbstractContextManager[str]]:
    """The door of a run in training, to be entered once Ray is there: `door(8000)(launched)`. Checks the port now."""
    check_port(host, port)
    return lambda run: opened(run.folder, run.namespace, host, port, training=True)


def check_port(host: str, port: int) -> None:
    """Raises ConfigError if nobody could listen there."""
    if not 0 < port < 65536:
        raise ConfigError(f"port {port}: a port is a number from 1 to 65535")
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
    except OSError as error:
        raise ConfigError(f"--host '{host}': {error.strerror or error}") from error
    with socket.socket(family, kind, protocol) as trial:
        # Reused as servers do, so that connections of a door just closed are no hindrance; but not shared: Serve shares
        # ports, and two doors on one port would each answer half of the requests.
        trial.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            trial.bind(address)
            trial.listen()
        except OSError as error:
            why = "is in use: stop what listens there, or choose another with --port"
            if not _taken(error):
                why = f"cannot be opened: {error.strerror}"
            raise ConfigError(f"port {port} on {host} {why}") from error


@contextlib.contextmanager
def opened(folder: Path, namespace: str, host: str, port: int, *, training: bool) -> Iterator[str]:
    """Serves the run's policy for the time of the block; yields the URL. Ray must be initialised.

    Raises ConfigError if the cluster serves something already, TimedOut if the door does not open.
    """
    from ray import serve

    logging.getLogger("ray.serve").setLevel(logging.ERROR)
    if serve.status().proxies:
        raise ConfigError("this Ray cluster runs Ray Serve already, and a cluster has one door: use another cluster")
    quiet = {"log_level": "WARNING", "enable_access_log": False}
    serve.start(http_options={"host": host, "port": port}, logging_config=quiet)
    try:
        lease = _lease()
        serve.run(_deployment(str(folder), namespace, training, lease, quiet), name=_APP, route_prefix="/")
        url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        _await_answer(url.replace("//0.0.0.0:", "//127.0.0.1:"))
        yield url
    finally:
        if not _ray_ends_with_us():
            serve.shutdown()


def _deployment(folder: str, namespace: str, training: bool, lease: Any, quiet: dict[str, Any]) -> Any:
    from ray import serve

    def build() -> Any:
        from troupe.actors.host import RayContext
        from troupe.serve.gateway import Gateway
        from troupe.serve.routes import application

        threading.Thread(target=_close_with, args=(lease,), daemon=True, name="lease").start()
        context = RayContext(f"gateway-{os.getpid()}", namespace, lease=None, seed=0)
        return application(Gateway(context, folder, training))

    deploy = serve.deployment(
        name="gateway",
        max_ongoing_requests=_REQUESTS_AT_ONCE,
        max_queued_requests=_REQUESTS_WAITING,
        graceful_shutdown_wait_loop_s=0.1,
        graceful_shutdown_timeout_s=1.0,
        health_check_period_s=2.0,
        ray_actor_options={"num_cpus": 0},
        logging_config=quiet,
    )
    return deploy(serve.ingress(build)()).bind()


def _lease() -> Any:
    """An actor that lives as long as this process, whatever ends it."""
    import ray

    class Lease:
        async def expired(self) -> None:
            import asyncio

            await asyncio.Event().wait()

    return ray.remote(Lease).options(num_cpus=0).remote()


def _ray_ends_with_us() -> bool:
    """Did this process start Ray? Then Serve goes with it, at once, and need not be closed piece by piece."""
    from ray._private import worker

    node = getattr(worker, "_global_node", None)
    return node is not None and bool(node.is_head())


def _close_with(lease: Any) -> None:
    """Serve outlives the process that started it: in a cluster that goes on, the door has to close itself."""
    import ray
    from ray import serve

    try:
        ray.get(lease.expired.remote())
    except Exception:
        serve.shutdown()


def _await_answer(url: str) -> None:
    """Returns once the gateway itself answers, ready or not."""
    deadline = time.monotonic() + _OPEN_S
    reason = ""
    while time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(f"{url}/v1/models", timeout=5):
                return
        except (urllib.error.URLError, OSError) as error:
            reason = str(error)
        time.sleep(0.1)
    raise TimedOut(f"the door at {url} has not opened within {_OPEN_S:g} s: {reason}")


def _taken(error: OSError) -> bool:
    import errno

    return error.errno == errno.EADDRINUSE
