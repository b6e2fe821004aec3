"""Tasksets of verifiers: its own rewards, its tools and its users, in a world."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from troupe.envs import registry
from troupe.envs.check import check, player_score
from troupe.envs.drive import Driver
from troupe.protocol.errors import ConfigError, EnvironmentFailed, InvalidAction

pytest.importorskip("verifiers.v1", reason="needs verifiers: pip install 'troupe-rl[verifiers]'")

HERE = Path(__file__).parent
SUMS = f"verifiers:{HERE}/vf_sums.py"


def played(name: str, *actions: str, index: int = 0, **options: Any) -> tuple[list[str], Any]:
    """(what was observed, the last turn)."""

    async def play() -> tuple[list[str], Any]:
        driver = Driver(registry.make(registry.find(name), options))
        try:
            seen, turn = [await driver.reset(driver.world.task("train", index))], None
            for action in actions:
                turn = await driver.step(action)
                seen.append(turn.text)
            return seen, turn
        finally:
            await driver.close()

    return asyncio.run(play())


def test_a_task_is_paid_by_its_own_weighted_rewards() -> None:
    seen, _ = played(f"{SUMS}:Sums")
    system, asked = seen[0].split("\n\n")
    assert system == "Answer with a number."
    a, b = map(int, asked.removeprefix("What is ").removesuffix("?").split(" + "))
    for answer, right, short in ((str(a + b), 1.0, 0.5), (f"it must be the number {a + b} then", 1.0, 0.0), ("none", 0.0, 0.5)):
        _, turn = played(f"{SUMS}:Sums", answer)
        assert (turn.reward, turn.parts) == (right + short, {"right": right, "short": short})
        assert turn.done and turn.success is (turn.reward >= 1.0)
    assert played(f"{SUMS}:Sums", str(a + b), success_at=2.0)[1].success is False


@pytest.mark.parametrize("name", ["Sums", "Shelves"])
def test_a_taskset_is_a_good_world(name: str) -> None:
    report = check(registry.find(f"{SUMS}:{name}"), episodes=6)
    assert report.ok, str(report)


def test_the_answer_of_a_task_is_its_scripted_player() -> None:
    world = registry.find(f"{SUMS}:Sums")
    assert player_score(world, n=20).reward == 1.5 and player_score(world, n=20, noise=1.0).success < 0.5


def test_options_are_those_of_the_taskset() -> None:
    world = registry.find(f"{SUMS}:Sums")
    assert len(registry.make(world, {"largest": 3})._tasks) == 9
    assert len(registry.make(world, {"limit": 4})._tasks) == 4
    with pytest.raises(ConfigError, match="bigest"):
        registry.make(world, {"bigest": 3})


def test_tools_share_their_state_with_the_rewards() -> None:
    async def play(look: bool) -> Any:
        driver = Driver(registry.make(registry.find(f"{SUMS}:Shelves"), {}))
        await driver.reset(driver.world.task("train", 0))
        assert [spec["name"] for spec in driver.tools()] == ["look_up"]
        assert driver.tools()[0]["description"] == "Look a word up."
        with pytest.raises(InvalidAction, match="there is only 'sum'"):
            await driver.call("look_up", {"word": "product"})
        answer = driver.world._task.data.answer
        if look:
            assert (await driver.call("look_up", {"word": "sum"})).text == answer
        turn = await driver.step(answer)
        await driver.close()
        return turn

    assert asyncio.run(play(True)).reward == 1.0
    assert asyncio.run(play(False)).reward == 0.0


def test_an_environments_user_answers_the_agent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(HERE))
    seen, _ = played("verifiers:vf_guess_game")
    number = int(seen[0].split()[1].rstrip(":")) % 10
    wrong = (number + 1) % 10
    seen, turn = played("verifiers:vf_guess_game", str(wrong), str(number))
    assert seen[1] == ("lower" if wrong > number else "higher")
    assert (turn.reward, turn.done, turn.success) == (1.0, True, True)
    _, turn = played("verifiers:vf_guess_game", *["x"] * 9)
    assert (turn.reward, turn.done, turn.success) == (0.0, True, False)
    assert check(registry.find("verifiers:vf_guess_game"), episodes=5).ok


def test_rewards_that_fail_break_the_episode() -> None:
    with pytest.raises(EnvironmentFailed, match="the scorer is away"):
        played(f"{SUMS}:Broken", "1")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("no_such_taskset", "not found"),
        (f"{HERE}/vf_sums.py:SumsTask", "SumsTask is no Taskset"),
        ("harbor", ""),
    ],
)
def test_what_is_no_taskset_is_one_line(name: str, reason: str) -> None:
    with pytest.raises(ConfigError) as error:
        registry.find(f"verifiers:{name}")
    assert reason in str(error.value) and "\n" not in str(error.value)


def test_a_reward_that_needs_a_runtime_is_refused() -> None:
    with pytest.raises(ConfigError, match="right needs a runtime"):
        registry.make(registry.find(f"{SUMS}:NeedsRuntime"), {})
