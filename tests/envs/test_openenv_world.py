"""An OpenEnv server is a world: ours with all that its world has, any other by its schema; a broken one breaks the episode."""

import asyncio
import json
import os
import threading
from contextlib import asynccontextmanager, suppress

import pytest
from websockets.asyncio.server import serve as serve_sockets
from websockets.exceptions import ConnectionClosed

from troupe.envs import registry
from troupe.envs.base import Task
from troupe.envs.drive import Driver
from troupe.envs.openenv import actions
from troupe.envs.openenv.serve import serving
from troupe.protocol.errors import BadArguments, ConfigError, EnvironmentFailed, InvalidAction, TimedOut, UnknownTool

TEXT = {
    "type": "object",
    "properties": {"message": {"type": "string"}, "metadata": {"type": "object"}},
    "required": ["message"],
}


@asynccontextmanager
async def remote(name, options=None, **limits):
    """(world, its local class) of one of ours, served in this loop and found by its address."""
    local = registry.find(name)
    async with serving(local, options or {}, **limits) as url:
        yield await asyncio.to_thread(registry.find, f"openenv:{url.replace('http', 'ws')}"), local


@asynccontextmanager
async def driven(world, timeout_s=30.0, **options):
    driver = Driver(registry.make(world, options), timeout_s=timeout_s)
    try:
        yield driver
    finally:
        await driver.close()


@asynccontextmanager
async def foreign(answer, schema=TEXT, step_s=0.0):
    """The address of a server that is not ours. answer: a frame's dict → what is sent back, None to hang up."""

    async def session(socket):
        async for said in socket:
            frame = json.loads(said)
            told = None if frame["type"] == "close" else answer(frame)
            if told is None:
                return
            if frame["type"] == "step":
                await asyncio.sleep(step_s)
            await socket.send(told if isinstance(told, str) else json.dumps(told))

    async def quiet(socket):
        with suppress(ConnectionClosed):  # a client that gave up
            await session(socket)

    def plain(connection, request):
        about = {"/schema": {"action": schema}, "/metadata": {"name": "odd", "description": "An odd one."}}
        return connection.respond(200, json.dumps(about[request.path])) if request.path in about else None

    async with serve_sockets(quiet, "127.0.0.1", 0, process_request=plain) as server:
        yield f"ws://127.0.0.1:{server.sockets[0].getsockname()[1]}"


def seen(reward=None, done=False, **observation):
    return {"type": "observation", "data": {"observation": observation, "reward": reward, "done": done}}


async def found(url):
    return await asyncio.to_thread(registry.find, f"openenv:{url}")


async def play(world, task, actions_):
    """Everything that an episode tells. actions_: messages, and (tool, arguments)."""
    told = []
    async with driven(world) as driver:
        told.append(await driver.reset(task))
        for action in actions_:
            told.append(driver.state_key())
            try:
                turn = await (driver.step(action) if isinstance(action, str) else driver.call(*action))
            except (InvalidAction, UnknownTool, BadArguments) as error:
                told.append((type(error).__name__, str(error)))
            else:
                told.append((turn.text, turn.reward, turn.done, turn.success, turn.parts))
                if turn.done:
                    return told
        verdict = await driver.verify()
        told.append(verdict and (verdict.reward, verdict.done, verdict.success, verdict.parts))
    return told


@pytest.mark.parametrize(
    ("name", "options", "actions_"),
    [
        ("guess", {"closeness": 0.5}, ["10", "none", "5", "15", "11", "12"]),
        ("guess", {"turns": 2}, ["1", "2"]),
        (
            "stockroom",
            {},
            [("find_item", {"name": "x"}), ("find_itm", {}), ("stock", {"item_id": "A", "warehouse": "east"}), "7"],
        ),
        ("stockroom", {}, [("find_item", {"name": "x"})]),
        ("frozen_lake", {}, ["left", "up", "nowhere", "right"]),
    ],
)
async def test_a_served_world_tells_what_it_tells_at_home(name, options, actions_):
    async with remote(name, options) as (world, local):
        assert (world.system, world.max_turns) == (local.system, local.max_turns)
        for split in ("train", "heldout"):
            task = local.task(split, 6)
            with_options = type("Local", (local,), {"__init__": lambda self: local.__init__(self, **options)})
            assert await play(world, task, actions_) == await play(with_options, task, actions_)


async def test_an_episode_that_its_world_cuts_is_cut_there_too(tmp_path):
    (tmp_path / "short.py").write_text(
        "from troupe.envs import TextWorld, Turn\n"
        "class Short(TextWorld):\n"
        "    def reset(self, task):\n"
        "        return 'go on'\n"
        "    def step(self, text):\n"
        "        return Turn('', done=True, truncated=text == 'wait')\n"
    )
    async with remote(f"{tmp_path}/short.py:Short") as (world, _), driven(world) as driver:
        for action in ("wait", "end"):
            await driver.reset(world.task("train", 0))
            assert (await driver.step(action)).truncated == (action == "wait")


async def test_a_wrong_argument_is_told_before_it_is_sent():
    async with remote("stockroom") as (world, local), driven(world) as driver:
        await driver.reset(local.task("train", 0))
        assert [tool["name"] for tool in driver.tools()] == ["find_item", "stock"]
        with pytest.raises(BadArguments, match="warehouse"):
            await driver.call("stock", {"item_id": "A1", "warehouse": "west"})


async def test_a_hundred_episodes_through_it_leave_nothing_behind():
    async with remote("guess", sessions=8) as (world, local):

        async def one(number):
            async with driven(world) as driver:
                await driver.reset(local.task("train", number))
                done = False
                for guess in range(1, number % 7):
                    done = done or (await driver.step(str(guess))).done

        await one(0)
        await asyncio.sleep(0.3)
        files, threads = len(os.listdir("/proc/self/fd")), threading.active_count()
        for first in range(0, 100, 5):
            await asyncio.gather(*(one(number) for number in range(first, first + 5)))
        for _ in range(200):
            if len(os.listdir("/proc/self/fd")) <= files and threading.active_count() <= threads:
                return
            await asyncio.sleep(0.05)
        raise AssertionError(f"{os.listdir('/proc/self/fd')} of {files} files, {threading.active_count()} of {threads} threads")


# -- servers that are not ours -----------------------------------------------------------------------------------------


async def test_a_foreign_server_is_played_by_its_schema():
    asked = []

    def answer(frame):
        asked.append(frame)
        if frame["type"] == "reset":
            return seen(prompt="Say it.", other="x")
        if frame["data"]["message"] == "bad":
            return {"type": "error", "data": {"message": "Invalid message", "code": "VALIDATION_ERROR"}}
        return seen(0.5, True, result="over", state_key="s")

    async with foreign(answer) as url:
        world = await found(url)
        assert world.system == "An odd one." and world.name == "openenv_odd"
        async with driven(world, reset={"level": 3}) as driver:
            assert await driver.reset(world.task("train", 4)) == "Say it."
            with pytest.raises(InvalidAction, match="Invalid message"):
                await driver.step("bad")
            turn = await driver.step("good")
            assert (turn.text, turn.reward, turn.done, driver.state_key()) == ("over", 0.5, True, "s")
            await driver.reset(world.task("heldout", 4))
        resets = [frame["data"] for frame in asked if frame["type"] == "reset"]
        assert resets == [{"seed": 8, "level": 3}, {"seed": 9, "level": 3}]
        assert {2 * n for n in range(99)}.isdisjoint(2 * n + 1 for n in range(99)), "no seed is in both splits"
        async with driven(world, show="json") as driver:
            assert json.loads(await driver.reset(world.task("train", 0))) == {"prompt": "Say it.", "other": "x"}


def failing(reset=None, step=None):
    def answer(frame):
        if frame["type"] == "reset":
            return seen(text="hello") if reset is None else reset
        return step

    return answer


@pytest.mark.parametrize(
    ("answer", "says"),
    [
        (failing(reset={"type": "error", "data": {"message": "9/9", "code": "CAPACITY_REACHED"}}), "is full"),
        (failing(reset={"type": "error", "data": {"message": "no", "code": "FACTORY_ERROR"}}), "FACTORY_ERROR"),
        (failing(step={"type": "error", "data": {"message": "boom", "code": "EXECUTION_ERROR"}}), "boom"),
        (failing(step=None), "has gone"),
        (failing(step="{"), "does not speak OpenEnv"),
        (failing(step={"type": "state", "data": {}}), "answered 'step' with 'state'"),
        (failing(step={"type": "observation", "data": {"observation": 7}}), "not an object"),
        (failing(step=seen("much", False, text="x")), "not a finite number"),
        (failing(step=seen(float("nan"), False, text="x")), "not a finite number"),
        (failing(step=seen(None, True, text="x")), "never gave a reward"),
    ],
)
async def test_a_server_that_fails_breaks_the_episode_and_scores_nothing(answer, says):
    async with foreign(answer) as url, driven(await found(url)) as driver:
        with pytest.raises(EnvironmentFailed) as failed:
            await driver.reset(Task("train/0", "x", "train", 0))
            await driver.step("hello")
        assert says in str(failed.value)


async def test_a_server_that_does_not_answer_is_given_up_and_its_late_answer_is_nobody_elses():
    def answer(frame):
        return seen(text=f"seed {frame['data']['seed']}" if frame["type"] == "reset" else "late")

    async with foreign(answer, step_s=0.6) as url, driven(await found(url), timeout_s=0.3) as driver:
        await driver.reset(Task("train/0", "x", "train", 0))
        with pytest.raises(TimedOut, match=r"OpenEnv\.step"):
            await driver.step("hello")
        assert await driver.reset(Task("train/3", "x", "train", 3)) == "seed 6"


async def test_a_server_that_is_gone_breaks_the_episode():
    async with remote("guess") as (world, local):
        pass
    async with driven(world) as driver:
        with pytest.raises(EnvironmentFailed, match="cannot be reached"):
            await driver.reset(local.task("train", 0))


@pytest.mark.parametrize(
    ("place", "says"),
    [
        ("ws://127.0.0.1:1", "no OpenEnv server answers"),
        ("ftp://x", "give openenv:ws://HOST:PORT"),
        ("ws://", "give openenv:ws://HOST:PORT"),
        ("image:", "give openenv:ws://HOST:PORT"),
    ],
)
def test_a_place_without_a_server_is_one_line(place, says):
    with pytest.raises(ConfigError) as error:
        registry.find(f"openenv:{place}")
    assert says in str(error.value) and "\n" not in str(error.value)


async def test_a_server_of_something_else_is_told():
    async with foreign(lambda frame: None, schema=[]) as url:
        with pytest.raises(ConfigError, match="is it an OpenEnv server"):
            await found(url)


# -- actions -----------------------------------------------------------------------------------------------------------


def one(field, **more):
    return {"type": "object", "properties": {"a": field, "metadata": {}}, "required": ["a"], **more}


TWO = {"properties": {"a": {"type": "integer"}, "b": {}}, "required": ["a", "b"]}


@pytest.mark.parametrize(
    ("schema", "text", "action"),
    [
        (one({"type": "string"}), " as it is ", {"a": " as it is "}),
        (one({"type": "integer", "minimum": 0, "maximum": 8}), "I take 7.", {"a": 7}),
        (one({"type": "integer", "minimum": 0, "maximum": 8}), "9", None),
        (one({"type": "integer"}), "none", None),
        (one({"type": "integer"}), "9" * 5_000, None),
        (one({"type": "number"}), "x = -1.5e1", {"a": -15.0}),
        (one({"type": "boolean"}), "Yes, please", {"a": True}),
        (one({"enum": ["north", "north east", 3]}), "go North East", {"a": "north east"}),
        (one({"enum": ["north", "north east", 3]}), "3", {"a": 3}),
        (one({"enum": ["north", "south"]}), "north or south", None),
        (one({"enum": ["north", "south"]}), "northern", None),
        (one({"$ref": "#/$defs/D"}, **{"$defs": {"D": {"enum": ["up"], "type": "string"}}}), "up", {"a": "up"}),
        (one({"anyOf": [{"type": "integer"}, {"type": "null"}]}), "4", {"a": 4}),
        ({"properties": {"a": {"type": "string", "default": ""}}}, "x", {"a": "x"}),
        (
            {"properties": {"a": {"type": "integer"}, "b": {}}, "required": ["a", "b"]},
            'so: {"a": 1, "b": 2}!',
            {"a": 1, "b": 2},
        ),
        (TWO, '{"a": "1", "b": 2}', None),
        (TWO, '{"a": ' * 50_000, None),
        (TWO, "no object", None),
    ],
)
def test_a_message_becomes_the_action_that_the_schema_asks_for(schema, text, action):
    form = actions.form(schema)
    if action is not None:
        assert form.read(text) == action
        return
    with pytest.raises(InvalidAction) as told:
        form.read(text)
    assert str(told.value) and len(str(told.value)) < 400
