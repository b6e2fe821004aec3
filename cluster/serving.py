"""`troupe serve`: a run's checkpoint behind the public door, on a Ray of its own.

Owns the processes of the served policy. Promises: Ctrl-C or SIGTERM ends all of them and leaves nothing behind; a keeper
that dies is started again with the checkpoint that it last served; nothing of the run folder is written.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

from troupe.actors.context import within
from troupe.cluster import launch
from troupe.learner.config import ModelConfig
from troupe.protocol.errors import ActorLost, CheckpointError, TimedOut, TroupeError
from troupe.protocol.messages import GetStatus, Saved
from troupe.serve import app, checkpoints
from troupe.serve.checkpoints import Checkpoint
from troupe.serve.keeper import Keeper

_LOOK_S = 0.5
_LOAD_S = 600.0
_SAME_SIGNAL_S = 1.0
"""Wrappers pass Ctrl-C on to a process that the terminal has told already: two signals so close together are one."""


def serve(
    run: str,
    *,
    port: int = 8000,
    host: str = "127.0.0.1",
    replicas: int | None = None,
    checkpoint: str | None = None,
    say: Callable[[str], None] = print,
) -> None:
    """Serves until SIGINT or SIGTERM. `replicas`: generators (default: as many as the run had); `checkpoint`: a
    version, "step-N" or a checkpoint folder (default: the newest). Raises a TroupeError if it cannot."""
    folder, config = launch.known_folder(run)
    app.check_port(host, port)
    found = checkpoints.find(folder, checkpoint)
    model = config.model_settings(str(launch.prepare_model(config, folder)))
    from troupe.actors.factories import make_engine

    settings = config.generator
    keeper = {
        "make_engine": partial(make_engine, settings=settings, model=model, seed=config.seed),
        "read_weights": partial(read_weights, model=model, seed=config.seed),
        "replicas": replicas or settings.replicas,
        "resources": {"num_gpus": 1.0} if settings.device != "cpu" else None,
    }
    namespace = f"troupe-serve-{folder.name}"
    with _stopped_by_signal() as listen, launch.ray_session(None, namespace):
        listen()  # again: Ray has put its own handlers in place
        from troupe.actors.host import RayContext

        context = RayContext.launch(namespace, config.seed)
        with app.opened(folder, namespace, host, port, training=False) as url:
            asyncio.run(_keep(context, keeper, found, lambda held: say(_ready(url, folder.name, held)), say))


async def _keep(context: Any, keeper: dict[str, Any], found: Checkpoint, ready: Callable[[Checkpoint], None], say: Any) -> None:
    """Keeps a keeper alive, and passes on what it says. Raises what it cannot recover from."""
    ref = context.ref("keeper", Keeper)
    told = False
    while True:
        await context.kill("keeper")
        await context.spawn("keeper", Keeper, **keeper)
        try:
            await within(_LOAD_S, "keeper.load", ref.load(Saved(found.version, str(found.path))))
            if not told:
                ready(found)
                told = True
            seen = (await ref.status(GetStatus())).events_total
            while True:
                status = await within(60.0, "keeper.status", ref.status(GetStatus(seen)))
                for event in status.events:
                    say(event)
                seen = status.events_total
                if status.error:
                    raise TroupeError(status.error)
                found = Checkpoint(Path(status.metrics["checkpoint"]), status.version, str(status.metrics["checksum"]))
                await asyncio.sleep(_LOOK_S)
        except (ActorLost, TimedOut) as error:
            say(f"{error}; starting a new keeper with version {found.version}")
            await asyncio.sleep(1.0)


def read_weights(folder: str, model: ModelConfig, seed: int) -> tuple[str, dict[str, Any]]:
    """(checksum, tensors) of the checkpoint in `folder`, proved against what it says of itself. Raises CheckpointError."""
    import torch

    from troupe.learner.model import load, restore_model, tensors_of
    from troupe.protocol.checksum import checksum_of

    torch.set_num_threads(1)
    found = checkpoints.find(Path(folder), folder)
    policy = load(model, seed=seed)
    restore_model(policy, found.model_folder)
    tensors = tensors_of(policy)
    checksum = checksum_of(tensors)
    if checksum != found.checksum:
        raise CheckpointError(f"'{folder}' is damaged: its weights have checksum {checksum}, written were {found.checksum}")
    return checksum, tensors


@contextlib.contextmanager
def _stopped_by_signal() -> Iterator[Callable[[], None]]:
    """The block ends quietly at SIGINT or SIGTERM. A second one, meant as such, ends the process at once."""
    before = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}
    first = 0.0

    def stop(number: int, frame: Any) -> None:
        nonlocal first
        if not first:
            first = time.monotonic()
            raise KeyboardInterrupt
        if time.monotonic() - first > _SAME_SIGNAL_S:
            os._exit(130)

    def listen() -> None:
        for number in before:
            signal.signal(number, stop)

    listen()
    try:
        yield listen
    except KeyboardInterrupt:
        return
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _ready(url: str, name: str, held: Checkpoint) -> str:
    shown = url.replace("//0.0.0.0:", "//127.0.0.1:")
    return (
        f"Serving {name} at {url}/v1 · version {held.version} · checksum {held.checksum} · Ctrl-C to stop\n\n"
        f"  curl {shown}/v1/chat/completions -H 'Content-Type: application/json' \\\n"
        f"""    -d '{{"model": "{name}", "messages": [{{"role": "user", "content": "Hello"}}]}}'\n\n"""
        f'  client = openai.OpenAI(base_url="{shown}/v1", api_key="any")\n'
        f'  client.chat.completions.create(model="{name}", messages=[{{"role": "user", "content": "Hello"}}])\n'
    )
