"""OpenSpiel's games as worlds: one seat is the agent's, the rest is luck of the task; only legal moves are moves."""

import random

import pytest

pytest.importorskip("pyspiel", reason="the package open-spiel is missing: pip install 'troupe-rl[open_spiel]'")

from troupe.envs import registry
from troupe.envs.check import check, player_score
from troupe.protocol.errors import ConfigError, InvalidAction


def opened(game, index=0, **options):
    kind = registry.find(f"open_spiel:{game}")
    world = registry.make(kind, options)
    task = kind.task("train", index)
    world._begin(task)
    return world, world.reset(task)


def to_the_end(world, seed=0):
    turns = [world.step(world.play(random.Random(seed), 1.0))]
    while not turns[-1].done:
        turns.append(world.step(world.play(random.Random(seed), 1.0)))
    return turns


@pytest.mark.parametrize("game", ["tic_tac_toe", "kuhn_poker", "matrix_rps", "catch"])
def test_games_of_every_kind_conform(game):
    report = check(registry.find(f"open_spiel:{game}"), episodes=4)
    assert report.ok, str(report)


def test_the_agent_sees_the_board_and_its_legal_moves_and_nothing_else_is_a_move():
    world, opening = opened("tic_tac_toe", patience=5)
    assert opening.splitlines()[:2] == ["you are player 0 of 2", "..."] and opening.count("(") == 9
    told = world.step("I take x(1,1).").text
    assert told.count("x") - told.partition("moves")[2].count("x") == 1 and told.partition("moves")[0].count("o") == 1
    before = world.state_key()
    for said in ("x(1,1)", "o(0,0)", "x", "", "4"):
        with pytest.raises(InvalidAction, match="legal moves: x"):
            world.step(said)
    assert world.state_key() == before


def test_stalling_with_illegal_moves_is_no_better_than_losing():
    world, _ = opened("tic_tac_toe", patience=1)
    with pytest.raises(InvalidAction):
        world.step("pass")
    turn = world.step("pass")
    assert (turn.reward, turn.done, turn.success) == (-1.0, True, False)


def test_the_reward_is_the_return_of_the_agents_own_seat():
    for seat in (0, 1):
        for index in range(10):
            world, _ = opened("kuhn_poker", index, seat=seat)
            turns = to_the_end(world, index)
            assert sum(turn.reward for turn in turns) == world.position.returns()[seat] != 0
            assert turns[-1].success == (world.position.returns()[seat] > 0)
    world, _ = opened("2048")
    turns = [world.step(world.play(random.Random(i), 1.0)) for i in range(40)]
    assert sum(turn.reward for turn in turns) == world.position.returns()[0] > 0
    assert sum(turn.reward != 0 for turn in turns) > 1  # paid as it goes


def test_a_hidden_card_stays_hidden_and_so_does_a_choice_made_at_the_same_time():
    shown = {opened("kuhn_poker", index)[1].splitlines()[1] for index in range(30)}
    assert shown == {"0", "1", "2"}
    openings = {opened("matrix_rps", index, seat=1)[1] for index in range(12)}
    assert len(openings) == 1


def test_a_seat_may_be_drawn_and_luck_belongs_to_the_task():
    openings = [opened("kuhn_poker", index, seat=-1)[1] for index in range(20)]
    assert openings == [opened("kuhn_poker", index, seat=-1)[1] for index in range(20)]
    assert {opening.split(" of ")[0] for opening in openings} == {"you are player 0", "you are player 1"}


def test_a_rollout_player_beats_a_random_one_and_is_the_better_opponent():
    game = registry.find("open_spiel:tic_tac_toe")
    assert player_score(game, {}, n=12).success > player_score(game, {}, n=40, noise=1.0).success
    weak = player_score(game, {"seat": 1}, n=20, noise=1.0).reward
    assert player_score(game, {"seat": 1, "opponent": "rollout"}, n=20, noise=1.0).reward < weak


def test_moves_with_blanks_are_told_apart():
    _, opening = opened("goofspiel(num_cards=3)")
    assert opening.endswith("moves: [P0]Bid: 1, [P0]Bid: 2, [P0]Bid: 3")


@pytest.mark.parametrize(
    ("game", "options", "reason"),
    [
        ("tic_tac_to", {}, "no game 'tic_tac_to'. Did you mean 'tic_tac_toe'?"),
        ("hex(x=4)", {}, "Unknown parameter 'x'"),
        ("mfg_garnet", {}, "is a mean field game"),
        ("tic_tac_toe", {"seat": 2}, "seat is 2; it is 0 to 1"),
        ("tic_tac_toe", {"opponent": "rolout"}, "Did you mean 'rollout'?"),
        ("tic_tac_toe", {"rollouts": 0}, "rollouts is 0"),
    ],
)
def test_what_cannot_be_played_is_one_clear_line(game, options, reason):
    with pytest.raises(ConfigError) as error:
        registry.make(registry.find(f"open_spiel:{game}"), options)
    assert reason in str(error.value) and "\n" not in str(error.value)
