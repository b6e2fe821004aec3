"""The run itself, from the cold start to the last evaluation: the whole algorithm can be read in `_lead`.

Owns the step counter. Promises:
- step k trains on batch k and makes version k; a version is announced only when it is proved (`company.publish`), and with
  "one-step-off" only when batch k + 1 is there;
- a learner that was lost comes back at its newest checkpoint, and the steps since then are replayed from the store;
- whatever ends the run (its end, `stop`, an error, Ctrl-C), its children end with it and the run folder resumes.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections import Counter, deque
from importlib import metadata
from typing import Any

from troupe.actors.company import Company, Parts
from troupe.actors.context import Context, within
from troupe.actors.dispatcher import BIAS, Dispatcher
from troupe.actors.env_pool import EnvPool
from troupe.actors.evaluator import Evaluator
from troupe.actors.groups import INDICES_OF_A_SEED
from troupe.actors.learner import Learner
from troupe.actors.ledger import Ledger
from troupe.actors.patience import while_it_moves
from troupe.actors.pool_load import columns, since, told
from troupe.actors.settings import RunConfig
from troupe.actors.store import Store
from troupe.actors.timeline import Timeline
from troupe.actors.watch import Watch
from troupe.envs import registry
from troupe.protocol import latency
from troupe.protocol.errors import ActorLost, EnvironmentFailed, NotReady
from troupe.protocol.messages import (
    Ack,
    Batch,
    ColdStart,
    Demonstrate,
    Demonstrations,
    DispatcherStatus,
    EvaluateVersion,
    GetBatch,
    GetStatus,
    GetWeights,
    Health,
    Limits,
    Ping,
    RunStatus,
    SaveCheckpoint,
    Scale,
    Stop,
    Train,
    Trained,
    Weights,
)
from troupe.protocol.trajectory import Task

_LONGEST_S = 24 * 3600.0
"""Seconds that one thing may take of which nobody hears how far it is: a training step, one of the cold start, a checkpoint."""
_NOBODY_S = 30.0
"""Seconds without a generator that could sample, until new weights no longer wait for the batch of the next step."""
_SHOWN_AT_ONCE = 32
_DEMONSTRATIONS = 9_000_000_000
"""Demonstrations use task indices from here on; training groups stay below."""


class Director:
    """Leads one run."""

    def __init__(self, context: Context, config: RunConfig, folder: str, parts: Parts) -> None:
        self._context, self._config = context, config
        self._world = registry.find(config.env.name)
        self._ledger = Ledger(folder, context.clock)
        self._timeline = Timeline(context, self._ledger.path("timeline.json"), self._ledger.seconds_before)
        self._timing = self._timeline.own
        self._watch = Watch(config, self._ledger, self._ledger.say)
        self._limits = limits_of(config)
        self._parts = parts
        self._company: Company | None = None
        self._learner = context.ref("learner", Learner)
        self._store = context.ref("store", Store)
        self._dispatcher = context.ref("dispatcher", Dispatcher)
        self._evaluator = context.ref("evaluator", Evaluator)
        self._step = 0
        self._phase = "starting"
        self._progress = 0.0
        self._loss = 0.0
        self._weights: Weights | None = None
        self._counts: DispatcherStatus | None = None
        self._heard: Counter[str] | None = None
        self._latency: latency.Latencies = {}
        self._scalings = 0
        self._stop = asyncio.Event()
        self._finished = False

    # -- messages ----------------------------------------------------------------------------------------------------

    async def run(self) -> Ack:
        """Leads the run to its end. Raises what broke it."""
        self._company = Company(self._context, self._config, self._parts, self._limits, self._ledger)
        lead = asyncio.ensure_future(self._lead(self._company))
        stop = asyncio.ensure_future(self._stop.wait())
        work: list[asyncio.Future[None]] = [lead, self._company.broken]
        try:
            waiting: list[asyncio.Future[Any]] = [*work, stop]
            await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
            for done in work:
                if done.done():
                    await done
            if not lead.done():
                self._ledger.say("stopping; the run folder can be resumed")
        except Exception as error:
            self._ledger.note("failed", reason=str(error))
            raise
        finally:
            lead.cancel()
            stop.cancel()
            await asyncio.gather(lead, stop, return_exceptions=True)
            await self._company.close()
            self._ledger.close()
        return Ack()

    async def stop(self, message: Stop) -> Ack:
        """Ends `run` now; what is durable stays."""
        self._ledger.note("stop", reason=message.reason)
        self._stop.set()
        return Ack()

    async def scale(self, message: Scale) -> Ack:
        """Changes the number of environment pools or generators while the run goes on."""
        if self._company is None:
            raise NotReady("the run has not begun to start its actors: scale it when they live")
        await self._company.scale(message)
        return Ack()

    async def status(self, message: GetStatus) -> RunStatus:
        """What the terminal shows."""
        metrics = dict(self._ledger.metrics)
        if self._phase == "cold start":
            metrics["cold_start_loss"] = self._loss
        return RunStatus(
            phase=self._phase,
            step=self._step,
            steps=self._config.steps,
            version=self._company.version if self._company else -1,
            progress=self._progress,
            metrics=metrics,
            history=list(self._ledger.history),
            actors=self._company.roll_call() if self._company else {},
            events=self._ledger.events_since(message.since),
            events_total=self._ledger.events_total,
            finished=self._finished,
            health=self._watch.state,
        )

    async def health(self, message: Ping) -> Health:
        """Alive."""
        return Health(self._context.name, os.getpid())

    # -- the algorithm -----------------------------------------------------------------------------------------------

    async def _lead(self, company: Company) -> None:
        config, learner = self._config, self._learner
        made_by = {"device": config.learner.device, "torch": metadata.version("torch")}  # what a replay must have too
        self._ledger.note("resumed" if self._ledger.known() else "begun", pid=os.getpid(), **made_by)
        with self._timing.of("start actors"):
            await company.gather()
        while True:
            status = await company.patiently("learner.status", lambda: learner.status(Ping()))
            with contextlib.suppress(ActorLost, NotReady):  # a learner that is lost before its first checkpoint begins anew
                if not status.started:
                    await self._cold_start(company)
                if status.step == 0:
                    await self._checkpoint()
                break
        self._step = status.step
        self._ledger.resume_at(status.step)
        self._watch.look()
        await self._publish(company, await company.patiently("learner.weights", lambda: learner.weights(GetWeights())))
        if self._ledger.metrics.get("step", 0) < self._step:  # the director before died with the figures of this step
            await self._advance(company, self._step)
        if self._step == 0:
            await self._evaluate(company, "first")
        else:
            self._ledger.say(f"going on after step {self._step}")
        while self._step < config.steps:
            if config.eval.every and self._step and self._step % config.eval.every == 0:
                await self._evaluate(company, f"step {self._step}")  # here, as the director before may have died in it
            self._phase = "training"
            await self._advance(company, self._step + 1)
            restarted = self._watch.treatment(self._step)[1] is not None  # what it restarted from may be dropped at any save
            if (self._step % config.checkpoint_every == 0 or restarted) and self._step < config.steps:
                with contextlib.suppress(ActorLost, NotReady):  # a later one will do
                    await self._checkpoint()
        while await company.patiently("learner.save", self._checkpoint, _LONGEST_S) < config.steps:
            await self._train_and_publish(company, config.steps)
        await self._evaluate(company, "last")
        self._phase, self._finished = "finished", True
        await self._look(company)
        await self._summarise()
        self._ledger.note("finished", step=self._step)

    async def _advance(self, company: Company, step: int) -> None:
        """Trains `step`, publishes its weights and writes down what was measured."""
        began = self._context.clock.now()
        with self._timing.of("step", step=step):
            trained, count = await self._train_and_publish(company, step)
        self._step = trained.step
        took = self._context.clock.now() - began
        with self._timing.of("measure", step=step):
            await self._measure(company, trained, count, took)

    async def _cold_start(self, company: Company) -> None:
        """Supervised steps on what the scripted player shows."""
        settings = self._config.cold_start
        shown = Demonstrations([], [], 0.0)
        if settings.steps:
            self._phase = "demonstrations"
            with self._timing.of("demonstrations"):
                shown = await self._demonstrations(company)
            self._ledger.say(f"the scripted player showed {len(shown.tokens)} episodes, {shown.success:.0%} of them successful")
        self._phase = "cold start"
        message = ColdStart(shown, settings.steps, settings.batch)

        async def look() -> float:
            status = await within(30.0, "learner.status", self._learner.status(Ping()))
            self._progress, self._loss = status.progress, status.detail.get("cold_start_loss", 0.0)
            return status.progress

        with self._timing.of("cold start"):
            work, fix = self._learner.cold_start(message), "make its steps smaller (cold_start.batch)"
            trained = await while_it_moves(self._context, "learner.cold_start", work, look, _LONGEST_S, fix)
        self._ledger.note("cold_started", demonstrations=len(shown.tokens), shown_success=shown.success, **trained.metrics)

    async def _demonstrations(self, company: Company) -> Demonstrations:
        """What the scripted player shows, in the same order whichever pools live and die meanwhile."""
        settings, seed = self._config.cold_start, self._config.seed
        tasks, each_s = shown_tasks(self._config), self._limits.episode_s + self._limits.env_step_s
        parts = [
            Demonstrate(
                tasks[at : at + _SHOWN_AT_ONCE],
                settings.noise,
                self._limits.max_turns,
                seed * 1_000_000 + at,
                self._limits.env_step_s,
                self._limits.episode_s,
            )
            for at in range(0, len(tasks), _SHOWN_AT_ONCE)
        ]
        waiting = deque(enumerate(parts))
        shown: dict[int, Demonstrations] = {}

        async def ask(pool: str) -> None:
            while waiting:
                at, part = waiting.popleft()
                try:
                    work = self._context.ref(pool, EnvPool).demonstrate(part)
                    shown[at] = await within(each_s * len(part.tasks), f"{pool}.demonstrate", work)
                    self._progress = len(shown) / len(parts)
                except (ActorLost, NotReady):
                    waiting.append((at, part))
                    return  # the other pools, or the replacement, show it

        while len(shown) < len(parts):
            await asyncio.gather(*(ask(pool) for pool in company.pools()))
            await asyncio.sleep(0.0 if len(shown) == len(parts) else 0.5)
        ordered = [shown[at] for at in sorted(shown)]
        count = sum(len(s.tokens) for s in ordered)
        if not count:
            raise EnvironmentFailed(f"no demonstration could be played; the last broke: {ordered[-1].broken}")
        return Demonstrations(
            tokens=[t for s in ordered for t in s.tokens],
            supervised=[t for s in ordered for t in s.supervised],
            success=sum(s.success * len(s.tokens) for s in ordered) / count,
        )

    async def _batch(self, step: int) -> Batch:
        """The batch of `step`, whenever it is there."""
        with self._timing.of("wait for batch", step=step):
            while True:
                if (batch := await self._found(step)) is not None:
                    return batch

    async def _found(self, step: int) -> Batch | None:
        """The batch of `step`, if it is there within a second; if not, the dispatcher is heard."""
        ask = GetBatch(step, self._config.rollout.groups_per_step, wait_s=1.0)
        try:
            batch = await within(60.0, "store.batch", self._store.batch(ask))
            if batch.trajectories is not None:
                return batch
        except (ActorLost, NotReady):
            await asyncio.sleep(0.2)
        await self._hear()
        return None

    async def _meet(self, company: Company, step: int) -> None:
        """With "one-step-off" new weights wait for the batch of `step`, so that the version before samples all of it; unless
        nobody is left who holds that version, and perhaps nobody can any more, as its learner may have died."""
        if self._config.rollout.mode != "one-step-off" or step > self._config.steps:
            return
        clock = self._context.clock
        sampled = clock.now()
        with self._timing.of("wait for batch", step=step):
            while clock.now() < sampled + _NOBODY_S and await self._found(step) is None:
                if "proved" in company.roll_call().values():
                    sampled = clock.now()

    async def _train_and_publish(self, company: Company, step: int) -> tuple[Trained, int]:
        """Trains until the learner is at `step` and its weights have arrived; also says on how many trajectories. A learner
        that was lost comes back at its newest checkpoint: the steps since then are replayed from the store."""
        while True:
            try:
                status = await within(60.0, "learner.status", self._learner.status(Ping()))
                replay = min(status.step + 1, step)
                batch = await self._batch(replay)  # at each try: it is gone with the store that gave it
                message = Train(batch, *self._watch.treatment(replay))
                with self._timing.of("train", step=replay):
                    trained = await within(_LONGEST_S, "learner.train", self._learner.train(message))
                if trained.step == step:
                    await self._meet(company, trained.step + 1)
                    await self._publish(company, trained.weights)
                    return trained, batch.count
                self._ledger.say(f"the learner replayed step {trained.step} from the store")
            except (ActorLost, NotReady):
                await asyncio.sleep(0.5)  # the company is replacing it

    async def _publish(self, company: Company, weights: Weights) -> None:
        self._weights = weights
        with self._timing.of("sync weights", version=weights.version):
            await company.publish(weights)

    async def _evaluate(self, company: Company, label: str) -> None:
        if not self._config.eval.tasks:
            return
        self._phase = "evaluating"
        ask = EvaluateVersion(company.version)
        with self._timing.of("evaluate", version=company.version):
            score = await company.patiently("evaluator.evaluate", lambda: self._evaluator.evaluate(ask), seconds=_LONGEST_S)
        if score.success is None or score.low is None or score.high is None:
            self._ledger.say(f"{label} evaluation, version {score.version}: none of {score.failed} episodes could be scored")
        else:
            broken = f" ({score.failed} more broke)" if score.failed else ""
            self._ledger.say(
                f"{label} evaluation, version {score.version}: success {score.success:.3f} "
                f"[{score.low:.3f}, {score.high:.3f}] on {score.trials} held-out episodes{broken}"
            )
        await self._summarise()

    async def _checkpoint(self) -> int:
        """Lets the learner save its step, and returns which that was."""
        with self._timing.of("checkpoint"):
            saved = await within(_LONGEST_S, "learner.save", self._learner.save(SaveCheckpoint()))
        self._ledger.note("checkpoint", step=saved.step, path=os.path.relpath(saved.path, self._ledger.folder))
        return saved.step

    # -- what is measured --------------------------------------------------------------------------------------------

    async def _measure(self, company: Company, trained: Trained, count: int, took: float) -> None:
        self._timing.sample("staleness", trained.metrics.get("staleness_mean", 0.0))
        times, pools = await asyncio.gather(self._look(company), self._pools(company))
        states = company.roll_call()
        self._ledger.measure(
            trained.step,
            version=trained.weights.version,
            trajectories=count,
            seconds=took,
            sync_mb=trained.weights.size / 1e6,
            tokens_per_s=trained.metrics.get("policy_tokens", 0.0) / max(1e-9, took),
            actors_alive=sum(state != "dead" for state in states.values()),
            **times,
            **pools,
            **trained.metrics,
        )
        try:
            self._watch.look()
        finally:
            await self._summarise()

    async def _look(self, company: Company) -> dict[str, float]:
        """Where the time since the last look went."""
        names = ["learner", "store", *company.generators(), *company.pools(), *company.roster.draining()]
        return await self._timeline.look(names, self._counts)

    async def _pools(self, company: Company) -> dict[str, float]:
        """Of the environment pools since the step before: how many, how often that changed, how long their worlds take."""
        roster = company.roster
        await roster.load.look(company.pools())
        new, self._latency = since(roster.load.total, self._latency), latency.copied(roster.load.total)
        changed, self._scalings = roster.scalings - self._scalings, roster.scalings
        waiting = self._counts.waiting if self._counts else 0
        return {"pools": len(company.members("env-")), "pools_scaled": changed, "episodes_waiting": waiting, **columns(new)}

    async def _hear(self) -> None:
        """Passes on what the dispatcher has to say. Raises what broke it."""
        try:
            self._counts = await within(30.0, "dispatcher.status", self._dispatcher.status(Ping()))
        except (ActorLost, NotReady):
            return
        said = Counter(self._counts.events)
        if self._heard is None:  # what a director before has told of this dispatcher
            self._heard = Counter(self._ledger.said_since_start_of("dispatcher"))
        for sentence in (said - self._heard).elements():
            self._ledger.say(sentence)
        self._heard = said

    async def _summarise(self) -> None:
        await self._hear()
        weights = {
            "version": self._weights.version if self._weights else None,
            "checksum": self._weights.checksum if self._weights else None,
        }
        self._ledger.summarise(
            self._step,
            self._counts,
            weights,
            self._finished,
            name=self._config.name,
            on_failure=self._config.rollout.on_failure,
            bias=self._bias(),
            time=self._timeline.told(),
            env_latency=told(self._company.roster.load.total) if self._company else {},
        )

    def _bias(self) -> dict[str, str]:
        """What this run's policies do to the data that is trained on, in words."""
        rollout = self._config.rollout
        others = {"oversample": rollout.oversample > 0, "filter": rollout.filter != "none", "tree": rollout.tree > 0}
        applied = [rollout.on_failure, *(name for name, on in others.items() if on)]
        return {policy: BIAS[policy] for policy in applied}


def limits_of(config: RunConfig) -> Limits:
    """The limits of each episode. Raises ConfigError for a world that cannot be found."""
    rollout = config.rollout
    return Limits(
        max_turns=config.env.max_turns or registry.find(config.env.name).max_turns,
        max_episode_tokens=rollout.max_episode_tokens,
        context_window=rollout.context_window or 0,
        max_tool_calls=rollout.max_tool_calls,
        generate_s=rollout.generate_s,
        env_step_s=rollout.env_step_s,
        episode_s=rollout.episode_s,
    )


def shown_tasks(config: RunConfig) -> list[Task]:
    """The tasks that the scripted player shows in the cold start; none if there is none."""
    settings, first = config.cold_start, config.seed * INDICES_OF_A_SEED + _DEMONSTRATIONS
    world = registry.find(config.env.name)
    return [world.task("train", first + i) for i in range(settings.demonstrations if settings.steps else 0)]
