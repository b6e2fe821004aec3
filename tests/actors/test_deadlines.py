"""Limits of waits: the same as `asyncio.timeout` gives, on one timer for many."""

from __future__ import annotations

import asyncio
import gc
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from troupe.actors import deadlines
from troupe.actors.context import within
from troupe.actors.deadlines import Deadline
from troupe.actors.simulated import Simulation

WAITS = st.tuples(st.integers(0, 20), st.sampled_from([1, 3, 3.5, 10]), st.integers(0, 12))
"""Of one wait: when it begins, its limit, how long it would last."""


@given(waits=st.lists(WAITS, max_size=12))
def test_each_of_many_waits_ends_when_it_would_or_at_its_own_limit(waits):
    async def wait(begin: float, limit: float, lasts: float) -> tuple[bool, float]:
        clock = asyncio.get_running_loop().time
        await asyncio.sleep(begin)
        began = clock()
        deadline = Deadline(limit)
        try:
            with deadline:
                await asyncio.sleep(lasts + 0.25)  # never at the very moment of a limit
        except TimeoutError:
            assert deadline.expired
        assert not asyncio.current_task().cancelling()
        return deadline.expired, round(clock() - began, 6)

    async def main(context: Any) -> list[Any]:
        return await asyncio.gather(*(wait(*one) for one in waits))

    with Simulation(0) as simulation:
        found = simulation.run(main)
    assert found == [(lasts + 0.25 > limit, min(lasts + 0.25, limit)) for _, limit, lasts in waits]


class Counted(asyncio.SelectorEventLoop):
    """Counts its timers."""

    timers = 0

    def call_at(self, *what: Any, **how: Any) -> asyncio.TimerHandle:
        self.timers += 1
        return super().call_at(*what, **how)


def test_waits_of_the_same_length_share_a_timer_and_leave_nothing_behind():
    async def wait() -> None:
        with Deadline(0.2):
            await asyncio.sleep(0)

    async def main() -> tuple[int, int]:
        loop: Any = asyncio.get_running_loop()
        await asyncio.gather(*(wait() for _ in range(100)))
        timers = loop.timers
        await asyncio.sleep(0.5)
        return timers, len(deadlines._queues[loop])

    with asyncio.Runner(loop_factory=Counted) as runner:
        assert runner.run(main()) == (1, 0)


def test_a_loop_that_is_closed_amid_its_limits_is_forgotten():
    async def main() -> None:
        with Deadline(60.0):
            await asyncio.sleep(0)

    asyncio.run(main())
    gc.collect()
    before = len(deadlines._queues)  # of loops that somebody else holds
    for _ in range(5):
        asyncio.run(main())
    gc.collect()
    assert len(deadlines._queues) <= before


@pytest.mark.parametrize("together", [False, True])
def test_a_cancellation_by_somebody_else_stays_one_even_together_with_the_limit(together):
    async def wait(deadline: Deadline) -> None:
        with deadline:
            await asyncio.sleep(60)

    async def main() -> None:
        deadline = Deadline(60.0)
        task = asyncio.ensure_future(wait(deadline))
        await asyncio.sleep(0)
        if together:
            deadline.expire()
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        assert deadline.expired == together

    asyncio.run(main())


def test_of_limits_inside_each_other_the_one_that_is_over_ends_its_own_block():
    async def main() -> list[str]:
        ended = []
        with pytest.raises(TimeoutError), Deadline(0.05):
            try:
                with Deadline(60.0):
                    await asyncio.sleep(60)
            except asyncio.CancelledError:
                ended.append("the inner one only passes it on")
                raise
        with Deadline(60.0):
            with pytest.raises(TimeoutError), Deadline(0.05):
                await asyncio.sleep(60)
            await asyncio.sleep(0)
            ended.append("the outer one goes on")
        return ended

    assert asyncio.run(main()) == ["the inner one only passes it on", "the outer one goes on"]


def test_a_timeout_of_the_work_itself_is_not_called_its_limit():
    async def work() -> None:
        raise TimeoutError("its own")

    with pytest.raises(TimeoutError, match="its own"):
        asyncio.run(within(60.0, "somebody", work()))
