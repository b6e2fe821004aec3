"""The children of a run: who lives, who is replaced, which weights they hold.

Owns the actors that the director leads, and the current weight version. Promises:
- a version is announced only after every generator proved by checksum that it holds it; a generator that cannot prove
  it is ended and replaced, and takes no work before it has proved (law 4);
- a child that dies is started again with back-off and welcomed with all that it must know; more than `max_restarts`
  deaths within `RESTART_WINDOW_S` seconds, or `_STARTS` starts in a row that took that long and failed, stop the run, saying
  whose and why;
- children are found again by name, so that a new director takes over the company of the one before (law 7);
- a child that is scaled away takes no more work and finishes what it has first, within a limit. Which pools there are is said
  by `roster.py`.
"""

from __future__ import annotations

import asyncio
import contextlib
import math
import os
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import TypeVar

from troupe.actors.context import Context, within
from troupe.actors.dispatcher import Dispatcher
from troupe.actors.engines.base import Engine
from troupe.actors.env_pool import EnvPool
from troupe.actors.evaluator import Evaluator
from troupe.actors.generator import Generator
from troupe.actors.learner import Learner, Trains
from troupe.actors.ledger import Ledger
from troupe.actors.roster import Roster
from troupe.actors.settings import RunConfig
from troupe.actors.store import Store
from troupe.protocol.errors import ActorLost, NotReady, Overloaded, TimedOut, TroupeError
from troupe.protocol.messages import Announce, Drain, GetWeights, Limits, Pools, PoolsHeard, Routes, Scale, Weights

T = TypeVar("T")

RESTART_WINDOW_S = 300.0
_STARTS = 3
INFORM_S = 2.0
_TAKEN_S = 30.0
"""A call that fails later than this was taken by its receiver, which was lost in its work."""
_FINISH_S = 60.0
"""Seconds, at most, that new weights wait for turns in flight: less than a router's patience with a replica."""

_PASSING = (ActorLost, NotReady, Overloaded, TimedOut)
"""Errors that pass when an actor is back."""


@dataclass(slots=True)
class Parts:
    """What a run is made of beside its recipe: where the model lies, and what generators and learner wrap.

    make_trainer: None for a company that only plays: it has neither learner nor evaluator.
    """

    model_folder: str
    make_engine: Callable[[str], Engine]
    make_trainer: Callable[[], Trains] | None = None


class Company:
    """Starts, watches, replaces, scales and ends the children of one run."""

    def __init__(self, context: Context, config: RunConfig, parts: Parts, limits: Limits, ledger: Ledger) -> None:
        self._context, self._config, self._parts = context, config, parts
        self._limits, self._ledger = limits, ledger
        wanted = {"env": config.env.actors, "generator": config.generator.replicas, **ledger.wanted()}
        self._generators_wanted = wanted["generator"]
        self._outbox = os.path.join(ledger.folder, "weights")
        self.roster = Roster(self, context, config.env, ledger, wanted["env"], limits.episode_s)
        self._weights: Weights | None = None
        self._proved: dict[str, int] = {}
        self._alive: set[str] = set()
        self._watchers: dict[str, asyncio.Task[None]] = {}
        self._deaths: dict[str, list[float]] = {}
        self._retiring: set[str] = set()
        self._doubt = ""
        """Why a generator could not prove, last."""
        self._publishing = asyncio.Lock()
        self._scaling = asyncio.Lock()
        self._dispatcher = context.ref("dispatcher", Dispatcher)
        self._routines: list[asyncio.Task[None]] = []
        self.version = -1
        self.broken: asyncio.Future[None] = asyncio.get_running_loop().create_future()

    def pools(self) -> list[str]:
        """Environment pools that live."""
        return sorted(n for n in self._alive if n.startswith("env-"))

    def generators(self) -> list[str]:
        """Generators that live, proved or not."""
        return sorted(n for n in self._alive if n.startswith("generator-"))

    def roll_call(self) -> dict[str, str]:
        """Every child and how it is: "alive", "proved" (a generator that takes work), "proving", "draining" or "dead"."""
        states = dict.fromkeys([*self.roster.draining(), *sorted(self._retiring)], "draining")
        takers = self._takers()
        for name in sorted(self._watchers):
            state = "alive" if name in self._alive else "dead"
            if name.startswith("generator-") and state == "alive":
                state = "proved" if name in takers else "proving"
            states[name] = state
        return states

    async def patiently(self, what: str, call: Callable[[], Awaitable[T]], seconds: float = 120.0) -> T:
        """Calls a child again while it is being replaced: at most for five minutes in which it takes no call, and after at
        most `max_restarts` calls that it took and did not end."""
        clock, deadline, lost = self._context.clock, math.inf, 0
        while True:
            began = clock.now()
            try:
                return await within(seconds, what, call())
            except (ActorLost, NotReady) as error:
                now = clock.now()
                if now > began + _TAKEN_S:
                    deadline, lost = math.inf, lost + 1
                deadline = min(deadline, now + RESTART_WINDOW_S)
                if now > deadline or lost > self._config.max_restarts:
                    how = f"not taken for {RESTART_WINDOW_S:g} s" if now > deadline else f"lost in its work {lost} times"
                    raise TimedOut(f"{what} was {how}; last: {error}") from error
                await asyncio.sleep(0.5)

    def members(self, kind: str) -> list[str]:
        """Children of that kind, alive or being replaced, in the order of their numbers."""
        return sorted((n for n in self._watchers if n.startswith(kind)), key=lambda name: (len(name), name))

    def wanted(self) -> dict[str, int]:
        """How many there should be of each kind that can be scaled."""
        return {"env": self.roster.wanted, "generator": self._generators_wanted}

    # -- for the director --------------------------------------------------------------------------------------------------

    async def gather(self) -> None:
        """Starts or finds every child, then watches over all of them."""
        trains = self._parts.make_trainer is not None
        await asyncio.gather(*(self.ensure(name) for name in ("store", *(["learner"] if trains else []))))
        generators = [f"generator-{i}" for i in range(self._generators_wanted)]
        # Those that a director before was sending away when it died: what they run is issued again.
        await asyncio.gather(*(self._context.kill(name) for name in self._ledger.names("generator-") - set(generators)))
        await asyncio.gather(self.ensure("dispatcher"), *(self.ensure(name) for name in [*self.roster.opening(), *generators]))
        if trains:
            await self.ensure("evaluator")
        await self.inform()
        routines = [self._keep_informed(), *([self.roster.follow_the_load()] if self._config.env.elastic else [])]
        self._routines += [asyncio.ensure_future(self.keep(routine)) for routine in routines]

    async def publish(self, weights: Weights) -> None:
        """Gives the weights to every generator, takes the proofs, then announces the version. Waits for a replacement
        if no generator is left that could prove it. Raises ActorLost if the weights were lost with the learner."""
        async with self._publishing:
            self._weights = weights
            await asyncio.gather(*(self._prove(name) for name in self.generators()))
        patience_s = self._config.generator.start_s + RESTART_WINDOW_S
        deadline = self._context.clock.now() + patience_s
        while not self._provers():
            if self._context.clock.now() > deadline:
                doubt = self._doubt or "none lives"
                raise TimedOut(
                    f"no generator has proved version {weights.version} for {patience_s:g} s; last: {doubt}; "
                    "if a server needs longer to start, raise generator.sglang_start_s or vllm_start_s"
                )
            try:
                newest = await self._refresh_weights(weights)
            except NotReady as error:
                raise ActorLost(f"version {weights.version} is gone with the learner: {error}") from error
            if newest != weights.version:
                raise ActorLost(f"version {weights.version} is gone with the learner, which is at {newest} again")
            await asyncio.sleep(0.1)
        self.version = weights.version
        self._ledger.note("announced", version=weights.version, checksum=weights.checksum, generators=self._provers())
        await self._route()
        await self.patiently("dispatcher.announce", lambda: self._dispatcher.announce(Announce(weights.version)))

    async def scale(self, wanted: Scale) -> None:
        """Changes the number of environment pools or generators. New ones live when it returns; pools that go may go on
        finishing their episodes. Raises ConfigError for a number of pools that the recipe's bounds exclude, and NotReady while
        the first ones start: how many there are is not known yet."""
        if not self._routines:
            raise NotReady("the run is still starting its actors: scale it when they live")
        if wanted.env_actors is not None:
            await self.roster.scale(wanted.env_actors)
        if wanted.generators is not None:
            async with self._scaling:
                self._generators_wanted = wanted.generators
                self._ledger.note(
                    "scale", wanted=self.wanted()
                )  # first: a director that dies now is followed by one that knows
                await self._scale_generators()

    async def close(self) -> None:
        """Ends every child."""
        children = [*self._watchers, *self.roster.draining(), *self._retiring]
        watchers = [*self._watchers.values(), *self.roster.tasks(), *self._routines]
        for watcher in watchers:
            watcher.cancel()
        await asyncio.gather(*watchers, return_exceptions=True)
        await asyncio.gather(*(self._context.kill(name) for name in children), return_exceptions=True)
        self._watchers.clear()
        self.broken.cancel()

    # -- weights -------------------------------------------------------------------------------------------------------

    async def _prove(self, name: str) -> None:
        """Loads the current weights into one generator. One that cannot prove them is put out of the company."""
        assert self._weights is not None
        weights, life = self._weights, len(self._deaths.get(name, ()))
        try:
            held = await within(300.0, f"{name}.load_weights", self._context.ref(name, Generator).load_weights(weights))
        except (ActorLost, NotReady) as error:
            self._doubt = str(error)  # it is asked again, or replaced by its watcher; what it had proved it may still hold
            return
        except TroupeError as error:
            self._proved.pop(name, None)
            self._ledger.say(f"{name}: {error}")
            await self._context.kill(name)
            return
        if life == len(self._deaths.get(name, ())) and name in self._alive:  # else the one that proved it is dead
            self._proved[name] = held.version

    def _provers(self) -> list[str]:
        """Generators that have proved the current weights."""
        wanted = self._weights.version if self._weights else -1
        return sorted(n for n, version in self._proved.items() if version == wanted)

    def _takers(self) -> list[str]:
        """Generators that take work: they have proved the announced version, or a newer one."""
        return sorted(n for n, version in self._proved.items() if version >= self.version)

    async def _route(self) -> None:
        """Tells every pool, all at once, which generators take work."""
        routes = Routes(self._takers())

        async def tell(pool: str) -> None:
            with contextlib.suppress(*_PASSING):
                await within(30.0, f"{pool}.routes", self._context.ref(pool, EnvPool).routes(routes))

        await asyncio.gather(*(tell(pool) for pool in [*self.pools(), *self.roster.draining()]))

    async def _refresh_weights(self, wanted: Weights) -> int:
        """The current weights may be gone, if the learner that sent them died: asks the learner for them again. Returns which
        version it has."""
        if self._parts.make_trainer is None:
            return wanted.version  # they are this process's own
        found = await within(60.0, "learner.weights", self._context.ref("learner", Learner).weights(GetWeights()))
        if found.version == wanted.version and self._weights is wanted:
            self._weights = found
        return found.version

    # -- children ------------------------------------------------------------------------------------------------------

    async def ensure(self, name: str) -> None:
        """Starts `name` unless it lives already, and watches over it."""
        if await self._context.exists(name):
            self._alive.add(name)
        else:
            await self._context.kill(name)  # one that a director who died had created and not begun
            await self._bring(name, "")
        if name not in self._watchers:
            self._watchers[name] = asyncio.ensure_future(self._supervise(name))

    def dismiss(self, name: str) -> None:
        """`name` is no member any more: it gets no new work, and nobody replaces it."""
        self._alive.discard(name)
        watcher = self._watchers.pop(name, None)
        if watcher is not None:
            watcher.cancel()

    async def _bring(self, name: str, death: str) -> None:
        """Starts `name`, again and again if it dies while it starts. `death`: why the one before died, if there was one."""
        failed, first = 0, self._context.clock.now()
        while name not in self._alive:
            if failed >= _STARTS and self._context.clock.now() > first + RESTART_WINDOW_S:
                raise TroupeError(f"{name} did not come to life in {failed} starts; last: {death}")
            if death:
                await self._mourn(name, death)
            try:
                await self._start(name)
                self._alive.add(name)
            except _PASSING as error:
                failed, death = failed + 1, str(error)
                await self._context.kill(name)

    async def _start(self, name: str) -> None:
        config = self._config
        rollout = config.rollout
        spawn = self._context.spawn
        incarnation = self._ledger.starts_of(name)
        # Before it is born: a director that dies now must not let the next one give the same number again.
        self._ledger.note("starting", actor=name)
        if name == "store":
            pid = await spawn(name, Store, folder=os.path.join(self._ledger.folder, "trajectories"))
        elif name == "learner":
            checkpoints = os.path.join(self._ledger.folder, "checkpoints")
            pid = await spawn(
                name,
                Learner,
                _device(config.learner.device, config.learner.ranks),
                make_trainer=self._parts.make_trainer,
                folder=checkpoints,
                keep=config.keep_checkpoints,
                way=config.generator.transfer,
                outbox=self._outbox,
            )
        elif name == "dispatcher":
            pid = await spawn(
                name,
                Dispatcher,
                world=config.env.name,
                settings=rollout,
                limits=self._limits,
                steps=config.steps,
                seed=config.seed,
                incarnation=incarnation,
            )
        elif name == "evaluator":
            pid = await spawn(
                name,
                Evaluator,
                world=config.env.name,
                settings=config.eval,
                limits=self._limits,
                max_tokens=rollout.max_tokens,
                stop=rollout.stop,
                seed=config.seed,
                file=os.path.join(self._ledger.folder, "evals.jsonl"),
            )
        elif name.startswith("env-"):
            pid = await spawn(
                name,
                EnvPool,
                world=config.env.name,
                options=config.env.options,
                model_folder=self._parts.model_folder,
                slots=config.env.slots,
                generate_s=rollout.generate_s,
                agent=config.agent,
                renderer=config.model.renderer,
                env_step_s=rollout.env_step_s,
            )
        else:
            pid = await spawn(
                name,
                Generator,
                _device(config.generator.device),
                make_engine=self._parts.make_engine,
                in_flight=rollout.in_flight,
                finish_s=min(_FINISH_S, rollout.generate_s / 2),
            )
        self._ledger.note("started", actor=name, pid=pid)

    async def _supervise(self, name: str) -> None:
        """Puts a new `name` in the place of each one that dies, with back-off; too many deaths stop the run."""
        try:
            while True:
                reason = await self._context.watch(name)
                self._alive.discard(name)
                self._proved.pop(name, None)
                await self._bring(name, reason)
                self._ledger.say(f"{name} is back")
                await self.inform()
        except Exception as error:
            self._break(name, error)

    async def _mourn(self, name: str, reason: str) -> None:
        """Says that `name` died, tells the others, and waits a little. Raises if it dies too often."""
        deaths = self._deaths.setdefault(name, [])
        deaths.append(self._context.clock.now())
        self._ledger.died(name, reason)
        recent = sum(moment > deaths[-1] - RESTART_WINDOW_S for moment in deaths)
        if recent > self._config.max_restarts:
            raise TroupeError(f"{name} died {recent} times within {RESTART_WINDOW_S:g} s; last: {reason}")
        self._ledger.say(f"{name} died ({reason}); starting a new one")
        await self.tell_pools()
        await asyncio.sleep(min(10.0, 0.1 * 2 ** (recent - 1)))

    async def _keep_informed(self) -> None:
        while True:
            await asyncio.sleep(INFORM_S)
            await self.inform()

    async def keep(self, work: Awaitable[None]) -> None:
        """Does work without which the run cannot go on: what breaks it ends the run."""
        try:
            await work
        except Exception as error:
            self._break("the company", error)

    def _break(self, who: str, error: Exception) -> None:
        """Ends the run with what broke it."""
        if not self.broken.done():
            self.broken.set_exception(error if isinstance(error, TroupeError) else TroupeError(f"{who}: {error!r}"))

    async def inform(self) -> None:
        """Tells everybody again what they must know: which pools live, the current weights, who holds them, the version.
        All of it is idempotent, so whatever message was lost, or sent before its receiver was born, arrives in the end."""
        await self.tell_pools()
        weights = self._weights
        if weights is not None:
            async with self._publishing:
                late = [n for n in self.generators() if n not in self._provers()]
                with contextlib.suppress(*_PASSING):
                    if late:
                        await self._refresh_weights(self._weights or weights)
                        await asyncio.gather(*(self._prove(name) for name in late))
            await self._route()
        if self.version >= 0:
            with contextlib.suppress(*_PASSING):
                await within(60.0, "dispatcher.announce", self._dispatcher.announce(Announce(self.version)))

    async def tell_pools(self) -> PoolsHeard | None:
        """Tells the dispatcher which pools live and which drain; returns what it has left in those, None if it did not hear."""
        message = Pools(dict.fromkeys(self.pools(), self._config.env.slots), self.roster.draining())
        with contextlib.suppress(*_PASSING):
            return await within(60.0, "dispatcher.pools", self._dispatcher.pools(message))
        return None

    async def _scale_generators(self) -> None:
        have, want = set(self.members("generator-")), {f"generator-{i}" for i in range(self._generators_wanted)}
        await asyncio.gather(*(self.ensure(name) for name in sorted(want - have)))
        leaving = sorted(have - want)
        for name in leaving:
            self.dismiss(name)
            self._proved.pop(name, None)
        await self.inform()
        await asyncio.gather(*(self._retire(name) for name in leaving))
        self._ledger.say(f"generators: {len(self.generators())}")

    async def _retire(self, name: str) -> None:
        """Lets a generator hand over its turns, or end them (at most the length of an episode), then ends it."""
        self._retiring.add(name)
        deadline = self._context.clock.now() + self._limits.episode_s
        while self._context.clock.now() < deadline and await self._context.exists(name):
            with contextlib.suppress(*_PASSING):
                health = await within(10.0, f"{name}.drain", self._context.ref(name, Generator).drain(Drain(now=True)))
                if health.load == 0:
                    break
            await asyncio.sleep(0.1)
        await self._context.kill(name)
        self._retiring.discard(name)
        self._ledger.note("retired", actor=name)


def _device(name: str, count: int = 1) -> dict[str, float] | None:
    return {"num_gpus": float(count)} if name.startswith("cuda") else None
