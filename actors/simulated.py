"""Runs the same actor classes in one process, in virtual time, with seeded chaos: for laws that must hold always.

Owns a deterministic event loop and the mailboxes between the actors in it. Promises:
- the same seed gives the same run, event by event: delays, lost messages and crashes are drawn from it;
- time is virtual: a day of waiting costs nothing, and a run in which everybody waits for ever is an error, not a hang;
- messages cross as bytes of `protocol.codec`, as on Ray, and fail as on Ray: an actor that dies takes its calls with it
  and its bulk data (`ActorLost`, "may or may not have been executed"), and a new one of that name starts from what is on disk;
- a crash may happen at any await: the dead actor's tasks are cancelled and say nothing more, whatever they catch; what
  was sent before, by an actor that died or by a caller that waits no longer, still arrives.
"""

from __future__ import annotations

import asyncio
import contextvars
import random
import selectors
from collections.abc import Awaitable, Callable
from concurrent.futures import Executor, Future
from dataclasses import dataclass, field
from typing import Any, TypeVar

from troupe.actors.context import Blobs, Clock
from troupe.protocol import codec
from troupe.protocol.errors import ActorLost, NotReady, PackedError, TroupeError, pack, unpack
from troupe.protocol.messages import Ack, Blob

T = TypeVar("T")


class SimulationStuck(TroupeError):
    """Every task waits for another one: a deadlock."""


@dataclass(slots=True)
class Chaos:
    """What goes wrong. Delays are seconds, drawn uniformly; probabilities are for each message."""

    delay: tuple[float, float] = (0.0005, 0.05)
    slow: float = 0.02
    """Probability that a message takes a hundred times longer."""
    lose_request: float = 0.0
    lose_reply: float = 0.0
    process_s: float = 0.0
    """Seconds that a new actor's process takes until it can be begun. A creator that dies meanwhile leaves it like that."""


class _VirtualTime(selectors.SelectSelector):
    """Never waits: moves the clock to the next event instead."""

    loop: _Loop

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        if timeout is None:
            raise SimulationStuck("every task waits for another one")
        self.loop.moment += max(0.0, timeout)
        return []


class _Loop(asyncio.SelectorEventLoop):
    """An event loop in which threads do not exist and time passes only while all wait."""

    def __init__(self, chaos: random.Random) -> None:
        self.moment = 0.0
        selector = _VirtualTime()
        selector.loop = self
        super().__init__(selector)
        self._chaos = chaos
        self.set_task_factory(_make_task)

    def time(self) -> float:
        return self.moment

    def run_in_executor(self, executor: Any, func: Callable[..., T], *args: Any) -> asyncio.Future[T]:  # type: ignore[override]
        """Runs `func` a little later and answers later still, as a thread would; not if its actor is dead by then."""
        future: asyncio.Future[T] = self.create_future()
        actor = _current.get()
        took = self._chaos.uniform(0.0, 0.01)

        def answer(result: T | None, error: BaseException | None) -> None:
            if future.done():
                return
            if error is not None:
                future.set_exception(error)
            else:
                future.set_result(result)  # type: ignore[arg-type]

        def work() -> None:
            if actor is not None and actor.dead:
                return
            result: T | None = None
            error: BaseException | None = None
            try:
                result = func(*args)
            except Exception as raised:
                error = raised
            self.call_later(took * self._chaos.random(), answer, result, error)

        self.call_later(took, work)
        return future


@dataclass(slots=True)
class _Actor:
    """One life of one actor."""

    name: str
    ended: asyncio.Future[str]
    instance: Any = None
    tasks: dict[asyncio.Task[Any], None] = field(default_factory=dict)
    """In the order of their start: a set would not be cancelled in the same order twice."""
    begun: bool = False
    dead: bool = False


_current: contextvars.ContextVar[_Actor | None] = contextvars.ContextVar("actor", default=None)


def _make_task(loop: asyncio.AbstractEventLoop, coro: Any, **options: Any) -> asyncio.Task[Any]:
    task: asyncio.Task[Any] = asyncio.Task(coro, loop=loop, **options)
    context = options.get("context")
    actor = context.get(_current) if context is not None else _current.get()
    if actor is not None:
        actor.tasks[task] = None
        task.add_done_callback(lambda done: actor.tasks.pop(done, None))
    return task


class _Clock:
    """Virtual seconds since an arbitrary epoch."""

    def __init__(self, loop: _Loop) -> None:
        self._loop = loop

    def now(self) -> float:
        return 1_800_000_000.0 + self._loop.moment


class _Blobs:
    """Bulk data by reference: nothing is copied. It dies with the life of the actor that put it, as on Ray."""

    def __init__(self) -> None:
        self._owner = _current.get()

    def put(self, value: Any) -> Blob:
        return Blob((value, self._owner))

    async def get(self, blob: Blob) -> Any:
        value, owner = blob.ref
        if owner is not None and owner.dead:
            raise ActorLost(f"bulk data is gone with {owner.name}, which owned it")
        return value


class _Inline(Executor):
    """Runs what it is given at once: there are no threads in virtual time."""

    def submit(self, function: Callable[..., T], /, *args: Any, **kwargs: Any) -> Future[T]:
        future: Future[T] = Future()
        try:
            future.set_result(function(*args, **kwargs))
        except BaseException as error:
            future.set_exception(error)
        return future


class Simulation:
    """A world of actors. `with Simulation(seed) as sim: sim.run(main)`, where `main(context)` starts and leads them."""

    def __init__(self, seed: int, chaos: Chaos | None = None) -> None:
        self.seed = seed
        self.chaos = chaos or Chaos()
        self.dice = random.Random(f"chaos/{seed}")
        self.loop = _Loop(self.dice)
        self.actors: dict[str, _Actor] = {}
        self.crashes: list[tuple[float, str]] = []

    def __enter__(self) -> Simulation:
        return self

    def __exit__(self, *exc: object) -> None:
        for name in list(self.actors):
            self.crash(name, "the simulation is over")
        self.loop.run_until_complete(_cancel_all(self.loop))
        self.loop.close()

    def run(self, main: Callable[[SimulatedContext], Awaitable[T]], limit_s: float = 100_000.0) -> T:
        """Runs `main` to its end. TimeoutError after `limit_s` virtual seconds."""
        context = SimulatedContext("launcher", self)
        return self.loop.run_until_complete(asyncio.wait_for(main(context), limit_s))

    def crash(self, name: str, reason: str = "killed") -> bool:
        """Kills the actor called `name` now. False if there is none."""
        actor = self.actors.pop(name, None)
        if actor is None:
            return False
        self.crashes.append((self.loop.moment, name))
        actor.dead = True
        for task in list(actor.tasks):
            task.cancel()
        if not actor.ended.done():
            actor.ended.set_result(reason)
        return True

    def travel(self) -> float:
        """How long a message takes."""
        seconds = self.dice.uniform(*self.chaos.delay)
        return seconds * (100 if self.dice.random() < self.chaos.slow else 1)


class SimulatedContext:
    """`actors.context.Context` in a simulation."""

    def __init__(self, name: str, simulation: Simulation) -> None:
        self.name = name
        self.simulation = simulation
        self.clock: Clock = _Clock(simulation.loop)
        self.blobs: Blobs = _Blobs()
        self.executor: Executor | None = _Inline()
        self.rng = random.Random(f"{simulation.seed}/{name}")

    def ref(self, name: str, cls: type[T]) -> T:
        return _Proxy(name, self.simulation)  # type: ignore[return-value]

    async def spawn(self, name: str, cls: type[Any], resources: dict[str, float] | None = None, **kwargs: Any) -> int:
        simulation = self.simulation
        _check_alive()
        await asyncio.sleep(simulation.travel())
        if name in simulation.actors:
            raise TroupeError(f"there is an actor '{name}' already")
        actor = simulation.actors[name] = _Actor(name, simulation.loop.create_future())

        if simulation.chaos.process_s:
            await asyncio.sleep(simulation.chaos.process_s)
            if actor.dead:
                raise ActorLost(f"{name} was lost during 'start'")

        async def begin() -> None:
            actor.begun = True
            instance = cls(SimulatedContext(name, simulation), **kwargs)
            if hasattr(instance, "start"):
                await instance.start()
            actor.instance = instance

        try:
            await _answer(actor, _inside(actor, begin()), "start")
        except Exception:
            simulation.crash(name, "it could not start")
            raise
        return 0

    async def exists(self, name: str) -> bool:
        _check_alive()
        await asyncio.sleep(self.simulation.travel())
        actor = self.simulation.actors.get(name)
        return actor is not None and actor.begun

    async def watch(self, name: str) -> str:
        _check_alive()
        actor = self.simulation.actors.get(name)
        if actor is None:
            return "it does not exist"
        return await asyncio.shield(actor.ended)

    async def kill(self, name: str) -> None:
        _check_alive()
        await asyncio.sleep(self.simulation.travel())
        self.simulation.crash(name, "ended on purpose")

    def die(self, reason: str) -> None:
        _check_alive()
        self.simulation.crash(self.name, reason)

    def watch_loop(self, limit_s: float, lag: Callable[[float], None] = lambda seconds: None) -> None:
        return


class _Proxy:
    """Stands for the actor called `name`, whoever that is at the moment."""

    def __init__(self, name: str, simulation: Simulation) -> None:
        self._name, self._simulation = name, simulation

    def __getattr__(self, method: str) -> Callable[..., Awaitable[Any]]:
        if method.startswith("_"):
            raise AttributeError(method)

        async def call(message: Any = None) -> Any:
            return await _call(self._simulation, self._name, method, message if message is not None else Ack())

        return call


def _check_alive() -> None:
    """A dead actor does nothing more, though it may catch its cancellation and try to."""
    actor = _current.get()
    if actor is not None and actor.dead:
        raise asyncio.CancelledError(f"{actor.name} is dead")


async def _call(simulation: Simulation, name: str, method: str, message: Any) -> Any:
    _check_alive()
    # A message on its way belongs to nobody: it arrives even if its sender dies or waits no longer.
    work = _deliver(simulation, name, method, *codec.encode(message))
    delivery = asyncio.get_running_loop().create_task(work, context=contextvars.Context())
    delivery.add_done_callback(lambda done: done.cancelled() or done.exception())  # nobody may be left to hear it
    return await asyncio.shield(delivery)


async def _deliver(simulation: Simulation, name: str, method: str, data: bytes, blobs: list[Any]) -> Any:
    dice, chaos = simulation.dice, simulation.chaos
    await asyncio.sleep(simulation.travel())
    actor = simulation.actors.get(name)
    if actor is None:
        raise ActorLost(f"there is no actor '{name}' at the moment")
    if dice.random() < chaos.lose_request:
        raise ActorLost(f"'{method}' did not reach {name}")

    async def handle() -> tuple[bytes, list[Any]]:
        try:
            request = codec.decode(data, blobs)
            if actor.instance is None:
                raise NotReady(f"{name} is still starting")
            function = getattr(actor.instance, method)
            reply = await (function() if isinstance(request, Ack) else function(request))
            return codec.encode(reply if reply is not None else Ack())
        except Exception as error:
            return codec.encode(pack(error, where=f"{name}.{method}"))

    reply, refs = await _answer(actor, _inside(actor, handle()), method)
    await asyncio.sleep(simulation.travel())
    if dice.random() < chaos.lose_reply:
        raise ActorLost(f"the answer of {name} to '{method}' was lost; it may or may not have been executed")
    answer = codec.decode(reply, refs)
    if isinstance(answer, PackedError):
        raise unpack(answer)
    return answer


async def _cancel_all(loop: asyncio.AbstractEventLoop) -> None:
    pending = asyncio.all_tasks(loop) - {asyncio.current_task(loop)}
    for task in pending:
        task.cancel()
    await asyncio.gather(*pending, return_exceptions=True)


def _inside(actor: _Actor, coro: Any) -> asyncio.Task[Any]:
    """A task that belongs to `actor` and dies with it."""
    context = contextvars.copy_context()
    context.run(_current.set, actor)
    return asyncio.get_running_loop().create_task(coro, context=context)


async def _answer(actor: _Actor, task: asyncio.Task[Any], method: str) -> Any:
    """The task's result; ActorLost if the actor dies first. The caller may go away: the actor works on."""
    waiting: list[asyncio.Future[Any]] = [task, actor.ended]
    await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
    if actor.dead or task.cancelled():
        raise ActorLost(f"{actor.name} was lost during '{method}'")
    return task.result()
