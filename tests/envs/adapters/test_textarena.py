"""Games of TextArena: reproducible however many are played at once, quiet, and offline."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import sys
from typing import Any

import pytest

from troupe.envs import registry
from troupe.envs.base import Turn
from troupe.envs.check import check, player_score
from troupe.envs.drive import Driver
from troupe.protocol.errors import ConfigError, EnvironmentFailed, InvalidAction

pytest.importorskip("textarena", reason="needs textarena: pip install 'troupe-rl[textarena]'")

GAMES = ("GuessTheNumber-v0", "TowerOfHanoi-v0", "Minesweeper-v0-small", "2048-v0-ultra-easy", "TicTacToe-v0", "KuhnPoker-v0")


async def episode(name: str, index: int, seed: int = 0, **options: Any) -> list[Any]:
    """What is seen in an episode with random moves, which depend on `seed`."""
    driver = Driver(registry.make(registry.find(f"textarena:{name}"), options))
    rng = random.Random(f"{index}/{seed}")
    seen: list[Any] = [await driver.reset(driver.world.task("train", index))]
    for _ in range(12):
        move = driver.play(rng, 0.5) or f"[{rng.randint(0, 9)} {rng.randint(0, 9)}]"
        try:
            turn = await driver.step(str(move))
        except InvalidAction as error:
            seen.append(str(error))
            continue
        seen.append(turn)
        if turn.done:
            break
        await asyncio.sleep(0)
    await driver.close()
    return seen


@pytest.mark.parametrize("name", GAMES)
def test_a_game_is_a_good_world(name: str) -> None:
    report = check(registry.find(f"textarena:{name}"), episodes=5)
    assert report.ok, str(report)


def test_episodes_that_are_played_at_once_are_those_played_alone() -> None:
    """In threads of one process, while something else draws from the global chance, and reseeds it."""
    games = [
        (name, index)
        for index in range(4)
        for name in ("2048-v0-ultra-easy", "Minesweeper-v0-small", "PigDice-v0-short", "Nim-v0")
    ]

    async def disturb() -> None:
        while True:
            random.seed(0)
            await asyncio.sleep(0)

    async def at_once() -> list[list[Any]]:
        disturber = asyncio.create_task(disturb())
        try:
            return await asyncio.gather(*(episode(*game) for game in games))
        finally:
            disturber.cancel()

    async def alone() -> list[list[Any]]:
        return [await episode(*game) for game in games]

    assert asyncio.run(at_once()) == asyncio.run(alone())


def test_another_process_plays_the_same() -> None:
    code = (
        "import asyncio, hashlib, sys; sys.path.insert(0, sys.argv[1]); from test_textarena import episode\n"
        "seen = [asyncio.run(episode(n, 1)) for n in ('Sudoku-v0-very-easy', 'KuhnPoker-v0', 'Mastermind-v0')]\n"
        "print(hashlib.sha256(repr(seen).encode()).hexdigest())"
    )
    here = __file__.rpartition("/")[0]
    said = {
        subprocess.run(
            [sys.executable, "-c", code, here],
            capture_output=True,
            text=True,
            check=True,
            env={**os.environ, "PYTHONHASHSEED": seed},
        ).stdout
        for seed in ("1", "2")
    }
    assert len(said) == 1 and len(said.pop()) == 65


def test_the_global_chance_is_left_alone() -> None:
    registry.find("textarena:2048-v0-ultra-easy")
    random.seed(7)
    before = random.getstate()
    asyncio.run(episode("2048-v0-ultra-easy", 0))
    assert random.getstate() == before


def test_hidden_numbers_of_training_are_not_held_out() -> None:
    hidden: dict[str, set[int]] = {"train": set(), "heldout": set()}
    for split, numbers in hidden.items():
        for index in range(60):
            world: Any = registry.make(registry.find("textarena:GuessTheNumber-v0"), {})
            task = world.task(split, index)
            world._begin(task)
            world.reset(task)
            numbers.add(world._base.game_number)
    assert hidden["heldout"] and not hidden["train"] & hidden["heldout"]


def test_a_guess_is_answered_paid_and_only_the_right_one_is_a_success() -> None:
    world: Any = registry.make(registry.find("textarena:GuessTheNumber-v0"), {})
    task = world.task("train", 3)
    world._begin(task)
    opening = world.reset(task)
    assert "number between 1 and 20" in opening
    number = world._base.game_number
    turn = world.step(f"[{1 if number != 1 else 2}]")
    assert turn.text == "The target number is higher." and not turn.done
    with pytest.raises(InvalidAction, match="outside the range"):
        world.step("[99]")
    turn = world.step(str(number))  # the brackets are added, as the game's own wrapper does
    assert (turn.done, turn.success, turn.reward) == (True, True, 1.0)


def test_two_unreadable_moves_in_a_row_lose_as_the_game_says() -> None:
    world: Any = registry.make(registry.find("textarena:TicTacToe-v0"), {})
    world._begin(world.task("train", 0))
    world.reset(world.task("train", 0))
    with pytest.raises(InvalidAction, match="correct format"):
        world.step("the middle one")
    turn = world.step("the middle one")
    assert (turn.done, turn.success, turn.reward) == (True, False, -1.0)


@pytest.mark.parametrize(
    "name",
    ["TicTacToe-v0", "WildTicTacToe-v0", "ConnectFour-v0", "Nim-v0", "Othello-v0-tiny", "KuhnPoker-v0", "PigDice-v0-short"],
)
def test_the_other_seat_plays_legal_moves_and_each_seat_can_be_ours(name: str) -> None:
    for seat in (0, 1):
        for turn in asyncio.run(episode(name, seat, seat=seat))[1:]:
            assert isinstance(turn, Turn) or "invalid move" in turn


def test_a_greedy_player_beats_a_random_one() -> None:
    world = registry.find("textarena:TicTacToe-v0")
    assert player_score(world, n=30).reward > player_score(world, {"opponent": "greedy"}, n=30, noise=1.0).reward


def test_an_opponent_may_be_ones_own_function(tmp_path: Any) -> None:
    file = tmp_path / "rival.py"
    file.write_text(
        "def last(told, rng):\n    return [f'[{n}]' for n in range(9) if f\"'[{n}]'\" in told.splitlines()[-1]][-1]\n"
    )
    seen = asyncio.run(episode("TicTacToe-v0", 0, opponent=f"{file}:last"))
    assert "in cell 8" in seen[1].text or "in cell 7" in seen[1].text


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("Wordle-v0", {}, "refused: it downloads word lists at run time"),
        ("Hangman-v0", {}, "refused: it downloads word lists at run time"),
        ("TwentyQuestions-v0", {}, "refused: it asks a language model over the network"),
        ("GuessTheNumbr-v0", {}, "Did you mean 'GuessTheNumber-v0'?"),
        ("TicTacToe-v0", {"seat": 2}, "seat is 2; it is 0 to 1"),
        ("TicTacToe-v0", {"players": 3}, "players is 3; this game is for 2"),
        ("TicTacToe-v0", {"opponent": "clever"}, "opponent is 'clever'; it is random, greedy, module:function"),
        ("Golf-v0", {}, "its moves are not known here"),
        ("Poker-v0", {}, "say for how many with players"),
        ("GuessTheNumber-v0", {"max_numbr": 3}, "Did you mean 'max_number'?"),
    ],
)
def test_what_cannot_be_played_is_one_line(name: str, options: dict[str, Any], reason: str) -> None:
    with pytest.raises(ConfigError) as error:
        registry.make(registry.find(f"textarena:{name}"), options)
    assert reason in str(error.value) and "\n" not in str(error.value)


def test_a_game_that_breaks_is_no_zero(monkeypatch: pytest.MonkeyPatch) -> None:
    world: Any = registry.make(registry.find("textarena:GuessTheNumber-v0"), {})
    world._begin(world.task("train", 0))
    world.reset(world.task("train", 0))
    monkeypatch.setattr(world._base, "guessed_numbers", None)
    with pytest.raises(EnvironmentFailed, match="raised TypeError"):
        world.step("[3]")


def test_nothing_is_printed(capfd: pytest.CaptureFixture[str]) -> None:
    asyncio.run(episode("LogicPuzzle-v0", 0))
    assert capfd.readouterr().out == ""
