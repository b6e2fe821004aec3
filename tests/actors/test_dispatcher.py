"""The dispatcher, with all its rules together (docs/dispatch.md): what it dispatches, and that all of it is emitted."""

from __future__ import annotations

import asyncio
import random
from itertools import pairwise, product
from typing import Any

import pytest

from tests.actors.dispatching import Act, Company, check_emitted, train
from troupe.actors import dispatcher as module
from troupe.actors.groups import seed_of
from troupe.actors.simulated import Chaos
from troupe.actors.store import Store
from troupe.protocol.errors import TroupeError
from troupe.protocol.messages import CommitGroup, Deposit, Limits, RunEpisode, Sampling
from troupe.protocol.trajectory import Task, Trajectory

SEEDS = 6
"""Of each combination in the test of all rules together."""


def test_tasks_seeds_ids_and_sampling_are_fixed_by_the_run_s_seed_and_the_group_s_number(company):
    run = company(settings={"temperature": 0.7, "max_tokens": 9, "stop": ["</answer>"]}, limits=Limits(3, 77, 50, 5))
    run.play()
    assert {m.group for _, m in run.started} == {10_000, 10_001, 20_000, 20_001}
    for _, message in run.started:
        assert message.episode == f"t{message.group:09d}-{message.member:02d}" and message.step == message.group // 10_000
        assert message.task.seed == 10_000_000_000 + 10_007 * message.step + message.group % 10_000
        assert message.seed == seed_of(1, message.group, message.member)
        assert message.sampling == Sampling(0.7, 1.0, 0, 9, stop=["</answer>"])
        assert message.limits == Limits(3, 77, 50, 5)


def test_a_full_store_holds_the_pools_and_they_hold_the_slots(company):
    async def work(run: Company, context: Any) -> None:
        store = context.ref("store", Store)
        others = [f"other-{n}" for n in range(run.max_deposits)]
        for name in others:
            await store.deposit(Deposit(Trajectory(name, 0, 1, 0, "eval", 0, Task("t", "e", "s", 0), "cancelled", "cancelled")))
        await asyncio.sleep(15.0)
        assert len(run.started) == run.pools * run.slots and not run.ended
        await store.commit(CommitGroup(1, "eval", 0, others, trains=False))
        await train(run, context)

    run = company(max_deposits=6, slots=1, steps=3)
    run.play(work)
    check_emitted(run, crashed=True)
    assert len(run.batches) == 3


def test_no_more_groups_are_begun_than_the_store_has_room_for(company, monkeypatch):
    monkeypatch.setattr(module, "_OPEN_EPISODES", 6)
    most = 0

    def plan(message: RunEpisode, pool: str) -> Act:
        nonlocal most
        begun = {m.group for _, m in run.started} | {message.group}
        most = max(most, len(begun - set(run.groups())))
        return Act(seconds=random.Random(message.episode).uniform(1, 20))

    run = company(plan=plan, slots=50, settings={"groups_per_step": 20}, max_deposits=6, steps=1)
    run.play()
    assert len({m.group for _, m in run.started}) == 20 and most == 2
    check_emitted(run)


@pytest.mark.parametrize(
    ("policy", "oversample", "filter_"),
    list(product(["retry", "drop-episode", "drop-group"], [0.0, 0.75], ["none", "informative"])),
)
@pytest.mark.parametrize("crashed", [False, True], ids=["", "crashes"])
def test_whatever_fails_hangs_and_gets_lost_each_episode_is_stored_once(company, policy, oversample, filter_, crashed):
    finished = 0
    for seed in range(SEEDS):

        def plan(message: RunEpisode, pool: str, seed: int = seed) -> Act:
            dice = random.Random(f"{seed}/{message.episode}/{message.attempt}/{pool}")
            how = dice.choices(
                ["complete", "fail", "data", "refuse", "starting", "die", "hang", "drop"], [80, 6, 2, 5, 2, 0.3, 1, 1]
            )[0]
            reward = float(dice.randrange(2))
            return Act(how, reward, dice.uniform(0.1, 6.0), f"reason {dice.randrange(3)}", lost=dice.random() < 0.03)  # type: ignore[arg-type]

        run = company(
            plan=plan,
            settings={"groups_per_step": 3, "on_failure": policy, "oversample": oversample, "filter": filter_},
            pools=3,
            chaos=Chaos(lose_request=0.01, lose_reply=0.01),
            crashes=6 if crashed else 0,
            steps=3,
        )
        try:
            run.play(seed=seed)
        except TroupeError as error:
            assert "too few survived" in str(error)  # to drop whole groups takes luck when so much breaks
            check_emitted(run, crashed=True)
            continue
        finished += 1
        check_emitted(run, crashed)
    assert finished > SEEDS // 2


@pytest.mark.parametrize("trains", [True, False])
def test_a_late_commit_of_a_dead_dispatcher_does_not_hold_its_successor_up(company, trains):
    late = CommitGroup(10_000, "train", 1, [f"t000010000-0{member}" for member in range(3)], trains)

    async def work(run: Company, context: Any) -> None:
        store = context.ref("store", Store)
        training = asyncio.ensure_future(train(run, context))
        calls: list[asyncio.Future[Any]] = []
        while 10_000 not in run.groups():
            calls.append(asyncio.ensure_future(store.commit(late)))
            await asyncio.sleep(0.004)
        await asyncio.gather(*calls)
        await training

    run = company(plan=lambda message, pool: Act("data" if trains and not message.member else "complete"))
    run.settings = {"on_failure": "drop-episode" if trains else "retry", "max_staleness": 0}
    run.chaos = Chaos(delay=(0.01, 0.01), slow=0.0)
    run.play(work)
    assert {row["trains"] for row in run.groups()[10_000]} == {trains}
    check_emitted(run)


def test_the_same_seed_dispatches_the_same(company):
    first, second = (company(chaos=Chaos(lose_reply=0.02), crashes=3) for _ in range(2))
    first.play(seed=4)
    second.play(seed=4)
    assert first.started == second.started


def test_a_restarted_dispatcher_runs_exactly_what_is_not_durable(company):
    async def work(run: Company, context: Any) -> None:
        await asyncio.sleep(8.0)
        run.durable = {row["id"] for row in run.rows()}
        before = len(run.started)
        context.simulation.crash("dispatcher")
        await train(run, context)
        again = {m.episode for _, m in run.started[before:]}
        assert run.durable and not again & run.durable

    run = company(plan=lambda message, pool: Act(seconds=3.0), slots=3)
    run.play(work)
    check_emitted(run, crashed=True)
    assert [t.group for a, b in pairwise(sorted(run.batches)) for t in run.batches[a]] == [10_000] * 3 + [10_001] * 3
