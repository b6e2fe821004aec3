"""What actors/host.py promises, on real Ray: names, typed errors, health under load, replacement, and the lease."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import time
from typing import Any

import numpy as np
import pytest
import ray

from troupe.actors.host import RayContext, _Hosted
from troupe.cluster.launch import ray_session
from troupe.protocol.errors import ActorLost, NotReady, RemoteError
from troupe.protocol.messages import Blob, Health, Ping, Weights, WeightsHeld

pytestmark = pytest.mark.xdist_group("ray")


@pytest.fixture(scope="module")
def address() -> Any:
    with ray_session(None, "host-tests") as reached:
        yield reached


@pytest.fixture(scope="module")
def context(address: str) -> RayContext:
    return RayContext.launch("host-tests", seed=1)


def worker_class() -> type[Any]:
    """Defined in a function, so that it travels to the other process by value."""

    class Worker:
        def __init__(self, context: Any, start_error: bool = False) -> None:
            self.context, self.start_error = context, start_error

        async def start(self) -> None:
            if self.start_error:
                raise NotReady("the disk is full: free some space")

        async def health(self, message: Ping) -> Health:
            return Health(self.context.name, os.getpid())

        async def typed(self, message: Ping) -> None:
            raise NotReady("not yet")

        async def untyped(self, message: Ping) -> None:
            raise KeyError("oops")

        async def block(self, message: Ping) -> None:
            time.sleep(3)  # noqa: ASYNC251 (blocking the loop is what is tested)

        async def stand_still(self, message: Ping) -> None:
            self.context.watch_loop(1.0)
            await asyncio.sleep(0.1)
            while True:
                pass

        async def give_up(self, message: Ping) -> None:
            self.context.die("its engine is on fire")

        async def hold(self, message: Weights) -> WeightsHeld:
            tensors = await self.context.blobs.get(message.tensors)
            return WeightsHeld(self.context.name, int(tensors["w"].sum()), str(tensors["w"].flags.owndata))

    return Worker


async def test_errors_keep_their_type_and_name_the_actor(context: RayContext) -> None:
    worker: Any = context.ref("errors", worker_class())
    await context.spawn("errors", worker_class())
    with pytest.raises(NotReady, match="not yet"):
        await worker.typed(Ping())
    with pytest.raises(RemoteError, match=r"errors\.untyped: KeyError"):
        await worker.untyped(Ping())
    await context.kill("errors")
    with pytest.raises(ActorLost, match="errors"):
        await worker.typed(Ping())


async def test_an_actor_that_cannot_start_says_why_and_is_gone(context: RayContext) -> None:
    with pytest.raises(NotReady, match="disk is full"):
        await context.spawn("broken", worker_class(), start_error=True)
    await asyncio.sleep(0.2)
    assert not await context.exists("broken")


async def test_an_actor_that_nobody_begins_does_not_count_as_there_and_can_be_replaced(context: RayContext) -> None:
    options = {"name": "unborn", "namespace": context.namespace, "lifetime": "detached", "num_cpus": 0}
    _Hosted.options(**options).remote("unborn", context.namespace, context._lease, 0, worker_class(), {})  # type: ignore[attr-defined]
    assert not await context.exists("unborn")
    await context.kill("unborn")
    await context.spawn("unborn", worker_class())
    assert await context.exists("unborn")
    await context.kill("unborn")
    assert not await context.exists("unborn")


async def test_an_actor_that_cannot_start_ends_though_its_creator_is_gone(context: RayContext) -> None:
    options = {"name": "forlorn", "namespace": context.namespace, "lifetime": "detached", "num_cpus": 0}
    arguments = ("forlorn", context.namespace, context._lease, 0, worker_class(), {"start_error": True})
    handle = _Hosted.options(**options).remote(*arguments)  # type: ignore[attr-defined]
    watching = asyncio.ensure_future(context.watch("forlorn"))
    await handle.begin.remote()  # and nobody looks at the answer
    assert await asyncio.wait_for(watching, 30)


async def test_health_is_answered_while_the_actor_is_blocked(context: RayContext) -> None:
    await context.spawn("blocked", worker_class())
    worker: Any = context.ref("blocked", worker_class())
    blocked = asyncio.ensure_future(worker.block(Ping()))
    await asyncio.sleep(0.3)
    assert (await worker.health(Ping())).name == "blocked"
    assert not blocked.done()
    await blocked
    await context.kill("blocked")


async def test_bulk_data_is_read_without_copying(context: RayContext) -> None:
    await context.spawn("bulk", worker_class())
    worker: Any = context.ref("bulk", worker_class())
    blob: Blob = context.blobs.put({"w": np.ones(1_000_000, np.int32)})
    held = await worker.hold(Weights(1, "", blob))
    assert held.version == 1_000_000 and held.checksum == "False"
    await context.kill("bulk")


async def test_a_killed_actor_is_noticed_and_its_reference_reaches_the_replacement(context: RayContext) -> None:
    pid = await context.spawn("mortal", worker_class())
    worker: Any = context.ref("mortal", worker_class())
    watching = asyncio.ensure_future(context.watch("mortal"))
    await worker.health(Ping())
    os.kill(pid, signal.SIGKILL)
    assert await asyncio.wait_for(watching, 30)
    with pytest.raises(ActorLost):
        await worker.health(Ping())
    second = await context.spawn("mortal", worker_class())
    assert (await worker.health(Ping())).pid == second != pid
    await context.kill("mortal")


@pytest.mark.parametrize(("method", "words"), [("give_up", "its engine is on fire"), ("stand_still", "in stand_still")])
async def test_an_actor_that_ends_itself_says_why_to_its_supervisor(context: RayContext, method: str, words: str) -> None:
    await context.spawn(method, worker_class())
    watching = asyncio.ensure_future(context.watch(method))
    with pytest.raises(ActorLost):
        await getattr(context.ref(method, worker_class()), method)(Ping())
    assert words in await asyncio.wait_for(watching, 30)


LAUNCHER = """
import asyncio, sys, time, ray
from troupe.actors.host import RayContext, _Hosted
class Idle:
    def __init__(self, context): pass
ray.init(address=sys.argv[1], namespace="orphans", log_to_driver=False)
context = RayContext.launch("orphans", 0)
options = {"name": "unborn", "namespace": "orphans", "lifetime": "detached", "num_cpus": 0}
unborn = _Hosted.options(**options).remote("unborn", "orphans", context._lease, 0, Idle, {})
assert not ray.get(unborn.begun.remote())
print(asyncio.run(context.spawn("idle", Idle)), flush=True)
time.sleep(600)
"""


def test_actors_end_with_the_process_that_launched_them(address: str) -> None:
    launcher = subprocess.Popen([sys.executable, "-c", LAUNCHER, address], stdout=subprocess.PIPE, text=True)
    try:
        assert launcher.stdout is not None
        pid = int(launcher.stdout.readline())
        os.kill(pid, 0)
    finally:
        launcher.kill()
        launcher.wait()
    deadline = time.monotonic() + 60
    while (os.path.exists(f"/proc/{pid}") or lives("unborn", "orphans")) and time.monotonic() < deadline:
        time.sleep(0.2)
    assert not os.path.exists(f"/proc/{pid}") and not lives("unborn", "orphans")


def lives(name: str, namespace: str) -> bool:
    try:
        ray.get_actor(name, namespace)
    except ValueError:
        return False
    return True
