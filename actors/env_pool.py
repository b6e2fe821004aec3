"""Where episodes happen: many live worlds, each beside the agent loop that acts in it.

Owns its worlds and the trajectories that grow in it. Promises:
- `run_episode` returns exactly one `EpisodeDone` for an attempt; the finished trajectory has been offered to the store
  once before it does (law 3);
- an episode that broke is deposited as failed, with where and why, and carries no success (law 6);
- an episode that ran out of time because no generator took its turns is not broken: it ends as cancelled, to be moved;
- an episode that had succeeded when time ran out keeps its reward; what goes wrong afterwards does not take it back;
- a world that does not return is given up at its wall clock and its slot is free again. A thread that Python cannot end
  stays behind: with too many of them the pool takes no more episodes, finishes those it has, and lets itself be replaced;
- an async or inline world that never gives the event loop back ends the pool by name, so that it is replaced;
- an episode that forks from a sibling begins with what that one did, or breaks (see `tree.py`);
- worlds are closed whatever happens (law 9);
- a pool that is drained takes no more episodes and finishes those it has.
"""

from __future__ import annotations

import asyncio
import json
import math
import os
import random
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import numpy as np

from troupe.actors import loops, rehearsal, rendering
from troupe.actors.context import Context, within
from troupe.actors.loops.base import Outcome, Stage
from troupe.actors.patience import patiently
from troupe.actors.recorder import Recorder
from troupe.actors.router import Router, Turns
from troupe.actors.settings import AgentSettings
from troupe.actors.store import Store
from troupe.actors.tree import Forking
from troupe.envs import registry
from troupe.envs.base import TextWorld, ToolCall
from troupe.envs.calls import stuck
from troupe.envs.drive import Driver
from troupe.envs.returned import told
from troupe.protocol.errors import EnvironmentFailed, EpisodeError, NotReady, Overloaded, TaskFailed, TimedOut, TroupeError
from troupe.protocol.latency import Histogram, Latencies, copied
from troupe.protocol.messages import (
    Ack,
    CancelEpisode,
    Demonstrate,
    Demonstrations,
    Deposit,
    Drain,
    EpisodeDone,
    Generate,
    Generated,
    GetDeposit,
    GetSpans,
    Health,
    Limits,
    Ping,
    Rehearse,
    Rehearsed,
    Routes,
    RunEpisode,
    Sampling,
    Spans,
)
from troupe.protocol.spans import InFlight, SpanLog
from troupe.protocol.trajectory import Failure, StopReason, Trajectory, samples_of

_FAILURES = 3
"""Demonstrations that break before the first good one until the world is called broken."""
_LOOP_GRACE_S = 10.0
"""Seconds beyond a world's own limit that the event loop may stand still."""
_UNLIMITED = 2**31
_WAITED = 0.25
"""Share of its time for which no generator took an episode's turns, from which on it is not to blame for being too late."""
_STUCK = 0.25
"""Share of the slots whose worlds may be stuck in threads that cannot be ended, until the pool is replaced."""


class EnvPool:
    """A process's worth of environments."""

    def __init__(
        self,
        context: Context,
        world: str,
        options: dict[str, Any],
        model_folder: str,
        slots: int,
        generate_s: float = 120.0,
        agent: AgentSettings | None = None,
        renderer: str = "auto",
        env_step_s: float = 30.0,
    ) -> None:
        self._context = context
        self._world = registry.find(world)
        self._options = options
        self._rendering = rendering.load(model_folder, renderer)
        self._window = rendering.context_window(model_folder)
        self._router = Router(context, generate_s, patience_s=math.inf)  # each episode has its own limit
        self._store = context.ref("store", Store)
        self._loop = loops.choose(agent or AgentSettings(), self._world)
        self._running: set[tuple[str, int]] = set()
        self._playing: dict[tuple[str, int], asyncio.Task[None]] = {}  # what of them can be cancelled: not their deposit
        self._slots = slots
        self._env_step_s = env_step_s
        self._draining = False
        self._born, self._lag = context.clock.now(), 0.0
        calls = {call: Histogram() for call in ("reset", "step", "verify", "close")}
        self._latency: Latencies = {self._world.name or self._world.__name__: calls}
        self._timed: Callable[[str, float], None] = lambda call, seconds: calls[call].record(seconds)
        self._log = SpanLog(context.clock.now)
        self._episodes = InFlight(self._log, "playing", "running episodes")
        self._late = ""
        """What went wrong last after an episode was over: a world that could not be closed."""

    async def start(self) -> None:
        """Sees to it that a world which never gives the event loop back ends this pool, not the run."""
        self._context.watch_loop(self._env_step_s + _LOOP_GRACE_S, self._hear_lag)

    async def routes(self, message: Routes) -> Ack:
        """Which generators take work now."""
        self._router.set_routes(message)
        return Ack()

    async def run_episode(self, message: RunEpisode) -> EpisodeDone:
        """Runs one attempt to its end. Raises Overloaded when all slots are taken, NotReady when the pool is to go."""
        key = (message.episode, message.attempt)
        if self._draining:
            raise NotReady(f"{self._context.name} takes no more episodes: it is being drained")
        if self._worn_out():
            raise NotReady(f"{self._context.name} takes no more episodes: {stuck()} of its worlds do not return")
        if len(self._running) >= 2 * self._slots:
            raise Overloaded(f"{self._context.name} runs {len(self._running)} episodes and has {self._slots} slots")
        if key in self._running:
            raise Overloaded(f"{self._context.name} runs attempt {message.attempt} of {message.episode} already")
        self._running.add(key)
        try:
            with self._episodes:
                return await self._episode(message)
        finally:
            self._running.discard(key)
            if self._worn_out() and not self._running:
                self._context.die(f"{stuck()} worlds of '{self._world.__name__}' do not return and cannot be ended")

    async def cancel(self, message: CancelEpisode) -> Ack:
        """Ends an attempt, or with an empty name everything; what it had is deposited as cancelled."""
        for (episode, attempt), task in list(self._playing.items()):
            if message.episode in ("", episode) and attempt <= message.attempt:
                task.cancel()
        return Ack()

    async def drain(self, message: Drain) -> Health:
        """Takes no more episodes from now on; how many are left is the load."""
        self._draining = True
        if message.now:
            await self.cancel(CancelEpisode("", _UNLIMITED))
        return await self.health(Ping())

    async def demonstrate(self, message: Demonstrate) -> Demonstrations:
        """Lets the scripted player speak in the policy's place: the same loop, the same recorder, and what it said is what
        is supervised. A demonstration of several branches (thoughts that the renderer drops) is several sequences."""
        rng = random.Random(message.seed)
        shown = Demonstrations([], [], 0.0)
        played = wins = 0
        for number, task in enumerate(message.tasks):
            if number % 16 == 0:
                await asyncio.sleep(0)
            driver = self._driver(message.env_step_s)
            limits = Limits(max_turns=message.max_turns, max_episode_tokens=_UNLIMITED, env_step_s=message.env_step_s)
            episode = RunEpisode(f"demonstration-{number}", 0, 0, number, "train", 0, task, Sampling(), limits, 0)
            teacher = _Teacher(driver, self._world, self._rendering, rng, message.noise)
            recorder, outcome = Recorder(episode, self._rendering, teacher), Outcome()
            try:
                stage = Stage(driver, self._world.system, task, recorder, limits, outcome)
                await within(message.episode_s, f"{self._context.name}: the demonstration of {task.id}", self._loop(stage))
            except (EnvironmentFailed, TimedOut) as error:
                shown.broken = str(error)  # a demonstration that broke is left out; the others still teach
                if number + 1 - played >= _FAILURES and not played:
                    raise  # it is not chance
                continue
            finally:
                await self._close(driver)
            played += 1
            wins += bool(outcome.success)
            for sample in samples_of(recorder.nodes):
                shown.tokens.append(sample.tokens)
                shown.supervised.append(sample.mask.astype(np.int32))
        shown.success = wins / max(1, played)
        return shown

    async def rehearse(self, message: Rehearse) -> Rehearsed:
        """An episode without a model and without a record: for measuring a world. What breaks it is an answer too."""
        limits, done = message.limits, Rehearsed()
        driver = self._driver(limits.env_step_s)
        try:
            try:
                what = f"{self._context.name}: the episode"
                await within(limits.episode_s, what, rehearsal.play(driver, message.task, message.seed, limits.max_turns, done))
            finally:
                await self._close(driver)
        except (EpisodeError, TimedOut) as error:
            done.failure = str(error)
        return done

    async def health(self, message: Ping) -> Health:
        """Load is the number of live episodes."""
        return Health(
            self._context.name,
            os.getpid(),
            load=len(self._running),
            busy=len(self._running) / self._slots,
            detail={"slots": self._slots, "reissued": self._router.reissued, "stuck": stuck(), "late": self._late},
            latency=copied(self._latency),
            born=self._born,
            lag=self._lag,
        )

    async def spans(self, message: GetSpans) -> Spans:
        """Which episodes ran when; of the totals, the parts of an episode are sums over "episodes" of them."""
        self._episodes.cut()
        return self._log.told(self._context.name, message)

    # -- one episode -------------------------------------------------------------------------------------------------

    async def _episode(self, message: RunEpisode) -> EpisodeDone:
        clock = self._context.clock
        outcome = Outcome()
        turns = Turns(self._router)
        policy = Forking(turns, outcome.steps)
        recorder = Recorder(message, self._rendering, policy, self._window)
        failure: Failure | None = None
        started = clock.now()
        spent: defaultdict[str, float] = defaultdict(float)
        cancelled, waited = False, ""
        try:
            driver = self._driver(message.limits.env_step_s, spent)
            stage = Stage(driver, self._world.system, message.task, recorder, message.limits, outcome)
            try:
                what = f"{self._context.name}: the episode {message.episode}"

                async def play() -> None:  # made only once it runs: it may be cancelled before
                    await within(message.limits.episode_s, what, self._play(stage, policy, message))

                playing = asyncio.ensure_future(play())
                self._playing[(message.episode, message.attempt)] = playing
                await playing
                if not any(len(node.logprobs) for node in recorder.nodes):
                    raise TaskFailed(f"nothing was sampled (stop reason '{outcome.stop}'): there is no agent to judge or train")
                if not math.isfinite(outcome.reward):
                    raise EnvironmentFailed(f"the reward is {outcome.reward}")
            finally:
                self._playing.pop((message.episode, message.attempt), None)
                await self._close(driver)
        except asyncio.CancelledError:
            cancelled = True
        except Exception as error:
            if isinstance(error, TimedOut) and outcome.success:
                outcome.stop = "wall_clock"
            elif clock.now() - started > 0.99 * (limit := message.limits.episode_s) and turns.waited >= _WAITED * limit:
                cancelled = True
                waited = f"no generator took its turns for {turns.waited:.3g} of {limit:g} s: {turns.reason}"
            else:
                failure = self._classify(error, message)
                outcome.stop = "wall_clock" if isinstance(error, TimedOut) else "failed"
        status: Any = "cancelled" if cancelled else "failed" if failure else "completed"
        stop: StopReason = "cancelled" if cancelled else outcome.stop
        trajectory = Trajectory(
            id=message.episode,
            attempt=message.attempt,
            group=message.group,
            member=message.member,
            kind=message.kind,
            step=message.step,
            task=message.task,
            status=status,
            stop=stop,
            nodes=recorder.nodes,
            steps=outcome.steps,
            reward=outcome.reward if status == "completed" else 0.0,
            success=outcome.success if status == "completed" else None,
            failure=failure,
            sampling={
                "temperature": message.sampling.temperature,
                "top_p": message.sampling.top_p,
                "top_k": message.sampling.top_k,
                "max_tokens": message.sampling.max_tokens,
                "stop": message.sampling.stop,
            },
            pool=self._context.name,
            seed=message.seed,
            started_at=started,
            seconds=clock.now() - started,
            fork=policy.fork,
        )
        ended = clock.now()
        receipt = await patiently(self._context, "store.deposit", lambda: self._store.deposit(Deposit(trajectory)), each_s=30.0)
        self._note(trajectory, spent, clock.now() - ended)
        await self._router.end_session(f"{message.episode}/{message.attempt}")
        return EpisodeDone(
            episode=message.episode,
            attempt=message.attempt,
            status=status,
            stop=stop,
            stored=receipt.accepted,
            pool=self._context.name,
            reward=trajectory.reward,
            success=trajectory.success,
            turns=len(trajectory.steps),
            tokens=trajectory.sampled_tokens,
            oldest_version=trajectory.versions[0],
            failure_kind=failure.kind if failure else "",
            failure=failure.message if failure else receipt.reason or waited,
        )

    def _note(self, trajectory: Trajectory, spent: defaultdict[str, float], storing: float) -> None:
        """Where the time of an episode went. Calls that ran at the same time count each."""
        verifying = spent.pop("verify", 0.0)
        parts = {
            "generating": sum(step.generate_s for step in trajectory.steps),
            "world": sum(spent.values()),
            "verifying": verifying,
            "storing": storing,
        }
        for name, seconds in parts.items():
            self._log.tally(name, seconds)
        self._log.tally("episodes", 1.0)
        labels: dict[str, Any] = {f"{name}_s": round(seconds, 4) for name, seconds in parts.items()}
        labels |= {"id": f"{trajectory.id}/{trajectory.attempt}", "kind": trajectory.kind, "step": trajectory.step}
        labels |= {"status": trajectory.status, "turns": len(trajectory.steps)}
        began = trajectory.started_at
        self._log.add("episode", began, began + trajectory.seconds + storing, beside=True, **labels)

    async def _close(self, driver: Driver) -> None:
        """Releases the world. What it breaks now comes too late to change the episode: it is told in `health`."""
        try:
            await driver.close()
        except (EpisodeError, TimedOut) as error:
            self._late = str(error)

    def _worn_out(self) -> bool:
        return stuck() > _STUCK * self._slots

    def _driver(self, seconds: float, spent: defaultdict[str, float] | None = None) -> Driver:
        """Drives a new world. spent: to which the seconds of its calls are added."""
        world = registry.make(self._world, self._options)
        context = self._context

        def timed(call: str, seconds: float) -> None:
            self._timed(call, seconds)
            if spent is not None:
                spent[call] += seconds

        return Driver(world, executor=context.executor, timeout_s=seconds, timed=timed, clock=context.clock.now)

    def _hear_lag(self, seconds: float) -> None:
        self._lag = seconds

    async def _play(self, stage: Stage, policy: Forking, message: RunEpisode) -> None:
        if sibling := message.sibling:
            asked = GetDeposit(sibling.episode, sibling.attempt)
            found = await patiently(self._context, "store.deposited", lambda: self._store.deposited(asked), each_s=30.0)
            # A store that has lost the sibling will not commit this group: it runs again as a whole, whatever is done here.
            if found.trajectory is not None:
                policy.begin_with(found.trajectory, sibling.segment, message.seed)
        await self._loop(stage)

    def _classify(self, error: Exception, message: RunEpisode) -> Failure:
        """Decided here, where the error is known: what the world says about its task, and all else is infrastructure."""
        kind = error.kind if isinstance(error, EpisodeError) else "infrastructure"
        where = f"{self._context.name}: {self._world.__name__} (task {message.task.id}, seed {message.task.seed})"
        text = told(error) if isinstance(error, TroupeError) else f"{type(error).__name__}: {told(error)}"
        return Failure(kind, type(error).__name__, text, where)


class _Teacher:
    """The world's scripted player, speaking as an engine does."""

    def __init__(
        self, driver: Driver, world: type[TextWorld], rendering: rendering.Rendering, rng: random.Random, noise: float
    ) -> None:
        self._driver, self._world, self._rendering, self._rng, self._noise = driver, world, rendering, rng, noise

    async def generate(self, request: Generate) -> Generated:
        """Raises EpisodeError if the world has no player."""
        said = self._driver.play(self._rng, self._noise)
        if said is None:
            raise EpisodeError(f"world '{self._world.name}' has no scripted player: set cold_start.steps = 0 or define play()")
        ids = np.asarray(self._rendering.speech(_message(said)), np.int32)
        return Generated(ids, np.zeros(len(ids), np.float32), np.full(len(ids), -1, np.int32), "stop", "teacher")


def _message(said: str | ToolCall) -> rendering.Message:
    """What the scripted player does, as a message of the agent."""
    if isinstance(said, str):
        return {"role": "assistant", "content": said}
    function = {"name": said.name, "arguments": json.dumps(said.arguments)}
    return {"role": "assistant", "content": "", "tool_calls": [{"id": "call_0", "type": "function", "function": function}]}
