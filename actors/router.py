"""Chooses the generator for each turn. Lives inside every process that samples, so that a turn costs one message.

Owns its own view of who is busy. Promises:
- a trajectory returns to the replica that holds its cache, unless that replica is gone or full;
- trajectories of one group, which begin alike, begin on the same replica, whichever process asks, unless that one has clearly
  more to do than another (`_fair`);
- a request whose replica died is issued again elsewhere (same prompt, same seed);
- a turn that its replica cut short goes on from what that one had sampled, wherever there is room; each of its tokens keeps
  its logprob and its version. With stop strings, which could begin before the cut and end after it, it is sampled anew;
- a replica that is full is passed over; when all are, it waits a little and asks again;
- a request that its caller gives up is aborted where it runs, so that nothing is sampled for nobody;
- each time that it is issued has `generate_s`. When no replica takes it, it waits for one, at most `patience_s` in all since
  something of it was kept, and then names the reason.
"""

from __future__ import annotations

import asyncio
import contextlib
from collections import Counter
from dataclasses import replace

import numpy as np

from troupe.actors.context import Context, within
from troupe.actors.generator import Generator
from troupe.protocol.errors import ActorLost, NotReady, Overloaded, TimedOut, TroupeError
from troupe.protocol.messages import Abort, EndSession, Generate, Generated, Routes

_SESSIONS_KEPT = 65_536


def _fair(load: int, least: int) -> bool:
    """Whether a replica with `load` requests of this process in flight may get one more while another has `least`."""
    return load <= 1.25 * least + 2


class Router:
    """The replica of the group, or the least loaded; sessions stick."""

    def __init__(self, context: Context, generate_s: float = 120.0, patience_s: float = 120.0) -> None:
        self._context = context
        self._generate_s, self._patience_s = generate_s, patience_s
        self._names: list[str] = []
        self._load: Counter[str] = Counter()
        self._home: dict[str, str] = {}
        self._changed = asyncio.Event()
        self._aborting: set[asyncio.Task[None]] = set()
        self.reissued = 0

    def set_routes(self, routes: Routes) -> None:
        """Replaces the list of replicas that take work."""
        self._names = list(routes.generators)
        self._changed.set()
        self._changed = asyncio.Event()

    async def generate(self, request: Generate, turns: Turns | None = None) -> Generated:
        """Samples on some replica. Raises TimedOut when none answered in time. turns: to whose waits is added."""
        clock = self._context.clock
        deadline = clock.now() + self._patience_s
        reason, tried = "no generator has proved its weights yet", False
        said: list[Generated] = []  # by replicas that cut the turn short
        cut_by = ""
        full: set[str] = set()
        while True:
            name = self._choose(request.session, request.group, full)
            if clock.now() >= deadline and (tried or name is None):
                raise TimedOut(f"no generator took '{request.request}' for {self._patience_s:g} s: {reason}")
            if name is None:
                began = clock.now()
                try:
                    await self._wait(0.2 if full else 1.0)
                finally:
                    if turns is not None and not full:
                        turns.waited, turns.reason = turns.waited + clock.now() - began, reason
                full.clear()
                continue
            tried, issued = True, clock.now()
            self._load[name] += 1
            try:
                generator = self._context.ref(name, Generator)
                made = await within(self._generate_s, f"{name}.generate", generator.generate(_rest(request, said)))
                kept = len(made.tokens) > 0 and not request.sampling.stop
                if kept or made.finish != "abort":
                    said.append(made)
                if made.finish != "abort" or _length(said) >= request.sampling.max_tokens:
                    return _joined(said)
                reason = f"{name} cut '{request.request}' short"
                self.reissued += 1
                deadline = clock.now() + self._patience_s if kept else deadline + clock.now() - issued
                if kept or cut_by == name:
                    self._drop(name)
                cut_by = name  # perhaps to take new weights: then it holds the request until it has them
            except (asyncio.CancelledError, TimedOut):
                self._abort_soon(name, request.request)
                raise
            except (ActorLost, NotReady) as error:
                # Gone, or a replacement that has proved nothing yet: it comes back with the next routes.
                reason = str(error)
                deadline += clock.now() - issued
                self._drop(name)
                self.reissued += 1
            except Overloaded as error:
                reason = str(error)
                full.add(name)
            finally:
                self._load[name] -= 1

    async def end_session(self, session: str) -> None:
        """Lets the replica forget the session's cache; a replica that is gone has forgotten it already."""
        name = self._home.pop(session, None)
        if name in self._names:
            with contextlib.suppress(TroupeError):  # gone, or a new one that never knew it
                await within(10.0, f"{name}.end_session", self._context.ref(name, Generator).end_session(EndSession(session)))

    def _abort_soon(self, name: str, request: str) -> None:
        """Beside the caller, who is leaving."""
        task = asyncio.ensure_future(self._abort(name, request))
        self._aborting.add(task)
        task.add_done_callback(self._aborting.discard)

    async def _abort(self, name: str, request: str) -> None:
        with contextlib.suppress(TroupeError):  # a replica that is gone samples nothing
            await within(10.0, f"{name}.abort", self._context.ref(name, Generator).abort(Abort(request)))

    def _choose(self, session: str, group: int | None, full: set[str]) -> str | None:
        home = self._home.get(session)
        if home in self._names and home not in full:
            return home
        names = sorted((name for name in self._names if name not in full), key=lambda name: (len(name), name))
        if not names:
            return None
        name = min(names, key=lambda name: self._load[name])
        if group is not None:
            # Groups are numbered, so they come to all replicas alike, and every process makes the same choice.
            theirs = names[group % len(names)]
            name = theirs if _fair(self._load[theirs], self._load[name]) else name
        if len(self._home) >= _SESSIONS_KEPT:
            self._home.pop(next(iter(self._home)))
        self._home[session] = name
        return name

    def _drop(self, name: str) -> None:
        if name in self._names:
            self._names.remove(name)

    async def _wait(self, seconds: float) -> None:
        try:
            await asyncio.wait_for(self._changed.wait(), seconds)
        except TimeoutError:
            return


class Turns:
    """One episode's way to the replicas: sums up for how many seconds none took its turns, and why the last did not."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self.waited, self.reason = 0.0, ""

    async def generate(self, request: Generate) -> Generated:
        """See `Router.generate`."""
        return await self._router.generate(request, self)


def _rest(request: Generate, said: list[Generated]) -> Generate:
    """What is left of the turn after what was `said` of it."""
    if not said:
        return request
    prompt = np.concatenate([request.prompt, *(part.tokens for part in said)])
    left = replace(request.sampling, max_tokens=request.sampling.max_tokens - _length(said))
    return replace(request, prompt=prompt, sampling=left)


def _joined(said: list[Generated]) -> Generated:
    """The parts of a turn as one. One that was cut just when it was full has ended by its length."""
    if len(said) == 1 and said[0].finish != "abort":
        return said[0]
    return Generated(
        np.concatenate([part.tokens for part in said]),
        np.concatenate([part.logprobs for part in said]),
        np.concatenate([part.versions for part in said]),
        "length" if said[-1].finish == "abort" else said[-1].finish,
        said[-1].generator,
    )


def _length(said: list[Generated]) -> int:
    return sum(len(part.tokens) for part in said)
