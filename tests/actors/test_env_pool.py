"""Where episodes happen: exactly one record an attempt, whatever the world does, and no slot is lost to it."""

from __future__ import annotations

import asyncio
import random
import re
import threading
import time
from typing import Any

import numpy as np
import pytest

from troupe.actors import rendering
from troupe.actors.env_pool import EnvPool
from troupe.actors.settings import AgentSettings
from troupe.envs import calls, registry
from troupe.envs.base import Task, TextWorld, Turn
from troupe.envs.tools import ToolWorld, tool
from troupe.learner.tiny import make_tiny
from troupe.protocol import arrow
from troupe.protocol.errors import EpisodeError, NotReady, Overloaded, TaskFailed
from troupe.protocol.messages import (
    CancelEpisode,
    Demonstrate,
    Deposit,
    Drain,
    Generate,
    Generated,
    Limits,
    Ping,
    Receipt,
    Routes,
    RunEpisode,
    Sampling,
)
from troupe.protocol.trajectory import Trajectory


class Trouble(TextWorld):
    """Does what `mode` says, at its second step."""

    release = threading.Event()

    def __init__(self, mode: str = "fine") -> None:
        self.mode = mode

    def reset(self, task: Task) -> str:
        if self.mode == "no such task" or (self.mode == "one in eight" and task.seed == 5):
            raise TaskFailed(f"task {task.id} has no data")
        if self.mode == "reset breaks":
            raise OSError("no disk")
        self.n = 0
        return "go"

    def step(self, text: str) -> Turn:
        self.n += 1
        if self.n == 2:
            if self.mode == "breaks":
                raise RuntimeError("broken")
            if self.mode == "nan":
                return Turn("", reward=float("nan"))
            if self.mode == "loops":
                while True:
                    time.sleep(0.01)
            if self.mode == "blocks":
                self.release.wait(60)
            if self.mode == "wins, then loops":
                while True:
                    time.sleep(0.01)
        won = self.mode == "wins, then loops" and self.n == 1
        return Turn("on", reward=1.0 if self.n == 3 or won else 0.0, done=self.n == 3, success=True if won else None)

    def close(self) -> None:
        if self.mode == "cannot be closed":
            raise OSError("busy")


class Here:
    """A context on the real event loop: two other actors, and nothing else."""

    name = "env-7"
    executor = None

    def __init__(self, refuse: int = 0) -> None:
        self.clock, self.rng = self, random.Random(0)
        self.deposits: list[Trajectory] = []
        self.deaths: list[str] = []
        self.refuse = refuse

    def now(self) -> float:
        return time.time()

    def ref(self, name: str, cls: type[Any]) -> Any:
        return self

    def watch_loop(self, limit_s: float, lag: Any = None) -> None:
        return

    def die(self, reason: str) -> None:
        self.deaths.append(reason)

    async def deposit(self, message: Deposit) -> Receipt:
        if self.refuse:
            self.refuse -= 1
            raise Overloaded("full")
        self.deposits.append(message.trajectory)
        return Receipt(True)

    async def generate(self, message: Generate) -> Generated:
        ids = np.asarray([40, message.sampling.stop_ids[0]], np.int32)
        return Generated(ids, np.zeros(2, np.float32), np.zeros(2, np.int32), "stop", "generator-0")

    async def end_session(self, message: Any) -> None:
        return


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("tiny"), ["go on"], hidden=16, layers=1, heads=2))


@pytest.fixture
def pool_of(folder: str, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setattr(registry, "find", lambda name: Trouble)

    async def make(mode: str, slots: int = 8, **how: Any) -> tuple[EnvPool, Here]:
        context = Here(**how)
        pool = EnvPool(context, "trouble", {"mode": mode}, folder, slots, agent=AgentSettings())  # type: ignore[arg-type]
        await pool.routes(Routes(["generator-0"]))
        return pool, context

    return make


def ask(number: int = 0, attempt: int = 0, **limits: Any) -> RunEpisode:
    allowed = Limits(**{"env_step_s": 0.3, **limits})
    task = Task(f"train/{number}", "trouble", "train", number)
    return RunEpisode(f"e{number}", attempt, 0, 0, "train", 1, task, Sampling(max_tokens=8), allowed, seed=number)


@pytest.mark.parametrize(
    ("mode", "kind", "stop", "words"),
    [
        ("breaks", "infrastructure", "failed", "RuntimeError: broken"),
        ("nan", "infrastructure", "failed", "nan"),
        ("reset breaks", "infrastructure", "failed", "no disk"),
        ("no such task", "data", "failed", "has no data"),
        ("loops", "infrastructure", "wall_clock", "Trouble.step .*has not returned for 0.3 s"),
    ],
)
async def test_a_broken_episode_is_recorded_with_where_and_why_and_carries_no_reward(pool_of, mode, kind, stop, words):
    pool, context = await pool_of(mode)
    done = await pool.run_episode(ask())
    (record,) = context.deposits
    assert (done.status, done.failure_kind, done.stop, done.reward, done.success) == ("failed", kind, stop, 0.0, None)
    assert (record.status, record.reward, record.success) == ("failed", 0.0, None)
    assert record.failure is not None and "env-7" in record.failure.where and "train/0" in record.failure.where

    assert re.search(words, record.failure.message)
    assert (await pool.health(Ping())).load == 0


async def test_one_of_eight_that_cannot_be_reset_does_not_touch_the_seven(pool_of):
    pool, context = await pool_of("one in eight")
    done = await asyncio.gather(*(pool.run_episode(ask(number)) for number in range(8)))
    assert [d.status for d in done] == ["completed"] * 5 + ["failed"] + ["completed"] * 2
    assert done[5].failure_kind == "data" and len(context.deposits) == 8


async def test_a_success_before_time_ran_out_is_kept(pool_of):
    pool, context = await pool_of("wins, then loops")
    done = await pool.run_episode(ask())
    assert (done.status, done.stop, done.success, done.reward) == ("completed", "wall_clock", True, 1.0)
    assert context.deposits[0].failure is None


async def test_a_world_that_cannot_be_closed_does_not_take_back_what_was_earned(pool_of):
    pool, _ = await pool_of("cannot be closed")
    done = await pool.run_episode(ask())
    assert (done.status, done.success, done.reward) == ("completed", True, 1.0)
    assert "busy" in (await pool.health(Ping())).detail["late"]


async def test_a_thread_of_python_code_that_never_returns_is_ended_and_its_slot_is_free(pool_of):
    pool, _ = await pool_of("loops")
    await asyncio.gather(*(pool.run_episode(ask(number)) for number in range(4)))
    for _ in range(200):
        if not calls.stuck():
            break
        await asyncio.sleep(0.02)
    assert calls.stuck() == 0 and (await pool.health(Ping())).load == 0


async def test_a_pool_with_too_many_worlds_that_cannot_be_ended_finishes_its_work_and_lets_itself_be_replaced(pool_of):
    pool, context = await pool_of("blocks", slots=4)
    try:
        first = await asyncio.gather(*(pool.run_episode(ask(number)) for number in range(2)))
        assert [d.stop for d in first] == ["wall_clock"] * 2 and calls.stuck() == 2
        assert len(context.deaths) == 1 and "do not return" in context.deaths[0]
        with pytest.raises(NotReady, match="env-7 takes no more episodes: 2 of its worlds do not return"):
            await pool.run_episode(ask(9))
    finally:
        Trouble.release.set()
    while calls.stuck():
        await asyncio.sleep(0.02)
    Trouble.release.clear()


async def test_an_episode_that_no_generator_lets_finish_is_no_failure_and_one_that_is_slow_is_one(pool_of):
    pool, context = await pool_of("fine")
    await pool.routes(Routes([]))
    done = await pool.run_episode(ask(episode_s=0.4))
    assert (done.status, done.failure_kind, context.deposits[0].status) == ("cancelled", "", "cancelled")
    assert re.fullmatch(
        r"no generator took its turns for 0\.\d+ of 0\.4 s: no generator has proved its weights yet", done.failure
    )
    await pool.routes(Routes(["generator-0"]))
    slow, _ = await pool_of("blocks")
    try:
        done = await slow.run_episode(ask(episode_s=0.4, env_step_s=30.0))
        assert (done.status, done.stop) == ("failed", "wall_clock")
    finally:
        Trouble.release.set()
    while calls.stuck():
        await asyncio.sleep(0.02)
    Trouble.release.clear()


async def test_a_cancelled_attempt_is_recorded_as_cancelled(pool_of):
    pool, context = await pool_of("blocks", slots=64)
    running = asyncio.ensure_future(pool.run_episode(ask(env_step_s=30.0)))
    await asyncio.sleep(0.1)
    await pool.cancel(CancelEpisode("e0", 0))
    done = await running
    Trouble.release.set()
    assert (done.status, done.stop) == ("cancelled", "cancelled") and context.deposits[0].status == "cancelled"
    while calls.stuck():
        await asyncio.sleep(0.02)
    Trouble.release.clear()


async def test_a_full_store_holds_the_episode_and_loses_nothing(pool_of):
    pool, context = await pool_of("fine", refuse=2)
    done = await pool.run_episode(ask())
    assert done.stored and len(context.deposits) == 1


class Shop(ToolWorld):
    """Its scripted player calls a tool before it answers."""

    name = "shop"

    def reset(self, task: Task) -> str:
        self.seen = ""
        return "How many?"

    @tool
    def look(self) -> str:
        """Looks."""
        self.seen = "42"
        return self.seen

    def play(self, rng: random.Random, noise: float) -> str:
        call = '<tool_call>\n{"name": "look", "arguments": {}}\n</tool_call>'
        return f"<think>so</think>{self.seen}" if self.seen else f"<think>look</think>{call}"

    def verify(self) -> bool:
        return self.answer == "42"


async def test_demonstrations_are_the_teachers_turns_as_the_policy_would_have_sampled_them(folder, monkeypatch, renderings):
    monkeypatch.setattr(registry, "find", lambda name: Shop)
    pool = EnvPool(Here(), "shop", {}, folder, 4, agent=AgentSettings())  # type: ignore[arg-type]
    shown = await pool.demonstrate(Demonstrate([Task(f"t/{n}", "shop", "train", n) for n in range(3)], 0.0, 4, 0))
    assert shown.success == 1.0 and len(shown.tokens) == 3 and not shown.broken
    found = rendering.load(folder)
    learned = found.decode(shown.tokens[0][shown.supervised[0] == 1].tolist())
    assert learned.startswith("<think>look</think><tool_call>") and learned.endswith("<think>so</think>42<|im_end|>")
    assert "How many?" in found.decode(shown.tokens[0].tolist()) and "<|im_start|>" not in learned


@pytest.mark.parametrize("name", ["tiny", "qwen3"])
async def test_a_players_tool_calls_are_demonstrated_as_the_model_would_write_them(folder, monkeypatch, renderings, name):
    monkeypatch.setattr(rendering, "load", lambda *_: renderings[name])
    pool = EnvPool(Here(), "search", {"hops": 2}, folder, 4, agent=AgentSettings())  # type: ignore[arg-type]
    shown = await pool.demonstrate(Demonstrate([Task("t/0", "search", "train", 0)], 0.0, 6, 0))
    assert shown.success == 1.0 and not shown.broken
    said = renderings[name].decode(shown.tokens[0][shown.supervised[0] == 1].tolist())
    said = said.replace("<think>\n\n</think>\n\n", "")  # as Qwen writes no thoughts
    call = r'<tool_call>\n{"name": "search", "arguments": {"query": "[\w ]+"}}\n</tool_call><\|im_end\|>'
    assert re.fullmatch(call + call + r"<answer>[\w ]+</answer><\|im_end\|>", said)


async def test_a_demonstration_that_takes_longer_than_an_episode_may_is_left_out_and_the_others_are_shown(folder, monkeypatch):
    class Slow(Shop):
        async def reset(self, task: Task) -> str:
            await asyncio.sleep(60.0 * (task.seed == 1))
            return super().reset(task)

    monkeypatch.setattr(registry, "find", lambda name: Slow)
    pool = EnvPool(Here(), "shop", {}, folder, 4, agent=AgentSettings())  # type: ignore[arg-type]
    tasks = [Task(f"t/{n}", "shop", "train", n) for n in range(3)]
    shown = await pool.demonstrate(Demonstrate(tasks, 0.0, 4, 0, env_step_s=50.0, episode_s=2.0))
    assert len(shown.tokens) == 2 and shown.broken == "env-7: the demonstration of t/1 has not answered for 2 s"


async def test_a_world_without_a_player_cannot_demonstrate_and_says_what_to_do(pool_of):
    pool, _ = await pool_of("fine")
    with pytest.raises(EpisodeError, match=r"no scripted player: set cold_start.steps = 0 or define play"):
        await pool.demonstrate(Demonstrate([Task("t/0", "trouble", "train", 0)], 0.0, 4, 0))


async def test_a_pool_that_drains_takes_no_more_episodes_and_finishes_or_ends_those_it_has(pool_of):
    pool, context = await pool_of("loops")
    running = asyncio.ensure_future(pool.run_episode(ask(env_step_s=50.0)))
    await asyncio.sleep(0.1)
    assert (await pool.drain(Drain())).load == 1
    with pytest.raises(NotReady, match="takes no more episodes: it is being drained"):
        await pool.run_episode(ask(1))
    await pool.drain(Drain(now=True))
    done = await running
    assert (done.status, done.stored, (await pool.drain(Drain())).load) == ("cancelled", True, 0)
    assert [(t.id, t.status) for t in context.deposits] == [("e0", "cancelled")]


async def test_a_pool_tells_how_long_the_calls_of_its_worlds_took(pool_of):
    pool, _ = await pool_of("fine")
    await asyncio.gather(*(pool.run_episode(ask(number)) for number in range(3)))
    (calls,) = (await pool.health(Ping())).latency.values()
    assert {call: histogram.count for call, histogram in calls.items()} == {"reset": 3, "step": 9, "verify": 0, "close": 3}
    slow, _ = await pool_of("loops")
    await slow.run_episode(ask(0))
    (calls,) = (await slow.health(Ping())).latency.values()
    assert calls["step"].count == 2 and calls["step"].longest >= 0.3 and calls["step"].quantile(1.0) >= 0.28


class Mute(Trouble):
    """Its first observation alone is more than any prompt may have."""

    def reset(self, task: Task) -> str:
        return "x " * 100_000


async def test_an_episode_in_which_nothing_was_sampled_is_broken_not_a_zero(folder, monkeypatch):
    monkeypatch.setattr(registry, "find", lambda name: Mute)
    context = Here()
    pool = EnvPool(context, "mute", {}, folder, 4, agent=AgentSettings())  # type: ignore[arg-type]
    done = await pool.run_episode(ask())
    assert (done.status, done.failure_kind, done.success) == ("failed", "data", None)
    assert "nothing was sampled (stop reason 'context_window')" in done.failure


class Unspeakable(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


async def test_an_error_that_cannot_be_told_or_stored_is_told_and_stored_all_the_same(folder, monkeypatch):
    for error, told in [(Unspeakable(), "cannot say what"), (RuntimeError("half \ud800 pair"), "half ? pair")]:

        class World(Trouble):
            def step(self, text: str, error: Exception = error) -> Turn:
                raise error

        monkeypatch.setattr(registry, "find", lambda name, world=World: world)
        context = Here()
        pool = EnvPool(context, "w", {}, folder, 4, agent=AgentSettings())  # type: ignore[arg-type]
        await pool.routes(Routes(["generator-0"]))
        done = await pool.run_episode(ask())
        assert done.status == "failed" and told in done.failure
        arrow.to_table(context.deposits)
