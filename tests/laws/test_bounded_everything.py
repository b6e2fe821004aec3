"""Law 10: nothing waits for ever, and a timeout names its culprit."""

from __future__ import annotations

import asyncio
from collections import Counter

import numpy as np
import pytest

from tests.laws.rollouts import Run, every_seed
from troupe.actors.context import within
from troupe.actors.router import Router
from troupe.actors.simulated import Simulation, SimulationStuck
from troupe.protocol.errors import TimedOut
from troupe.protocol.messages import Generate, Routes, Sampling


@every_seed
def test_whatever_goes_wrong_the_run_ends_and_nothing_grows_beyond_its_limit(run: Run) -> None:
    plot = run.plot
    assert run.seconds < 2_500.0, "somebody waited for the last resort"
    assert not run.broken or "too few survived" in run.broken
    # The dispatcher's permits are the slots; an attempt that it has given up may still be ending beside the next one.
    undisturbed = not plot.chaos.lose_reply and not plot.chaos.lose_request and not run.crashes
    assert run.most_in_flight <= plot.slots * (1 if undisturbed else 2)
    assert run.most_deposits <= 2 * plot.room
    attempts = Counter(message.episode for message in run.dispatched)
    rounds = 1 + sum(who in ("store", "dispatcher") for _, who in run.crashes)
    assert max(attempts.values()) <= (plot.settings.attempts + 3) * rounds, "an episode is tried without end"
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
