"""Law 10: nothing waits for ever, and a timeout names its culprit."""

from __future__ import annotations

import asyncio
import random
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.laws.conftest import SeededEngine
from tests.laws.rollouts import Run, every_seed
from troupe.actors import dispatcher as dispatching
from troupe.actors.company import Company
from troupe.actors.context import within
from troupe.actors.env_pool import EnvPool
from troupe.actors.learner import Learner
from troupe.actors.router import Router
from troupe.actors.simulated import Simulation, SimulationStuck
from troupe.actors.store import Store
from troupe.envs import calls
from troupe.envs.base import TextWorld, Turn
from troupe.protocol.errors import TimedOut
from troupe.protocol.messages import (
    Ack,
    EpisodeDone,
    Generate,
    Generated,
    Limits,
    Ping,
    Routes,
    RunEpisode,
    Sampling,
    Train,
    Trained,
    Weights,
)
from troupe.protocol.trajectory import Task


@every_seed
def test_whatever_goes_wrong_the_run_ends_and_nothing_grows_beyond_its_limit(run: Run) -> None:
    plot = run.plot
    assert run.seconds < 2_500.0, "somebody waited for the last resort"
    assert not run.broken or "too few survived" in run.broken
    # The dispatcher's permits are the slots; an attempt that it has given up may still be ending beside the next one.
    undisturbed = not plot.chaos.lose_reply and not plot.chaos.lose_request and not run.crashes
    assert run.most_in_flight <= plot.slots * (1 if undisturbed else 2)
    assert run.most_deposits <= 2 * plot.room
    for message in run.dispatched:
        retried = message.kind == "eval" or plot.settings.on_failure == "retry"
        allowed = plot.settings.attempts if retried else 1
        # What the store has lost with its life runs once more, after a record that took a number too.
        again = (allowed + 1) * (run.lives["store"] - 1) + len(plot.drains)  # or was moved out of a pool that drained
        assert message.attempt % dispatching._ATTEMPTS < allowed + again, "an episode is tried without end"
    trained = [t for step in run.batches for t in run.trained(step)]
    assert all(t.step - 1 - t.versions[0] <= plot.settings.max_staleness for t in trained), "a trained token is too old"


def request() -> Generate:
    return Generate("r", "s", np.zeros(3, np.int32), Sampling())


def test_a_request_that_no_generator_takes_ends_and_says_why():
    with Simulation(0) as simulation:

        async def main(context):
            router = Router(context, patience_s=50.0)
            router.set_routes(Routes(["generator-7"]))
            await router.generate(request())

        with pytest.raises(TimedOut, match=r"no generator took 'r' for 50 s: there is no actor 'generator-7'"):
            simulation.run(main)


def test_within_names_who_did_not_answer():
    with Simulation(0) as simulation:

        async def main(context):
            await within(9.0, "pool-3.run_episode", asyncio.sleep(100))

        with pytest.raises(TimedOut, match=r"pool-3.run_episode has not answered for 9 s"):
            simulation.run(main)


def test_a_deadlock_in_a_simulation_is_an_error_not_a_hang():
    with Simulation(0) as simulation:

        async def main(context):
            await asyncio.shield(asyncio.get_running_loop().create_future())

        with pytest.raises((SimulationStuck, TimeoutError)):
            simulation.run(main)


def test_a_world_that_hangs_is_given_up_and_its_pool_goes_on(simulated_run):
    run = simulated_run(
        env__options={"hang": True}, rollout__attempts=2, rollout__env_step_s=3.0, eval__tasks=0, cold_start__steps=0
    )
    with pytest.raises(Exception, match=r"Echo.step .* has not returned for 3 s"):
        run.play(0)


def test_a_batch_that_is_lost_with_its_store_before_the_learner_has_it_is_asked_for_again(
    simulated_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    train = Learner.train

    async def strike(self: Learner, message: Train) -> Trained:
        if not run.simulation.crashes:
            run.simulation.crash("store")
        return await train(self, message)

    monkeypatch.setattr(Learner, "train", strike)
    run = simulated_run(steps=2, eval__tasks=0)
    run.play(0)
    assert run.summary()["finished"] and run.crashes[0][1] == "store" and run.simulation.loop.time() < 60.0


@pytest.mark.parametrize("slow", ["evaluation", "demonstrations", "train", "cold start"])
def test_what_takes_long_and_goes_on_is_waited_for(simulated_run: Any, monkeypatch: pytest.MonkeyPatch, slow: str) -> None:
    changes: dict[str, Any] = {"eval__tasks": 0}
    if slow == "evaluation":  # sixteen seconds each, one after the other
        changes = {"env__actors": 1, "env__slots": 1, "env__options": {"turns": 2, "sleep": 8.0}, "eval__tasks": 8}
        changes |= {"rollout__episode_s": 20.0, "rollout__groups_per_step": 1}
    elif slow == "demonstrations":  # forty seconds each
        changes |= {"env__options": {"turns": 2, "sleep": 20.0}, "cold_start__demonstrations": 32, "env__slots": 32}
    work = Learner._work

    async def _work(self: Learner, name: str, *args: Any, **labels: Any) -> Any:
        await asyncio.sleep(3700.0 * (name == slow))
        return await work(self, name, *args, **labels)

    monkeypatch.setattr(Learner, "_work", _work)
    run = simulated_run(steps=1, **changes)
    run.play(0)
    assert run.summary()["finished"]


def test_an_evaluation_that_stands_still_is_given_up_and_says_what_could_help(
    simulated_run: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(dispatching.Dispatcher, "evaluate", lambda self, message: asyncio.sleep(50_000.0))
    run = simulated_run(rollout__episode_s=20.0)
    with pytest.raises(TimedOut, match=r"^dispatcher.evaluate has made no progress for 320 s: .* raise rollout.episode_s$"):
        run.play(0)
    assert run.simulation.loop.moment < 1_000.0


@pytest.mark.parametrize(("allowed_s", "finishes"), [(580.0, True), (100.0, False)])
def test_new_weights_wait_for_servers_as_long_as_those_may_take_to_start(
    simulated_run: Any, monkeypatch: pytest.MonkeyPatch, allowed_s: float, finishes: bool
) -> None:
    run = simulated_run(
        steps=2, eval__tasks=0, rollout__mode="sync", generator={"engine": "sglang", "sglang_start_s": allowed_s}
    )
    publish = Company.publish

    async def lost(company: Company, weights: Weights) -> None:
        if weights.version == 1 and not run.crashes:
            monkeypatch.setattr(SeededEngine, "start", lambda self: asyncio.sleep(500.0))
            run.crashes = [(0.0, name) for name in company.generators() if run.simulation.crash(name)]
        await publish(company, weights)

    monkeypatch.setattr(Company, "publish", lost)
    if finishes:
        run.play(0)
    else:
        with pytest.raises(TimedOut, match=r"no generator has proved version 1 for 400 s; .* raise generator.sglang_start_s"):
            run.play(0)


@pytest.mark.parametrize("how", ["async", "in a blocking thread"])
async def test_a_step_that_never_returns_is_ended_its_pool_named_and_its_slot_free_again(
    tmp_path: Path, model_folder: Path, how: str
) -> None:
    """On a real event loop, with real threads, which a simulation has not."""
    context = Alone(tmp_path)
    await context.store.start()
    before = calls.stuck()
    world = f"{__name__}:{'Sleepless' if how == 'async' else 'Blocking'}"
    pool = EnvPool(
        context,
        world,  # type: ignore[arg-type]
        {},
        str(model_folder),
        slots=4,
    )
    await pool.routes(Routes(["generator-0"]))

    async def attempt(seed: int) -> EpisodeDone:
        limits = Limits(max_turns=3, env_step_s=0.3)
        task = Task(f"train/{seed}", "w", "train", seed)
        return await pool.run_episode(RunEpisode(f"e{seed}", 0, seed, 0, "train", 1, task, Sampling(max_tokens=4), limits, 0))

    hung, fine = await asyncio.gather(attempt(0), attempt(1))
    assert (hung.status, hung.stop, hung.failure_kind) == ("failed", "wall_clock", "infrastructure")
    assert "step (task train/0, seed 0) has not returned for 0.3 s" in hung.failure and hung.pool == "env-7"
    assert (fine.status, fine.reward) == ("completed", 1.0)
    deadline = asyncio.get_running_loop().time() + 10.0
    while calls.stuck() > before and asyncio.get_running_loop().time() < deadline:
        await asyncio.sleep(0.01)
    assert calls.stuck() == before, "what hung is still there"
    health = await pool.health(Ping())
    assert health.load == 0 and (await attempt(2)).status == "completed"
    await context.store.close()


class Sleepless(TextWorld):
    """Task 0 never comes back from its step."""

    def reset(self, task: Task) -> str:
        self.hangs = task.seed == 0
        return "go"

    async def step(self, text: str) -> Turn:
        while self.hangs:
            await asyncio.sleep(0.01)
        return Turn("", reward=1.0, done=True)


class Blocking(Sleepless):
    def step(self, text: str) -> Turn:  # type: ignore[override]
        while self.hangs:
            time.sleep(0.01)
        return Turn("", reward=1.0, done=True)


class Alone:
    """The context of a pool on this event loop: a real store, and a generator that says one thing."""

    def __init__(self, folder: Path) -> None:
        self.name, self.rng, self.executor = "env-7", random.Random(0), None
        self.clock = self
        self.store = Store(self, str(folder))  # type: ignore[arg-type]

    def now(self) -> float:
        return time.time()

    def ref(self, name: str, cls: type[Any]) -> Any:
        return self.store if cls is Store else self

    async def generate(self, request: Generate) -> Generated:
        ids = np.asarray([7, request.sampling.stop_ids[0]], np.int32)
        return Generated(ids, np.zeros(2, np.float32), np.zeros(2, np.int32), "stop", "generator-0")

    async def end_session(self, message: Any) -> Ack:
        return Ack()
