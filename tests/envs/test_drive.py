"""The driver: any kind of world, typed failures, timeouts that name their culprit, nothing left behind."""

import asyncio
import sys
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from tests.envs.kinds import KINDS, TASK, Inline, Sync, one_step, raises
from troupe.envs.base import InvalidAction, Task, Turn
from troupe.envs.drive import Driver
from troupe.envs.echo import Echo
from troupe.protocol.errors import EnvironmentFailed, TaskFailed, TimedOut


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


def test_what_is_no_turn_is_a_failed_environment_that_names_the_step():
    with pytest.raises(EnvironmentFailed, match=r"^Sync.step \(task train/118, seed 9\): Turn.reward is nan, not a finite"):
        asyncio.run(one_step(Sync(lambda text: Turn("x", reward=float("nan")))))


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
