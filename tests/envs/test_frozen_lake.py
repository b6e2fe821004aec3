"""FrozenLake: solvable, reproducible, held out by the map, one token a cell."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from troupe.envs.base import Task, action_of, belongs, rng_of
from troupe.envs.check import player_score
from troupe.envs.frozen_lake import MOVES, PLAYERS, THINK, FrozenLake
from troupe.learner.tiny import make_tiny
from troupe.protocol.errors import InvalidAction, TaskFailed


def opened(task: Task, **options) -> FrozenLake:
    world = FrozenLake(**options)
    world.rng = rng_of(task)
    world.reset(task)
    return world


@pytest.mark.parametrize("size", [3, 4, 6])
@pytest.mark.parametrize("split", ["train", "heldout"])
def test_every_lake_can_be_solved_within_the_turns_and_not_at_once(split, size):
    for index in range(100):
        world = opened(FrozenLake.task(split, index), size=size, player="shortest")
        shortest = world.distances()[world.at]
        assert 2 <= shortest <= world.max_turns
        for turn in range(1, shortest + 1):
            result = world.step(action_of(world.play(random.Random(turn), noise=0.0)))
        assert (result.done, result.success, result.reward) == (True, True, 1.0)


@settings(deadline=None)
@given(st.integers(0, 2**31), st.integers(0, 2**31))
def test_no_training_lake_is_held_out_whatever_the_seeds(train_seed, heldout_seed):
    trained = opened(Task("a", "frozen_lake", "train", train_seed))
    held_out = opened(Task("b", "frozen_lake", "heldout", heldout_seed))
    assert belongs(trained.lake, "train") and belongs(held_out.lake, "heldout")
    assert trained.lake != held_out.lake


def test_the_split_does_not_depend_on_where_the_player_stands():
    world = opened(FrozenLake.task("heldout", 0))
    before = world.lake
    world.at = world.goal
    assert world.lake == before


def test_the_splits_hold_the_same_kind_of_lake():
    shortest = {
        split: sum(len(opened(FrozenLake.task(split, index)).holes) for index in range(400)) / 400
        for split in ("train", "heldout")
    }
    assert shortest["train"] == pytest.approx(shortest["heldout"], abs=0.4)


def test_an_unknown_split_is_a_task_that_fails():
    with pytest.raises(TaskFailed, match="unknown split 'test': it is one of train, heldout"):
        opened(Task("x", "frozen_lake", "test", 0))


@settings(deadline=None)
@given(st.integers(0, 10_000), st.lists(st.sampled_from(sorted(MOVES)), max_size=8), st.booleans())
def test_an_episode_is_its_task_and_its_actions(seed, moves, slippery):
    def episode():
        world = opened(Task("x", "frozen_lake", "train", seed), slippery=slippery)
        seen = [world.state_key()]
        for move in moves:
            turn = world.step(move)
            seen.append((turn.text, turn.reward, turn.done, world.state_key()))
            if turn.done:
                break
        return seen

    assert episode() == episode()


def test_holes_and_goal_end_the_episode_and_the_edge_does_not():
    world = opened(FrozenLake.task("train", 0))
    world.holes, world.goal, world.at = frozenset({(0, 1)}), (2, 0), (0, 0)
    edge = world.step("left")
    assert (edge.done, edge.reward) == (False, 0.0)
    assert edge.text == "stayed goal down2 left edge right hole up edge down ice\n P O . .\n . . . .\n G . . .\n . . . ."
    hole = world.step("right")
    assert (hole.text, hole.done, hole.success, hole.reward) == ("hole", True, False, 0.0)
    world.at = (1, 0)
    goal = world.step("down")
    assert (goal.text, goal.done, goal.success, goal.reward) == ("goal", True, True, 1.0)


def test_slippery_ice_carries_to_either_side_but_never_back():
    ended = set()
    for seed in range(60):
        world = opened(Task("x", "frozen_lake", "train", seed), slippery=True)
        world.holes, world.goal, world.at = frozenset(), (3, 3), (1, 1)
        world.step("up")
        ended.add(world.at)
    assert ended == {(0, 1), (1, 0), (1, 2)}


@pytest.mark.parametrize(
    ("text", "to"),
    [("down", (2, 1)), (" DOWN.\n", (2, 1)), ("not sure; Left then up", (1, 0)), ("upward is up", (0, 1))],
)
def test_the_first_known_word_is_the_move(text, to):
    world = opened(FrozenLake.task("train", 0))
    world.holes, world.goal, world.at = frozenset(), (3, 3), (1, 1)
    world.step(text)
    assert world.at == to


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_what_is_no_move_is_invalid_and_changes_nothing(text):
    world = opened(FrozenLake.task("train", 1))
    before = world.state_key()
    try:
        world.step(text)
    except InvalidAction as error:
        assert all(move in str(error) for move in MOVES)
        assert world.state_key() == before
    else:
        assert any(move in text.lower() for move in MOVES)


@pytest.mark.parametrize("think", THINK)
@pytest.mark.parametrize("player", PLAYERS)
def test_a_tokenizer_made_from_the_corpus_reads_one_token_a_cell_and_a_word(tmp_path, think, player):
    tokenizer = Tokenizer.from_file(str(make_tiny(tmp_path, FrozenLake.corpus()) / "tokenizer.json"))
    world = opened(FrozenLake.task("heldout", 3), think=think, player=player)
    observation = world.reset(FrozenLake.task("heldout", 4))
    status, *rows = observation.split("\n")
    digits = sum(character.isdigit() for character in status)
    grid = 4 * (1 + 4)  # four rows: a line feed and four cells
    assert len(rows) == 4
    assert len(tokenizer.encode(observation).ids) == len(status.split()) + digits + grid
    message = world.play(random.Random(0), noise=0.0)
    words = message.replace("<think>", "").replace("</think>", "").split()
    assert len(tokenizer.encode(message).ids) == 2 + len(words)
    with pytest.raises(InvalidAction) as invalid:
        world.step("?")
    assert len(tokenizer.encode(str(invalid.value)).ids) == 5 + len(status.split()) + digits + grid


@pytest.mark.parametrize(
    ("think", "message"),
    [
        ("none", "<think></think> down"),
        ("safe", "<think>safe right up down</think> down"),
        ("plan", "<think>safe right up down so down</think> down"),
    ],
)
def test_the_player_says_what_helps_to_act(think, message):
    world = opened(FrozenLake.task("train", 0), think=think)
    world.holes, world.goal, world.at = frozenset({(1, 1)}), (3, 0), (1, 2)
    assert world.play(random.Random(0), noise=0.0) == message


def test_noise_and_naivety_cost_the_player_success():
    scores = {
        (player, noise): player_score(FrozenLake, {"player": player}, n=200, noise=noise).success
        for player in PLAYERS
        for noise in (0.0, 0.6)
    }
    assert scores["shortest", 0.0] == 1.0
    assert scores["shortest", 0.0] > scores["careful", 0.0] > scores["greedy", 0.0] > 0.5
    assert all(scores[player, 0.0] > scores[player, 0.6] + 0.1 for player in PLAYERS)


@pytest.mark.parametrize("options", [{"size": 2}, {"size": 11}, {"holes": -0.1}, {"think": "deep"}, {"player": "nobody"}])
def test_options_out_of_range_are_named(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        FrozenLake(**options)


@settings(deadline=None)
@given(st.integers(0, 10_000), st.lists(st.sampled_from(sorted(MOVES)), max_size=8))
def test_progress_is_the_share_of_the_way_that_was_covered_and_changes_nothing_else(seed, moves):
    """On the way from s to t a player earns progress · (d(s) − d(t)) / d(s), whatever it did in between: no loop pays."""
    plain, paid = (opened(Task("x", "frozen_lake", "train", seed), progress=p) for p in (0.0, 0.3))
    distances, way = paid.distances(), paid.distances()[paid.at]
    earned = 0.0
    for move in moves:
        last = paid.at
        one, other = plain.step(move), paid.step(move)
        assert (one.text, one.done, one.success, one.parts) == (other.text, other.done, other.success, {})
        assert other.reward == pytest.approx(sum(other.parts.values()))
        assert other.reward - other.parts["progress"] == pytest.approx(one.reward)
        earned += other.parts["progress"]
        at = last if paid.at in paid.holes else paid.at
        assert earned == pytest.approx(0.3 * (way - distances[at]) / way)
        if other.done:
            assert other.parts["outcome"] == one.reward
            break
    assert earned <= 0.3 + 1e-9


def test_progress_out_of_range_is_refused():
    with pytest.raises(ValueError, match="progress is -1; it is a reward from 0 to 1"):
        FrozenLake(progress=-1)
