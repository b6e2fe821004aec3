"""The driver: any kind of world, typed failures, timeouts that name their culprit, nothing left behind."""

import asyncio
import contextlib
import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor

import pytest

from troupe.envs import drive
from troupe.envs.base import InvalidAction, Task, TextWorld, Turn
from troupe.envs.drive import Driver, stuck
from troupe.envs.echo import Echo
from troupe.protocol.errors import EnvironmentFailed, TaskFailed, TimedOut

TASK = Task("train/118", "test", "train", 9)


class Sync(TextWorld):
    """`step` runs whatever function it is given."""

    def __init__(self, act=lambda text: Turn(text)):
        self.act = act
        self.threads = []
        self.closed = threading.Event()

    def reset(self, task):
        self.threads.append(threading.current_thread())
        return f"hello {self.rng.random()}"

    def step(self, text):
        self.threads.append(threading.current_thread())
        return self.act(text)

    def close(self):
        self.closed.set()


class Inline(Sync):
    inline = True


class Async(Sync):
    async def reset(self, task):
        return super().reset(task)

    async def step(self, text):
        await asyncio.sleep(0)
        return self.act(text)

    async def close(self):
        self.closed.set()


class Halfway(Sync):
    def step(self, text):  # a plain method that gives a coroutine
        async def later():
            return self.act(text)

        return later()


KINDS = [Sync, Inline, Async, Halfway]


def raises(error):
    def act(text):
        raise error

    return act


async def one_step(world, text="hi"):
    driver = Driver(world)
    try:
        await driver.reset(TASK)
        return await driver.step(text)
    finally:
        await driver.close()


@pytest.mark.parametrize("kind", KINDS)
def test_every_kind_of_world_is_driven_alike(kind):
    world = kind()
    turn = asyncio.run(one_step(world))
    assert turn == Turn("hi") and world.closed.is_set()
    assert asyncio.run(one_step(kind(lambda text: "plain"))) == Turn("plain")


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("error", [InvalidAction("say what?"), ValueError("say what?")])
def test_an_unreadable_action_is_invalid_and_the_episode_goes_on(kind, error):
    async def play():
        world = kind(raises(error))
        driver = Driver(world)
        await driver.reset(TASK)
        with pytest.raises(InvalidAction, match=r"say what\?"):
            await driver.step("x")
        world.act = lambda text: Turn("fine", done=True)
        assert (await driver.step("y")).done
        await driver.close()

    asyncio.run(play())


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "error", [RuntimeError("boom"), StopIteration("boom"), TimeoutError("boom"), SystemExit("boom"), KeyError("boom")]
)
def test_any_other_exception_is_a_failed_environment_that_names_it(kind, error):
    with pytest.raises(EnvironmentFailed) as failed:
        asyncio.run(one_step(kind(raises(error))))
    assert f"{kind.__name__}.step (task train/118, seed 9) raised" in str(failed.value)
    assert failed.value.kind == "infrastructure"
    if not isinstance(error, StopIteration):  # Python itself turns it into a RuntimeError inside of a coroutine
        assert type(error).__name__ in str(failed.value) and "boom" in str(failed.value)


@pytest.mark.parametrize("kind", KINDS)
def test_a_task_that_cannot_be_run_anywhere_says_so_itself(kind):
    with pytest.raises(TaskFailed, match="no such file"):
        asyncio.run(one_step(kind(raises(TaskFailed("no such file")))))


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (None, "returned NoneType"),
        (Turn(b"bytes"), "Turn.text is bytes"),
        (Turn("x", reward=float("nan")), "Turn.reward is nan"),
        (Turn("x", reward=float("inf")), "Turn.reward is inf"),
        (Turn("x", reward="1"), "Turn.reward is '1'"),
        (Turn("x", reward=None), "Turn.reward is None"),
        (Turn("x", parts={"a": float("nan")}), "Turn.parts\\['a'\\] is nan"),
        (Turn("x", parts=[1]), "Turn.parts is list"),
    ],
)
def test_nonsense_is_a_failed_environment_and_never_a_reward(answer, reason):
    with pytest.raises(EnvironmentFailed, match=reason):
        asyncio.run(one_step(Sync(lambda text: answer)))


@pytest.mark.parametrize("error", [ValueError("bad map"), InvalidAction("bad map")])
def test_a_reset_that_raises_is_the_worlds_fault_not_the_agents(error):
    world = Sync()
    world.reset = raises(error)
    with pytest.raises(EnvironmentFailed, match=r"Sync.reset .*bad map"):
        asyncio.run(one_step(world))


def test_the_worlds_chance_comes_from_the_task():
    async def first(task):
        driver = Driver(Sync())
        try:
            return await driver.reset(task)
        finally:
            await driver.close()

    again = Task("other id", "test", "train", 9, {})
    assert asyncio.run(first(TASK)) == asyncio.run(first(again))
    assert asyncio.run(first(TASK)) != asyncio.run(first(Task("a", "test", "heldout", 9)))


def test_a_step_outside_of_an_episode_is_refused():
    async def play():
        driver = Driver(Inline(lambda text: Turn("end", done=True)))
        with pytest.raises(EnvironmentFailed, match="reset it first"):
            await driver.step("x")
        await driver.reset(TASK)
        await driver.step("x")
        with pytest.raises(EnvironmentFailed, match="reset it first"):
            await driver.step("x")

    asyncio.run(play())


def test_a_synchronous_world_lives_in_one_thread_of_its_own_that_ends_with_it():
    world = Sync()
    asyncio.run(one_step(world))
    (thread,) = set(world.threads)
    assert thread is not threading.main_thread() and thread.daemon
    thread.join(5)
    assert not thread.is_alive()


def test_an_inline_world_needs_no_thread():
    world = Inline()
    asyncio.run(one_step(world))
    assert set(world.threads) == {threading.main_thread()}


def test_a_given_executor_is_used_and_not_shut_down():
    world = Sync()
    with ThreadPoolExecutor(1, thread_name_prefix="given") as executor:

        async def play():
            driver = Driver(world, executor=executor)
            await driver.reset(TASK)
            await driver.close()

        asyncio.run(play())
        assert world.threads[0].name.startswith("given")
        assert executor.submit(int).result() == 0


def test_a_hanging_step_names_its_culprit_and_the_world_is_closed_when_it_returns():
    release = threading.Event()
    world = Sync(lambda text: release.wait(30) and Turn("late"))

    async def play():
        driver = Driver(world)
        await driver.reset(TASK)
        driver.timeout_s = 0.05
        with pytest.raises(TimedOut, match=r"^Sync.step \(task train/118, seed 9\) has not returned for 0.05 s$"):
            await driver.step("x")
        with pytest.raises(EnvironmentFailed, match="make a new world"):
            await driver.reset(TASK)
        await driver.close()
        assert not world.closed.is_set()  # it is still in the middle of the call
        release.set()

    asyncio.run(play())
    assert world.closed.wait(5)


def test_a_hanging_async_step_names_its_culprit_and_the_world_is_closed():
    async def play():
        driver = Driver(Echo(hang=True), timeout_s=0.05)
        await driver.reset(TASK)
        with pytest.raises(TimedOut, match=r"^Echo.step \(task train/118, seed 9\) has not returned for 0.05 s$"):
            await driver.step("x")
        await driver.close()
        return len(asyncio.all_tasks())

    assert asyncio.run(play()) == 1


def test_a_cancelled_episode_waits_for_nobody():
    release = threading.Event()
    world = Sync(lambda text: release.wait(30) and Turn("late"))

    async def play():
        driver = Driver(world)
        await driver.reset(TASK)
        step = asyncio.create_task(driver.step("x"))
        await asyncio.sleep(0.05)
        step.cancel()
        with pytest.raises(asyncio.CancelledError):
            await step
        await driver.close()
        release.set()

    asyncio.run(play())
    assert world.closed.wait(5)


def test_close_happens_once():
    closed = []
    world = Inline()
    world.close = lambda: closed.append(1)

    async def play():
        driver = Driver(world)
        await driver.close()
        await driver.close()

    asyncio.run(play())
    assert closed == [1]


def test_a_hung_world_does_not_keep_the_process_alive(tmp_path):
    script = tmp_path / "hang.py"
    script.write_text(
        "import asyncio, threading\n"
        "from troupe.envs.base import Task, TextWorld\n"
        "from troupe.envs.drive import Driver\n"
        "class Hang(TextWorld):\n"
        "    def reset(self, task): threading.Event().wait()\n"
        "asyncio.run(Driver(Hang(), timeout_s=0.05).reset(Task('t', 'e', 'train', 0)))\n"
    )

    async def run():
        process = await asyncio.create_subprocess_exec(sys.executable, str(script), stderr=asyncio.subprocess.PIPE)
        try:
            _, err = await asyncio.wait_for(process.communicate(), 60)
        finally:
            if process.returncode is None:
                process.kill()
        return err.decode()

    assert "Hang.reset (task t, seed 0) has not returned for 0.05 s" in asyncio.run(run())


class Odd(Inline):
    def state_key(self):
        return 3

    def play(self, rng, noise):
        raise RuntimeError("boom")


def test_state_key_and_player_fail_with_their_names():
    driver = Driver(Odd())
    with pytest.raises(EnvironmentFailed, match="state_key returned int, not str"):
        driver.state_key()
    with pytest.raises(EnvironmentFailed, match="play raised RuntimeError: boom"):
        driver.play(None, 0.0)


def test_echo_rewards_by_the_seed_and_breaks_as_told():
    async def episode(seed, **options):
        driver = Driver(Echo(turns=3, **options))
        await driver.reset(Task("t", "echo", "train", seed))
        turns = [await driver.step(str(i)) for i in range(3)]
        await driver.close()
        return turns

    first, again, other = (asyncio.run(episode(seed)) for seed in (1, 1, 2))
    assert first == again and [t.text for t in first] == ["0", "1", "2"] and first[-1].done
    assert first[-1].reward != other[-1].reward
    for options in ({"fail": 1.0}, {"flaky": 1.0}):
        with pytest.raises(EnvironmentFailed, match="RuntimeError: step 1 fails"):
            asyncio.run(episode(1, **options))


# -- worlds that never return ----------------------------------------------------------------------------------------


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
    monkeypatch.setattr(drive, "_CLOSE_S", 0.1)
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
    monkeypatch.setattr(drive, "_GRACE_S", 0.05)
    world, before = Stubborn(), settled()

    async def play():
        await hung(world)
        rounds = world.rounds
        await asyncio.sleep(0.1)
        assert world.rounds == rounds and len(asyncio.all_tasks()) == 1 and stuck() == before + 1

    asyncio.run(play())  # which waits for all tasks
    assert world.closed.is_set()


def test_a_cancelled_episode_gets_away_from_an_async_world_that_ignores_it(monkeypatch):
    monkeypatch.setattr(drive, "_GRACE_S", 0.05)

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
    monkeypatch.setattr(drive, "_GRACE_S", 0.05)
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


@pytest.mark.parametrize("kind", KINDS)
def test_a_world_that_raises_a_cancellation_has_failed_and_cancels_nobody(kind):
    with pytest.raises(EnvironmentFailed, match=r"step \(task train/118, seed 9\) raised CancelledError"):
        asyncio.run(one_step(kind(raises(asyncio.CancelledError()))))


@pytest.mark.parametrize("kind", KINDS)
def test_what_comes_back_can_be_encoded(kind):
    assert asyncio.run(one_step(kind(lambda text: "é \ud800"))).text == "é ?"
    with pytest.raises(InvalidAction, match=r"^é \?$"):
        asyncio.run(one_step(kind(raises(ValueError("é \ud800")))))


class Telling(Sync):
    def __init__(self, state):
        super().__init__()
        self.told = state

    def state(self):
        return self.told()


class TellingLater(Telling):
    async def state(self):
        return self.told()


async def state_of(world):
    driver = Driver(world)
    try:
        await driver.reset(TASK)
        found = await driver.state()
    finally:
        turn = await driver.step("hi")  # whatever came of it, the episode goes on
        await driver.close()
    assert turn.text == "hi"
    return found


@pytest.mark.parametrize("kind", [Telling, TellingLater])
def test_a_state_is_what_json_can_say_of_any_kind_of_world(kind):
    assert asyncio.run(state_of(kind(lambda: {"at": (1, 2), "seen": {3}}))) == {"at": [1, 2], "seen": [3]}


@pytest.mark.parametrize("kind", [Telling, TellingLater])
@pytest.mark.parametrize("state", [lambda: {"at": object()}, lambda: {"p": float("nan")}, lambda: [1], lambda: {}["gone"]])
def test_a_state_that_is_none_fails_with_its_name(kind, state):
    with pytest.raises(EnvironmentFailed, match=r"Telling(Later)?\.state \(task train/118, seed 9\)"):
        asyncio.run(state_of(kind(state)))


def test_without_a_state_of_its_own_a_world_tells_its_key_also_if_it_uses_the_name():
    world = Sync()
    assert asyncio.run(state_of(world)) == {}
    world.state, world.state_key = "begun", lambda: "a"
    assert asyncio.run(state_of(world)) == {"state_key": "a"}
