"""Law 9 in simulation: what a rollout opens is closed, whatever dies. Real processes: tests/cluster and tests/actors."""

from __future__ import annotations

from tests.laws.rollouts import Run, every_seed


@every_seed
def test_pools_that_live_have_closed_every_world_and_ended_every_attempt(run: Run) -> None:
    """The dead ones' worlds die with their process. `Stage` itself waits until no pool runs anything any more."""
    assert run.worlds_left == 0


@every_seed
def test_the_store_keeps_no_deposit_whose_group_nobody_commits(run: Run) -> None:
    assert run.deposits_left == 0
