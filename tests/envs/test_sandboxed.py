"""Worlds share their sandboxes, hold no more than they may, leave none behind, and say what to do where there can be none."""

import asyncio
import os
import subprocess
import sys
from pathlib import Path

import pytest

from troupe.envs import registry, sandbox
from troupe.envs.base import Task
from troupe.envs.drive import Driver
from troupe.envs.math_python import MathPython
from troupe.envs.sandbox import Result, SandboxSettings, docker, shared
from troupe.envs.sandbox.shared import Shared
from troupe.envs.sandboxed import cut, told
from troupe.envs.swe import Swe
from troupe.protocol.errors import ConfigError, EnvironmentFailed, InvalidAction, NotReady, Overloaded

WORLDS = ("code", "math_python", "swe")
BUBBLES = SandboxSettings(backend="bubblewrap")


def children():
    """Processes that this one has started and that still run."""
    found = []
    for each in Path("/proc").glob("[0-9]*/stat"):
        try:
            state, parent = each.read_text().rpartition(")")[2].split()[:2]
        except OSError:
            continue
        if int(parent) == os.getpid() and state != "Z" and "bwrap" in (each.parent / "cmdline").read_text():
            found.append(each.parent.name)
    return found


async def test_worlds_of_a_kind_share_a_pool_that_ends_with_the_last_of_them(bubblewrap):
    before = children()
    one, two = Shared(BUBBLES, 3), Shared(BUBBLES, 3)
    first, second = await one.take(), await two.take()
    assert first is not second and len(shared._pools[asyncio.get_running_loop()]) == 1
    await one._users.pool.fill()
    assert one._users.pool.ready == 1, "with two users some are warm, within the limit"
    await one.close()
    assert first.closed and not second.closed and (await second.run(code="print(1)")).ok
    with pytest.raises(NotReady, match="the world is closed"):
        await one.take()
    await two.close()
    await two.close()
    assert second.closed and not shared._pools[asyncio.get_running_loop()] and children() == before


async def test_one_user_alone_opens_no_more_than_it_takes(bubblewrap):
    mine = Shared(BUBBLES, 4)
    for _ in range(2):
        async with mine.lease() as box:
            assert not box.closed and mine._users.pool.ready == 0
        assert box.closed
    await mine.close()


async def test_many_episodes_together_hold_no_more_than_the_limit_and_the_wait_names_itself(bubblewrap):
    one, two = Shared(BUBBLES, 1, wait_s=60.0), Shared(BUBBLES, 1, wait_s=0.2)
    box = await one.take()
    with pytest.raises(Overloaded, match=r"no sandbox for 0.2 s: 1 of at most 1 are held; raise the pool's limit"):
        await two.take()
    await one.discard(box)
    two._wait_s = 60.0
    assert not (await two.take()).closed
    await asyncio.gather(one.close(), two.close())


async def test_an_episode_that_finds_none_free_is_broken_not_worth_nothing(bubblewrap, monkeypatch):
    holder, waiter = (Driver(Swe(sandboxes=1, **bubblewrap)) for _ in range(2))
    waiter.world.sandboxes._wait_s = 0.2
    for driver in (holder, waiter):
        await driver.reset(Task("x", "swe", "train", 1))
    await holder.call("shell", {"command": "true"})
    with pytest.raises(EnvironmentFailed, match=r"Swe.shell .* Overloaded: no sandbox for 0.2 s: 1 of at most 1 are held"):
        await waiter.call("shell", {"command": "true"})
    await asyncio.gather(holder.close(), waiter.close())


async def test_more_episodes_than_sandboxes_all_end_well(bubblewrap):
    before = children()

    async def episode(seed):
        driver = Driver(MathPython(sandboxes=2, **bubblewrap), timeout_s=60)
        driver.world.sandboxes._wait_s = 60.0
        await driver.reset(Task("x", "math_python", "train", seed))
        await driver.call("run_python", {"code": driver.world.problem.program})
        assert len(children()) <= len(before) + 2
        turn = await driver.step(f"<answer>{driver.world.printed[-1]}</answer>")
        await driver.close()
        return turn.success

    assert all(await asyncio.gather(*(episode(seed) for seed in range(6)))) and children() == before


async def test_a_call_that_is_cancelled_gives_its_sandbox_back(bubblewrap):
    before = children()
    driver = Driver(MathPython(**bubblewrap), timeout_s=60)
    await driver.reset(Task("x", "math_python", "train", 0))
    call = asyncio.ensure_future(driver.call("run_python", {"code": "import time; time.sleep(100)"}))
    while not (held := driver.world.sandboxes._held):
        await asyncio.sleep(0.05)
    await asyncio.sleep(0.3)  # the program runs
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert not held and children() == before
    await driver.close()


@pytest.mark.slow
async def test_a_run_is_told_as_it_ended_and_nothing_is_kept_for_the_next(bubblewrap):
    world = MathPython(turns=8, run_s=1, **bubblewrap)
    said = [
        await world.run_python(code)
        for code in (
            "open('kept', 'w'); print(hash('a') == hash('a'), 'é')",
            "print(open('kept').read())",
            "    x = 1\n    print(x +\n",
            "while True: pass",
            "raise SystemExit(3)",
            "x = 1",
        )
    ]
    assert said[0] == "True é"
    assert "No such file or directory: 'kept'" in said[1] and "SyntaxError" in said[2]
    assert said[3:] == ["(ended: it used too much time)", "(exit code 3)", "(no output)"]
    again = [await world.run_python("print({'a', 'b', 'c', 'd', 'e'}, hash('x'))")]
    with pytest.raises(InvalidAction, match="you have run 7 programs"):
        await world.run_python("print(1)")
    world.printed = []
    assert [await world.run_python("print({'a', 'b', 'c', 'd', 'e'}, hash('x'))")] == again
    with pytest.raises(InvalidAction, match="longer than 16000"):
        await world.run_python("#" * 16_001)
    await world.close()


def test_what_is_told_is_bounded():
    assert told(Result(b"a\n", b"oops\n", 1, "", 0.1)) == "a\noops"
    assert told(Result(b"", b"", -9, "memory", 0.1)) == "(ended: it used too much memory)"
    long = cut("x" * 10_000, 300)
    assert long.startswith("x" * 100 + "\n… 9700 characters …\n") and long.endswith("x" * 200) and len(long) < 350


# -- machines without ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", WORLDS)
@pytest.mark.parametrize(
    ("options", "problem"),
    [
        ({"sandbox": "bublewrap"}, "sandbox is 'bublewrap'; it is one of .* Did you mean 'bubblewrap'"),
        ({"sandbox": "subprocess"}, "the subprocess sandbox protects nothing: set trusted = true, or use docker or bubblewrap"),
        ({"sandbox": "subprocess", "trusted": True, "sandboxes": 0}, "0 sandboxes are none"),
        ({"sandbox": "subprocess", "trusted": True, "run_s": 60}, "run_s is 60; it is 1 to 12"),
    ],
)
def test_a_world_refuses_options_in_one_line_before_anything_runs(name, options, problem):
    with pytest.raises(ConfigError, match=f"^{name}: {problem}") as refused:
        registry.make(registry.find(name), options)
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("name", WORLDS)
def test_without_docker_and_bubblewrap_a_world_says_what_to_install(name, monkeypatch):
    monkeypatch.setattr(sandbox, "missing", lambda backend: f"install {backend}")
    with pytest.raises(
        ConfigError, match=rf"{name}: no sandbox can be opened here: docker: install docker; bubblewrap: install"
    ):
        registry.make(registry.find(name), {})
    assert registry.make(registry.find(name), {"sandbox": "subprocess", "trusted": True})
    with pytest.raises(ConfigError, match="no docker sandbox: install docker"):
        registry.make(registry.find(name), {"sandbox": "docker"})


def test_train_says_so_in_one_line(tmp_path):
    environment = {**os.environ, "PATH": str(tmp_path), "DOCKER_HOST": f"unix://{tmp_path}/none"}
    command = [sys.executable, "-m", "troupe", "train", "--env", "code"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    said = (done.stdout + done.stderr).strip()
    assert done.returncode == 2 and "Traceback" not in said
    assert "install the package bubblewrap" in said and ("start dockerd" in said or "pip install" in said)


async def test_a_trusted_subprocess_will_do(tmp_path):
    driver = Driver(MathPython(sandbox="subprocess", trusted=True), timeout_s=60)
    await driver.reset(Task("x", "math_python", "train", 0))
    assert (await driver.call("run_python", {"code": "print(6 * 7)"})).text == "42"
    await driver.close()


@pytest.mark.slow
@pytest.mark.parametrize("name", WORLDS)
def test_the_scripted_player_does_as_well_in_docker(name):
    if why := docker.missing():
        pytest.skip(why)
    from troupe.envs.check import player_score

    assert player_score(registry.find(name), {"sandbox": "docker"}, n=3).success == 1.0
