"""Law 9 in simulation: what a rollout opens is closed, whatever dies. Real processes: tests/cluster and tests/actors."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.laws.rollouts import Run, every_seed
from troupe.actors.company import Company
from troupe.actors.simulated import Chaos


@every_seed
def test_pools_that_live_have_closed_every_world_and_ended_every_attempt(run: Run) -> None:
    """The dead ones' worlds die with their process. `Stage` itself waits until no pool runs anything any more."""
    assert run.worlds_left == 0


@every_seed
def test_the_store_keeps_no_deposit_whose_group_nobody_commits(run: Run) -> None:
    assert run.deposits_left == 0


@pytest.mark.parametrize("after", [1.0, 3.5])
def test_an_actor_whose_creator_died_before_it_was_begun_is_replaced(
    simulated_run: Any, monkeypatch: pytest.MonkeyPatch, after: float
) -> None:
    gather = Company.gather

    async def strike(self: Company) -> None:
        if not run.simulation.crashes:
            asyncio.get_running_loop().call_later(after, run.simulation.crash, "director")
        await gather(self)

    monkeypatch.setattr(Company, "gather", strike)
    run = simulated_run(steps=1, eval__tasks=0)
    run.play(0, chaos=Chaos(process_s=2.0))
    assert run.crashes[0][1] == "director" and run.summary()["finished"]
