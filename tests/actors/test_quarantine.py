"""A task that always fails is not tried for ever."""

from __future__ import annotations

import asyncio
from typing import Any, ClassVar

from tests.actors.dispatching import Act, Company, check_emitted, train
from troupe.envs.base import TextWorld
from troupe.protocol.messages import RunEpisode
from troupe.protocol.trajectory import Task


class Few(TextWorld):
    """A world of two tasks, which come again and again."""

    name: ClassVar[str] = "few"

    def reset(self, task: Task) -> str:
        return ""

    def step(self, text: str) -> str:
        return ""

    @classmethod
    def task(cls, split: str, index: int) -> Task:
        return Task(f"{split}/{index % 2}", "few", split, index % 2)


def test_a_task_that_keeps_failing_is_quarantined_and_stays_so_after_a_restart(company):
    def plan(message: RunEpisode, pool: str) -> Act:
        return Act("data", why="task 1 is broken") if message.task.id == "train/1" else Act()

    async def work(run: Company, context: Any) -> int:
        await train(run, context)
        tries = sum(m.task.id == "train/1" for _, m in run.started)
        run.context.simulation.crash("dispatcher")
        run.steps = 4
        await asyncio.sleep(5.0)
        for step in (3, 4):
            run.batches[step] = await run.batch(step)
            run.version = step
        score = await run.evaluate([Task("train/1", "few", "train", 1), Task("train/0", "few", "train", 0)], trials=2)
        assert (score.failed, score.rewards) == (2, [1.0, 1.0])
        return tries

    run = company(plan=plan, world=f"{__name__}:Few", settings={"quarantine_after": 3, "max_staleness": 0})
    tries = run.play(work)
    assert tries >= 3 and sum(m.task.id == "train/1" for _, m in run.started) == tries
    assert run.status.quarantined == {"train/1": "task 1 is broken"}
    assert {t.task.id for batch in run.batches.values() for t in batch} == {"train/0"}
    check_emitted(run, crashed=True)


def test_a_quarantine_ends_what_runs_of_the_task_and_says_why(company):
    def plan(message: RunEpisode, pool: str) -> Act:
        if message.task.id != "train/1":
            return Act(seconds=40.0)
        return Act("data", why="no file") if message.member == 0 else Act(seconds=50.0)

    settings = {"quarantine_after": 1, "on_failure": "drop-episode"}  # by which its group would go on without it
    run = company(plan=plan, world=f"{__name__}:Few", settings=settings, slots=30, steps=1)
    run.play()
    cancelled = [row for row in run.rows() if row["status"] == "cancelled" and row["task_id"] == "train/1"]
    assert cancelled and all(moment < 30 for moment, episode in run.ended if episode in {row["id"] for row in cancelled})
    assert any("task train/1 is quarantined: 1 failures of its own; last: no file" in event for event in run.status.events)


def test_a_task_whose_attempts_all_break_in_the_same_way_is_suspected(company):
    def plan(message: RunEpisode, pool: str) -> Act:
        if message.task.id == "train/1":
            return Act("fail", why=f"{pool}: it needs 1 TB" if alike else f"try {message.attempt} of {pool}")
        return Act()

    for alike in (True, False):
        run = company(plan=plan, world=f"{__name__}:Few", settings={"quarantine_after": 2, "attempts": 2})
        run.play()
        assert set(run.status.quarantined) == ({"train/1"} if alike else set())
