"""Puts plain actor classes on Ray: names, mailboxes, typed errors, bulk data, and who dies with whom.

The only file of `actors/` that knows Ray. Promises:
- every message crosses as bytes of `protocol.codec`, so a mixed-version cluster gets a typed error, not garbage;
- health is answered while work is going on: control methods run in a concurrency group of their own;
- actors outlive the one that started them (a director may be replaced), but not the run: each holds a lease on the
  process that launched the run and ends itself when that process is gone (law 9).
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import os
import random
import sys
import threading
import time
import traceback
from collections.abc import Callable
from concurrent.futures import Executor
from typing import Any, TypeVar

import ray
import ray.actor
import ray.exceptions

from troupe.actors.context import Blobs, Clock
from troupe.actors.deadlines import Deadline
from troupe.protocol import codec
from troupe.protocol.errors import ActorLost, NotReady, PackedError, RemoteError, TimedOut, TroupeError, pack, unpack
from troupe.protocol.messages import Ack, Blob

T = TypeVar("T")

CALLS_AT_ONCE = 4096
"""Messages that one actor works on at a time; further ones wait in Ray's mailbox."""

LONGEST_START_S = 600.0
"""Time to find room for an actor, import what it needs and load its model."""

_LAST_WORDS_S = 2.0

LONGEST_CALL_S = 24 * 3600.0
"""Backstop of every call. Callers set tighter limits with `context.within`."""

_LOST = (
    ray.exceptions.RayActorError,
    ray.exceptions.OwnerDiedError,
    ray.exceptions.WorkerCrashedError,
    ray.exceptions.TaskCancelledError,
)


class WallClock:
    """The real clock."""

    def now(self) -> float:
        return time.time()


class RayBlobs:
    """Blobs in Ray's object store: numpy arrays and Arrow tables are read without copying."""

    def put(self, value: Any) -> Blob:
        return Blob(ray.put(value))

    async def get(self, blob: Blob) -> Any:
        try:
            return await blob.ref
        except (*_LOST, ray.exceptions.ObjectLostError) as error:
            raise ActorLost(f"bulk data is gone with the actor that owned it: {_first_line(error)}") from error


class _Method:
    """One remote method of one named actor."""

    __slots__ = ("_name", "_proxy")

    def __init__(self, proxy: _Proxy, name: str) -> None:
        self._proxy, self._name = proxy, name

    async def __call__(self, message: Any = None) -> Any:
        data, blobs = codec.encode(message if message is not None else Ack())
        proxy = self._proxy
        try:
            handle = proxy.handle()
            group = handle.control if self._name in _CONTROL else handle.call
            with Deadline(LONGEST_CALL_S):
                reply, refs = await group.remote(self._name, data, blobs)
        except _LOST as error:
            proxy.forget()
            raise ActorLost(f"{proxy.name} was lost during '{self._name}': {_first_line(error)}") from error
        answer = codec.decode(reply, refs)
        if isinstance(answer, PackedError):
            raise unpack(answer)
        return answer


_CONTROL = frozenset({"health", "status"})
"""Methods that answer while the actor works. They run on a thread of their own: they may only read."""


class _Proxy:
    """Stands for the actor called `name`, whoever that is at the moment."""

    def __init__(self, name: str, namespace: str) -> None:
        self.name, self._namespace = name, namespace
        self._handle: Any = None
        self._methods: dict[str, _Method] = {}

    def handle(self) -> Any:
        if self._handle is None:
            try:
                self._handle = ray.get_actor(self.name, self._namespace)
            except ValueError as error:
                raise ActorLost(f"there is no actor '{self.name}' at the moment") from error
        return self._handle

    def forget(self) -> None:
        self._handle = None

    def __getattr__(self, method: str) -> _Method:
        if method.startswith("_"):
            raise AttributeError(method)
        found = self._methods.get(method)
        if found is None:
            found = self._methods[method] = _Method(self, method)
        return found


class RayContext:
    """`actors.context.Context` on Ray. Made in the launching process with `RayContext.launch`, then in each actor."""

    def __init__(self, name: str, namespace: str, lease: Any, seed: int) -> None:
        self.name = name
        self.namespace = namespace
        self.clock: Clock = WallClock()
        self.blobs: Blobs = RayBlobs()
        self.executor: Executor | None = None
        self.rng = random.Random(f"{seed}/{name}")
        self._lease = lease
        self._seed = seed
        self._proxies: dict[str, _Proxy] = {}

    @classmethod
    def launch(cls, namespace: str, seed: int) -> RayContext:
        """The context of the process that owns the run. Ray must be initialised."""
        remote: Any = ray.remote(_Lease)
        lease = remote.options(num_cpus=0, namespace=namespace).remote()
        ray.get(lease.granted.remote(), timeout=120)
        return cls("launcher", namespace, lease, seed)

    def ref(self, name: str, cls: type[T]) -> T:
        proxy = self._proxies.get(name)
        if proxy is None:
            proxy = self._proxies[name] = _Proxy(name, self.namespace)
        return proxy  # type: ignore[return-value]

    async def spawn(self, name: str, cls: type[Any], resources: dict[str, float] | None = None, **kwargs: Any) -> int:
        options = {"num_cpus": 0.0, **(resources or {})}
        handle = _Hosted.options(  # type: ignore[attr-defined]
            name=name, namespace=self.namespace, lifetime="detached", max_concurrency=CALLS_AT_ONCE, **options
        ).remote(name, self.namespace, self._lease, self._seed, cls, kwargs)
        try:
            async with asyncio.timeout(LONGEST_START_S):
                begun = await handle.begin.remote()
        except TimeoutError as error:
            ray.kill(handle)
            raise TimedOut(f"{name} has not started for {LONGEST_START_S:g} s: has the cluster room for it?") from error
        except _LOST as error:
            raise ActorLost(f"{name} died while starting: {_first_line(error)}") from error
        if isinstance(begun, PackedError):
            ray.kill(handle)
            raise unpack(begun)
        return int(begun)

    async def exists(self, name: str) -> bool:
        try:
            async with asyncio.timeout(LONGEST_START_S):  # it may wait for room in the cluster, with nobody left to begin it
                return bool(await ray.get_actor(name, self.namespace).begun.remote())
        except (ValueError, TimeoutError, *_LOST):
            return False

    async def watch(self, name: str) -> str:
        try:
            handle = ray.get_actor(name, self.namespace)
            await handle.watch.remote()
        except ValueError:
            return "it does not exist"
        except _LOST as error:
            return await self._lease.last_words.remote(name) or _first_line(error)
        return "it ended"

    async def kill(self, name: str) -> None:
        with contextlib.suppress(ValueError, *_LOST):
            handle = ray.get_actor(name, self.namespace)
            ray.kill(handle)
            while True:  # until its name is free
                await handle.begun.remote()
                await asyncio.sleep(0.02)

    def die(self, reason: str) -> None:
        print(f"{self.name} ends itself: {reason}", file=sys.stderr, flush=True)
        with contextlib.suppress(Exception):  # then the supervisor hears only that it died
            ray.get(self._lease.hear.remote(self.name, reason), timeout=_LAST_WORDS_S)
        os._exit(1)

    def watch_loop(self, limit_s: float, lag: Callable[[float], None] = lambda seconds: None) -> None:
        watched = asyncio.get_running_loop(), threading.get_ident()
        threading.Thread(target=self._watch_loop, args=(*watched, limit_s, lag), daemon=True, name="watchdog").start()

    def _watch_loop(self, loop: asyncio.AbstractEventLoop, thread: int, limit_s: float, lag: Callable[[float], None]) -> None:
        while True:
            turned, asked = threading.Event(), time.monotonic()
            loop.call_soon_threadsafe(turned.set)
            if not turned.wait(limit_s):
                frame = traceback.extract_stack(sys._current_frames().get(thread))[-1]
                where = f"{os.path.basename(frame.filename)}, line {frame.lineno}, in {frame.name}"
                self.die(f"its event loop has stood still for {limit_s:g} s: {where}")
            lag(time.monotonic() - asked)
            time.sleep(1.0)


class _Lease:
    """Lives exactly as long as the process that launched the run, and remembers why actors ended themselves."""

    def __init__(self) -> None:
        self._words: dict[str, str] = {}

    async def hear(self, name: str, reason: str) -> None:
        self._words[name] = reason

    async def last_words(self, name: str) -> str:
        return self._words.pop(name, "")

    async def granted(self) -> None:
        return

    async def expired(self) -> None:
        await asyncio.Event().wait()


@ray.remote(concurrency_groups={"control": 64})  # type: ignore[call-overload]
class _Hosted:
    """The mailbox around one plain actor."""

    def __init__(self, name: str, namespace: str, lease: Any, seed: int, cls: type[Any], kwargs: dict[str, Any]) -> None:
        self._name, self._lease = name, lease
        self._context = RayContext(name, namespace, lease, seed)
        self._cls, self._kwargs = cls, kwargs
        self._actor: Any = None
        self._begun = False
        threading.Thread(target=self._end_with_lease, daemon=True, name="lease").start()

    @ray.method(concurrency_group="control")
    async def begun(self) -> bool:
        """Whether `begin` has come, which is lost with a creator that dies before this process is up."""
        return self._begun

    @ray.method(concurrency_group="control")
    async def watch(self) -> None:
        await asyncio.Event().wait()

    async def begin(self) -> PackedError | int:
        self._begun = True
        try:
            actor = self._cls(self._context, **self._kwargs)
            if hasattr(actor, "start"):
                await actor.start()
            self._actor = actor
            settle()
        except Exception as error:
            threading.Timer(_LAST_WORDS_S, os._exit, (1,)).start()  # its creator may be dead, who would end it
            return self._packed(error, "start")
        return os.getpid()

    def _end_with_lease(self) -> None:
        try:
            ray.get(self._lease.expired.remote())
        except Exception:
            os._exit(0)

    async def call(self, method: str, data: bytes, blobs: list[Any]) -> tuple[bytes, list[Any]]:
        try:
            message = codec.decode(data, blobs)
            if self._actor is None:
                raise NotReady(f"{self._name} is still starting")
            function: Any = getattr(self._actor, method)
            reply = await (function() if isinstance(message, Ack) else function(message))
            return codec.encode(reply if reply is not None else Ack())
        except Exception as error:
            return codec.encode(self._packed(error, method))

    @ray.method(concurrency_group="control")
    async def control(self, method: str, data: bytes, blobs: list[Any]) -> tuple[bytes, list[Any]]:
        return await self.call(method, data, blobs)

    def _packed(self, error: Exception, method: str) -> PackedError:
        if not isinstance(error, TroupeError) or isinstance(error, RemoteError):
            traceback.print_exc(file=sys.stderr)
        return pack(error, where=f"{self._name}.{method}")


def settle() -> None:
    """Makes collections cheap, once an actor has started. What was imported and started lives as long as the process: none need
    look at it. What comes later is mostly freed without one, so they may be rare: each would go over all that is in flight."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000, 5, 5)


def _first_line(error: BaseException) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return lines[0] if lines else type(error).__name__
