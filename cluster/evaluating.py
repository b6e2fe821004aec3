"""`troupe eval`: plays tasks with a policy that stays as it is, on a Ray of its own, and says what came of each.

Owns the processes of an evaluation and the folder of its trajectories. Promises:
- the company of a training run plays, without its learner: the same loop, recorder, limits, retries and failures; weights
  are proved by checksum before a token is sampled (law 4);
- an outcome depends on the policy, the task and its place, the trial, the sampling settings and the seed;
- nothing is written into the run's own trajectories (law 8); an evaluation that does not come to its end, for an error or
  Ctrl-C, leaves no process and no folder behind;
- it ends, or goes on: when no episode has ended for longer than an episode may take, it is given up.
"""

from __future__ import annotations

import asyncio
import contextlib
import shutil
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import pyarrow.compute as pc

from troupe.actors.company import Company, Parts
from troupe.actors.context import Context, within
from troupe.actors.director import limits_of
from troupe.actors.dispatcher import Dispatcher
from troupe.actors.ledger import Ledger
from troupe.actors.settings import RunConfig
from troupe.cluster import config as recipes
from troupe.cluster import launch
from troupe.learner.config import ModelConfig
from troupe.protocol import stored
from troupe.protocol.errors import ActorLost, NotReady, TimedOut, TroupeError
from troupe.protocol.messages import DispatcherStatus, Evaluate, Limits, Ping, Sampling, Weights
from troupe.protocol.trajectory import Task
from troupe.serve.checkpoints import Checkpoint

_ASKED = 8
"""Times that an evaluation is begun anew because the dispatcher died."""
_LOOK_S = 0.5
_LONGEST_S = 24 * 3600.0
_SLACK_S = 300.0
"""Seconds beyond an episode's own in which none need end: actors that are replaced, retries that wait."""
_UNLIMITED = 2**31

Show = Callable[[int, list[str]], None]
"""Told how many episodes have ended, and what has happened since the last time."""


@dataclass(frozen=True, slots=True)
class Policy:
    """What is evaluated. checkpoint: None for a model as it is. folder: of its tokenizer and architecture."""

    model: ModelConfig
    folder: Path
    checkpoint: Checkpoint | None = None
    run: Path | None = None

    @property
    def version(self) -> int:
        """Weight version; 0 for a model as it is."""
        return self.checkpoint.version if self.checkpoint else 0

    @property
    def weights(self) -> Path:
        """Where its weights lie."""
        return self.checkpoint.path if self.checkpoint else self.folder


@dataclass(slots=True)
class Plan:
    """An evaluation. folder: where its trajectories will lie; it is made."""

    folder: Path
    config: RunConfig
    policy: Policy
    tasks: list[Task]
    trials: int
    sampling: Sampling
    seed: int

    @property
    def episodes(self) -> int:
        """Tasks × trials."""
        return len(self.tasks) * self.trials


@dataclass(slots=True)
class Episode:
    """How one ended. success: None if it broke; then `failure` says how, and the rest is of no account."""

    task: str
    trial: int
    success: bool | None
    reward: float
    turns: int
    tokens: int
    failure: str = ""


def prepared(config: RunConfig, policy: Policy) -> RunConfig:
    """The recipe as an evaluation runs it: of the policy as it is, with nothing trained and no task given up for the others'
    failures. Raises ConfigError for what would only come to light once the actors are started."""
    config = config.model_copy(deep=True)
    config.model.path = str(policy.folder)
    config.learner.device = "cpu"
    launch.check(config)
    config.steps = 0
    config.rollout.quarantine_after = _UNLIMITED
    return config


def evaluate(plan: Plan, show: Show) -> tuple[str, list[Episode]]:
    """Plays every task of `plan`; returns the checksum of the weights and the episodes in the order of tasks × trials.
    Raises KeyboardInterrupt when the user stops it."""
    from troupe.actors.factories import make_engine
    from troupe.actors.host import RayContext

    plan.folder.mkdir(parents=True)
    try:
        recipes.write(plan.config, plan.folder / "config.toml")
        checksum, tensors = _weights(plan.policy, plan.config.seed)
        settings, namespace = plan.config.generator, f"troupe-eval-{plan.folder.name}"
        make = partial(make_engine, settings=settings, model=plan.policy.model, seed=plan.config.seed, steady=True)
        with launch.ray_session(None, namespace):
            launch.place(plan.config)
            context = RayContext.launch(namespace, plan.config.seed)
            parts = Parts(str(plan.policy.folder), make)
            return checksum, asyncio.run(_interruptible(lead(context, plan, parts, checksum, tensors, show)))
    except BaseException:
        shutil.rmtree(plan.folder, ignore_errors=True)
        with contextlib.suppress(OSError):  # other evaluations lie there
            plan.folder.parent.rmdir()
        raise


def _weights(policy: Policy, seed: int) -> tuple[str, dict[str, Any]]:
    """(checksum, tensors) of the policy. Raises CheckpointError for a damaged checkpoint, ConfigError for no model."""
    from transformers.utils import logging

    from troupe.cluster.serving import read_weights

    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    if policy.checkpoint is not None:
        return read_weights(str(policy.checkpoint.path), policy.model, seed)
    from troupe.learner.model import load, tensors_of
    from troupe.protocol.checksum import checksum_of

    tensors = tensors_of(load(policy.model, seed=seed))
    return checksum_of(tensors), tensors


async def _interruptible(work: Any) -> Any:
    """The result of `work`, unless Ctrl-C or SIGTERM comes first: then it is cancelled, and KeyboardInterrupt raised."""
    async with launch.interruptible() as interrupted:
        task, waiter = asyncio.ensure_future(work), asyncio.ensure_future(interrupted.wait())
        try:
            await asyncio.wait({task, waiter}, return_when=asyncio.FIRST_COMPLETED)
            if not task.done():
                task.cancel()
                await asyncio.wait({task})
                raise KeyboardInterrupt
            return task.result()
        finally:
            waiter.cancel()


async def lead(
    context: Context, plan: Plan, parts: Parts, checksum: str, tensors: Mapping[str, Any], show: Show = lambda done, said: None
) -> list[Episode]:
    """Gathers a company, gives it the weights, lets it play `plan` and ends it, whatever happens."""
    limits = limits_of(plan.config)
    ledger = Ledger(str(plan.folder), context.clock)
    company = Company(context, plan.config, parts, limits, ledger)

    async def play() -> str:
        await company.gather()
        await company.publish(Weights(plan.policy.version, checksum, context.blobs.put(dict(tensors))))
        return await _play(context, plan, limits, ledger, show)

    work = asyncio.ensure_future(play())
    try:
        waiting: list[asyncio.Future[Any]] = [work, company.broken]
        await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
        if company.broken.done():
            await company.broken
        return _episodes(plan, await work)
    finally:
        work.cancel()
        await asyncio.gather(work, return_exceptions=True)
        await company.close()
        ledger.close()


async def _play(context: Context, plan: Plan, limits: Limits, ledger: Ledger, show: Show) -> str:
    """Has the dispatcher play `plan`, and returns the name under which the episodes are stored."""
    dispatcher = context.ref("dispatcher", Dispatcher)
    for asked in range(_ASKED):
        name = f"e{plan.policy.version:06d}" + f"r{asked}" * bool(asked)
        ask = Evaluate(name, plan.policy.version, plan.tasks, plan.trials, plan.sampling, limits, plan.seed)
        work = asyncio.ensure_future(within(_LONGEST_S, "dispatcher.evaluate", dispatcher.evaluate(ask)))
        try:
            await _follow(context, dispatcher, work, limits.episode_s + _SLACK_S, ledger, show)
            await work
            return name
        except (ActorLost, NotReady):
            await asyncio.sleep(1.0)  # the company is replacing it
        finally:
            work.cancel()
    raise TroupeError(f"the dispatcher died {_ASKED} times: the evaluation is given up")


async def _follow(
    context: Context, dispatcher: Dispatcher, work: asyncio.Future[Any], patience_s: float, ledger: Ledger, show: Show
) -> None:
    """Shows how far it is until `work` has ended. Raises TimedOut if nothing has ended for `patience_s`."""
    before: DispatcherStatus | None = None
    latest: object = None
    deadline = context.clock.now() + patience_s
    seen = 0
    heard: Counter[str] = Counter()
    while not work.done():
        status = await within(60.0, "dispatcher.status", dispatcher.status(Ping()))
        before = before or status
        ended = [getattr(status, key) - getattr(before, key) for key in ("completed", "failed", "cancelled")]
        told = Counter(status.events)
        said = [*ledger.events_since(seen), *(told - heard).elements()]
        seen, heard = ledger.events_total, told
        show(sum(ended), said)
        if (*ended, status.tokens, status.retried) != latest:
            latest, deadline = (*ended, status.tokens, status.retried), context.clock.now() + patience_s
        if context.clock.now() > deadline:
            raise TimedOut(f"no episode has ended for {patience_s:g} s, {status.in_flight} are in flight; last: {said}")
        await asyncio.wait({work}, timeout=_LOOK_S)


def _episodes(plan: Plan, name: str) -> list[Episode]:
    """What the store holds of the evaluation called `name`. Raises TroupeError if that is not every episode once."""
    table = stored.committed(plan.folder / "trajectories")
    table = table.filter(pc.starts_with(table["id"], f"{name}."))
    columns = ("task_id", "member", "status", "success", "reward", "turns", "policy_tokens", "failure_kind", "failure_message")
    found: dict[tuple[str, int], Episode] = {}
    for task, trial, status, success, reward, turns, tokens, kind, message in zip(
        *(table[column].to_pylist() for column in columns), strict=True
    ):
        good = status == "completed"
        failure = "" if good else f"{kind or status}: {message or 'it was given up'}"
        found[task, trial] = Episode(task, trial, bool(success) if good else None, reward, turns, tokens, failure)
    wanted = [(task.id, trial) for task in plan.tasks for trial in range(plan.trials)]
    if sorted(wanted) != sorted(found) or table.num_rows != len(wanted):
        raise TroupeError(f"the store holds {table.num_rows} of {len(wanted)} episodes of the evaluation")
    return [found[key] for key in wanted]
