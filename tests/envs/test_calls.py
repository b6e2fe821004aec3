"""Calls that never return: ended as far as Python can, counted as long as they go on, waited for by nobody."""

import asyncio
import contextlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.envs.kinds import TASK, Async, Sync
from troupe.envs import calls
from troupe.envs.base import Turn
from troupe.envs.calls import Overdue, killable, leashed, stuck
from troupe.envs.drive import Driver
from troupe.protocol.errors import TimedOut


def spin(text):
    while True:
        pass


def doze(text):
    while True:
        time.sleep(0.01)


def shrug(text):
    """Swallows what it is struck with, but not for ever."""
    for _ in range(3):
        with contextlib.suppress(BaseException):
            spin(text)
    return Turn("late")


async def hung(world):
    """Drives a world into its hanging step and leaves it."""
    driver = Driver(world)
    await driver.reset(TASK)
    driver.timeout_s = 0.05
    with pytest.raises(TimedOut, match=f"{type(world).__name__}.step .*has not returned for 0.05 s"):
        await driver.step("x")
    driver.timeout_s = 30
    await driver.close()


def ended(condition):
    """Waits, for as long as it may take on a busy machine."""
    until = time.monotonic() + 60
    while not condition() and time.monotonic() < until:
        time.sleep(0.01)
    return condition()


def settled():
    """The count, once the threads of earlier tests have ended."""
    assert ended(lambda: not any(thread.name.endswith("-killer") for thread in threading.enumerate()))
    return stuck()


@pytest.mark.parametrize("act", [spin, doze, shrug])
def test_a_thread_that_hangs_in_python_is_killed_and_its_world_closed_in_it(act):
    world = Sync(act)
    closed_in, before = [], settled()
    world.close = lambda: closed_in.append(threading.current_thread())
    asyncio.run(hung(world))
    (thread,) = set(world.threads)
    thread.join(60)
    assert not thread.is_alive() and closed_in == [thread]
    assert ended(lambda: stuck() == before)


def test_the_finally_blocks_of_a_killed_call_run_and_nothing_is_printed(capfd):
    cleaned = threading.Event()

    def act(text):
        try:
            spin(text)
        finally:
            cleaned.set()

    world = Sync(act)
    asyncio.run(hung(world))
    world.threads[0].join(60)
    assert cleaned.is_set() and world.closed.is_set()
    assert capfd.readouterr() == ("", "")


def test_a_close_that_hangs_after_its_call_was_killed_is_killed_too(monkeypatch):
    monkeypatch.setattr(calls, "_CLOSE_S", 0.1)
    world = Sync(spin)
    world.close = lambda: spin("")
    asyncio.run(hung(world))
    world.threads[0].join(60)
    assert not world.threads[0].is_alive()


def test_a_thread_that_hangs_outside_of_python_is_counted_until_it_ends_and_its_driver_returns_in_time():
    release = threading.Event()
    world = Sync(lambda text: release.wait(300))  # one call into C: no exception gets in
    before = settled()
    asyncio.run(hung(world))
    assert stuck() == before + 1 and world.threads[0].is_alive()
    release.set()
    world.threads[0].join(60)
    assert stuck() == before and world.closed.is_set()


def test_only_threads_of_the_drivers_own_are_killed_but_all_are_counted():
    release = threading.Event()
    before = settled()

    def act(text):
        while not release.is_set():
            time.sleep(0.01)

    with ThreadPoolExecutor(1) as executor:

        async def play():
            driver = Driver(Sync(act), executor=executor)
            await driver.reset(TASK)
            driver.timeout_s = 0.05
            with pytest.raises(TimedOut):
                await driver.step("x")
            await driver.close()

        asyncio.run(play())
        time.sleep(0.3)  # longer than the first strikes would take
        assert stuck() == before + 1
        release.set()
    assert ended(lambda: stuck() == before)


def test_a_call_of_a_cancelled_episode_has_the_rest_of_its_time_and_is_then_killed():
    async def play(world, began, timeout_s):
        driver = Driver(world)
        await driver.reset(TASK)
        driver.timeout_s = timeout_s
        step = asyncio.create_task(driver.step("x"))
        while not began.is_set():
            await asyncio.sleep(0.01)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        await driver.close()

    def brief(text):
        began.set()
        time.sleep(0.2)
        finished.set()

    def endless(text):
        began.set()
        doze(text)

    for act, timeout_s in ((brief, 60), (endless, 2)):
        world, began, finished = Sync(act), threading.Event(), threading.Event()
        asyncio.run(play(world, began, timeout_s))
        world.threads[0].join(50)
        assert not world.threads[0].is_alive() and world.closed.is_set() and finished.is_set() == (act is brief)


class Stubborn(Async):
    """Swallows whatever is thrown at it."""

    async def step(self, text):
        self.rounds = 0
        while True:
            with contextlib.suppress(BaseException):
                self.rounds += 1
                await asyncio.sleep(0.01)


def test_an_async_world_that_ignores_its_cancellation_is_never_resumed_and_counted(monkeypatch):
    monkeypatch.setattr(calls, "_GRACE_S", 0.05)
    world, before = Stubborn(), settled()

    async def play():
        await hung(world)
        rounds = world.rounds
        await asyncio.sleep(0.1)
        assert world.rounds == rounds and len(asyncio.all_tasks()) == 1 and stuck() == before + 1

    asyncio.run(play())  # which waits for all tasks
    assert world.closed.is_set()


def test_a_cancelled_episode_gets_away_from_an_async_world_that_ignores_it(monkeypatch):
    monkeypatch.setattr(calls, "_GRACE_S", 0.05)

    async def play(times):
        driver = Driver(Stubborn(), timeout_s=60)
        await driver.reset(TASK)
        step = asyncio.create_task(driver.step("x"))
        for _ in range(times):
            await asyncio.sleep(0.02)
            step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        await driver.close()
        await asyncio.sleep(0)
        assert len(asyncio.all_tasks()) == 1

    asyncio.run(play(1))
    asyncio.run(play(2))


def test_a_task_of_the_worlds_own_that_cannot_be_ended_is_counted_until_it_ends(monkeypatch):
    monkeypatch.setattr(calls, "_GRACE_S", 0.05)
    before = settled()

    class Delegates(Async):
        async def step(self, text):
            await asyncio.create_task(self.work())

        async def work(self):
            self.over = False
            while not self.over:
                with contextlib.suppress(asyncio.CancelledError):
                    await asyncio.sleep(0.01)

    world = Delegates()

    async def play():
        await hung(world)
        assert stuck() == before + 1
        world.over = True
        await asyncio.sleep(0.1)
        assert stuck() == before

    asyncio.run(play())


def test_an_async_world_may_clean_up_when_it_is_cancelled():
    class Tidy(Async):
        cleaned = False

        async def step(self, text):
            try:
                await asyncio.sleep(60)
            finally:
                await asyncio.sleep(0.01)
                self.cleaned = True

    world = Tidy()
    asyncio.run(hung(world))
    assert world.cleaned


@pytest.mark.parametrize("error", [ValueError("boom"), TimeoutError("boom"), SystemExit(1), asyncio.CancelledError("boom")])
def test_what_code_that_is_not_ours_raises_is_a_value_and_never_taken_for_its_time_being_up(error):
    def plain():
        raise error

    async def later():
        raise error

    async def play():
        return await killable(plain, 60, "it"), await leashed(later(), 60)

    for result, found in asyncio.run(play()):
        assert result is None and type(found) is type(error)


def test_what_has_used_up_its_time_is_overdue():
    async def play():
        with pytest.raises(Overdue):
            await killable(lambda: doze(""), 0.05, "it")
        with pytest.raises(Overdue):
            await leashed(asyncio.sleep(60), 0.05)
        assert len(asyncio.all_tasks()) == 1

    before = settled()
    asyncio.run(play())
    assert ended(lambda: stuck() == before)
