"""A run folder with a tiny random policy, and its company in one process: the real keeper, generators and engine, the
real routes on a real port, without Ray."""

from __future__ import annotations

import asyncio
import contextlib
import random
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import openai
import pytest
import uvicorn

from troupe.actors.factories import make_engine
from troupe.actors.settings import RunConfig
from troupe.cluster import config as recipes
from troupe.cluster.serving import read_weights
from troupe.learner import checkpoint
from troupe.learner.model import load
from troupe.learner.tiny import make_tiny
from troupe.protocol.errors import ActorLost, NotReady
from troupe.protocol.messages import Blob, Saved
from troupe.serve import checkpoints
from troupe.serve.gateway import Gateway
from troupe.serve.keeper import Keeper
from troupe.serve.routes import application

CONTEXT = 256


def make_run(folder: Path, hidden: int = 32) -> Path:
    """A run of three checkpoints, step-0 to step-2, with different weights."""
    folder.mkdir(parents=True)
    config = RunConfig(name="tiny")
    recipes.write(config, folder / "config.toml")
    model = make_tiny(folder / "model", ["hello world, the lake is frozen"], hidden=hidden, layers=2, heads=2, context=CONTEXT)
    for step in range(3):
        policy = load(config.model_settings(str(model)), seed=step)
        checkpoint.write(folder / "checkpoints" / f"step-{step}", policy, model, optimiser={}, step=step, seed=0)
    return folder


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "tiny")


@pytest.fixture
def ask(run: Path) -> Callable[..., None]:
    """`ask(scenario, step=0, replicas=1)` runs `scenario(client, url, context)` against the served run."""

    def asked(scenario: Callable[[openai.AsyncOpenAI, str, InProcess], Awaitable[None]], **options: Any) -> None:
        async def main() -> None:
            async with (
                served(run, **options) as (url, context),
                openai.AsyncOpenAI(base_url=f"{url}/v1", api_key="any", max_retries=0) as client,
            ):
                await scenario(client, url, context)

        asyncio.run(main())

    return asked


@pytest.fixture
def house() -> SimpleNamespace:
    """What a test needs to set a stage of its own."""
    return SimpleNamespace(make_run=make_run, InProcess=InProcess, keep=keep, listening=listening, context=CONTEXT)


class InProcess:
    """`actors.context.Context` for actors that share an event loop."""

    def __init__(self, name: str, company: dict[str, Any]) -> None:
        self.name, self.clock, self.blobs, self.rng = name, self, self, random.Random(name)
        self._company = company

    def now(self) -> float:
        return time.time()

    def put(self, value: Any) -> Blob:
        return Blob(value)

    async def get(self, blob: Blob) -> Any:
        return blob.ref

    def ref(self, name: str, cls: type[Any]) -> Any:
        return _Ref(name, self._company)

    async def spawn(self, name: str, cls: type[Any], resources: Any = None, **kwargs: Any) -> None:
        actor = cls(InProcess(name, self._company), **kwargs)
        self._company[name] = (None, asyncio.Event())  # still starting
        await actor.start()
        self._company[name] = (actor, asyncio.Event())

    async def exists(self, name: str) -> bool:
        return name in self._company

    async def watch(self, name: str) -> str:
        if name in self._company:
            await self._company[name][1].wait()
        return "it was killed"

    async def kill(self, name: str) -> None:
        if name in self._company:
            actor, dead = self._company.pop(name)
            dead.set()
            for watcher in getattr(actor, "_watchers", []):
                watcher.cancel()
            if hasattr(actor, "_engine"):
                await actor._engine.close()


class _Ref:
    def __init__(self, name: str, company: dict[str, Any]) -> None:
        self._name, self._company = name, company

    def __getattr__(self, method: str) -> Any:
        async def call(message: Any) -> Any:
            if self._name not in self._company:
                raise ActorLost(f"there is no actor '{self._name}' at the moment")
            actor, _ = self._company[self._name]
            if actor is None:
                raise NotReady(f"{self._name} is still starting")
            return await getattr(actor, method)(message)

        return call


async def keep(context: InProcess, run: Path, step: int, replicas: int = 1) -> None:
    """A keeper in the company of `context` that serves the checkpoint `step` of `run`."""
    config = recipes.read(str(run / "config.toml"))
    model = config.model_settings(str(run / "model"))
    await context.spawn(
        "keeper",
        Keeper,
        make_engine=partial(make_engine, settings=config.generator, model=model, seed=0),
        read_weights=partial(read_weights, model=model, seed=0),
        replicas=replicas,
    )
    found = checkpoints.find(run, step)
    await context.ref("keeper", Keeper).load(Saved(found.version, str(found.path)))


@contextlib.asynccontextmanager
async def served(run: Path, *, step: int = 0, replicas: int = 1) -> AsyncIterator[tuple[str, InProcess]]:
    """The checkpoint `step` of `run`, served: (URL, context)."""
    context = InProcess("launcher", {})
    await keep(context, run, step, replicas)
    try:
        async with listening(Gateway(InProcess("gateway", context._company), str(run), training=False)) as url:
            yield url, context
    finally:
        for name in ["keeper", *context._company]:
            await context.kill(name)


@contextlib.asynccontextmanager
async def listening(gateway: Gateway) -> AsyncIterator[str]:
    """The gateway's routes on a free port."""
    server = uvicorn.Server(uvicorn.Config(application(gateway), port=0, log_level="error"))
    serving = asyncio.ensure_future(server.serve())
    while not server.started:
        await asyncio.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{server.servers[0].sockets[0].getsockname()[1]}"
    finally:
        server.should_exit = True
        await serving
