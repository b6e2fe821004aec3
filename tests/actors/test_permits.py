"""Who may use a pool's next free slot: in turn, by place, and each slot once."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.actors.dispatching import Company, train
from troupe.actors.permits import Permits
from troupe.protocol.trajectory import Task


async def test_training_and_evaluation_are_served_in_turn_while_both_wait():
    permits = Permits()
    served: list[str] = []

    async def ask(kind: Any, place: int) -> None:
        await permits.take(kind, place, owner=place)
        served.append(f"{kind}{place}")

    asks = [asyncio.ensure_future(ask("eval", n)) for n in range(6)]
    await asyncio.sleep(0)
    asks += [asyncio.ensure_future(ask("train", n)) for n in range(10, 13)]
    await asyncio.sleep(0)
    permits.open({"pool": 1})
    for _ in range(8):
        await asyncio.sleep(0.001)
        permits.give("pool")
    await asyncio.gather(*asks)
    assert served == ["train10", "eval0", "train11", "eval1", "train12", "eval2", "eval3", "eval4", "eval5"]


async def test_a_retry_keeps_its_place_and_goes_elsewhere_if_there_is_room():
    permits = Permits()
    permits.open({"a": 1})
    assert await permits.take("train", 0, 0) == "a"
    later = asyncio.ensure_future(permits.take("train", 5, 5))
    await asyncio.sleep(0)
    retry = asyncio.ensure_future(permits.take("train", 0, 0, avoid="a"))
    await asyncio.sleep(0)
    permits.give("a")
    assert await retry == "a" and not later.done()  # nowhere else
    permits.open({"a": 9, "b": 1})
    assert await later == "a"
    assert await permits.take("train", 6, 6, avoid="a") == "b"


async def test_an_asker_that_withdrew_or_was_cancelled_takes_no_slot():
    permits = Permits()
    withdrawn, cancelled, waiting = (asyncio.ensure_future(permits.take("train", n, owner=n)) for n in range(3))
    await asyncio.sleep(0)
    permits.withdraw(0)
    permits.open({"pool": 1})
    cancelled.cancel()  # at the very moment at which it was granted
    assert await withdrawn == ""
    with pytest.raises(asyncio.CancelledError):
        await cancelled
    assert await asyncio.wait_for(waiting, 1) == "pool"


def test_a_long_evaluation_does_not_hold_training_up(company):
    async def both(run: Company, context: Any) -> None:
        tasks = [Task(f"heldout/{n}", "echo", "heldout", n) for n in range(200)]
        await asyncio.gather(run.evaluate(tasks), train(run, context))

    run = company(slots=2, settings={"max_staleness": 0})
    run.play(both)
    kinds = [message.kind for _, message in run.started]
    last = max(n for n, kind in enumerate(kinds) if kind == "train")
    assert kinds.count("train") == 12 and last < 60 and run.peak <= 2
