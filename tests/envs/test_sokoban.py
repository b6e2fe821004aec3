"""Sokoban: solvable by construction, reproducible, held out by the room, paid as gym-sokoban pays, one token a cell."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from troupe.envs.base import Task, action_of, belongs, rng_of
from troupe.envs.check import player_score
from troupe.envs.sokoban import MOVES, THINK, Sokoban
from troupe.learner.tiny import make_tiny
from troupe.protocol.errors import InvalidAction, TaskFailed

SIZES = [{}, {"size": 5}, {"boxes": 2}, {"boxes": 3}, {"size": 7, "walls": 0.4}]


def opened(task: Task, **options) -> Sokoban:
    world = Sokoban(**options)
    world.rng = rng_of(task)
    world.reset(task)
    return world


def drawn(*rows: str, **options) -> Sokoban:
    """The room of a picture."""
    world = Sokoban(size=len(rows), **options)
    cells = {(row, column): symbol for row, line in enumerate(rows) for column, symbol in enumerate(line)}
    world.floor = frozenset(cell for cell, symbol in cells.items() if symbol != "#")
    world.targets = frozenset(cell for cell, symbol in cells.items() if symbol in "O*S")
    world.boxes = frozenset(cell for cell, symbol in cells.items() if symbol in "X*")
    world.at = next(cell for cell, symbol in cells.items() if symbol in "PS")
    world.left = world.distances()
    return world


def fewest_moves(world: Sokoban) -> int:
    """Searched forwards, with the moves of the world itself."""
    start = world.at, world.boxes
    layer, seen, moves = {start}, {start}, 0
    while all(boxes != world.targets for _, boxes in layer):
        beyond = set()
        for world.at, world.boxes in layer:
            beyond |= {world._after(move) for move in MOVES}
        layer = beyond - seen
        seen |= layer
        moves += 1
        assert layer, "the room cannot be solved"
    world.at, world.boxes = start
    return moves


@pytest.mark.parametrize("options", SIZES)
@pytest.mark.parametrize("split", ["train", "heldout"])
def test_every_room_can_be_solved_within_the_turns_and_not_at_once(split, options):
    for index in range(12):
        world = opened(Sokoban.task(split, index), **options)
        assert len(world.boxes) == len(world.targets) == options.get("boxes", 1) and not world.boxes & world.targets
        fewest = fewest_moves(world)
        assert 2 <= fewest <= world.max_turns and fewest == world.left[world.at, world.boxes]
        for turn in range(1, fewest + 1):
            result = world.step(action_of(world.play(random.Random(turn), noise=0.0)))
            assert result.done is (turn == fewest)
        assert result.success is True and world.boxes == world.targets


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 2**31), st.integers(0, 2**31))
def test_no_training_room_is_held_out_whatever_the_seeds(train_seed, heldout_seed):
    trained = opened(Task("a", "sokoban", "train", train_seed))
    held_out = opened(Task("b", "sokoban", "heldout", heldout_seed))
    assert belongs(trained.room, "train") and belongs(held_out.room, "heldout")
    assert trained.room != held_out.room


def test_the_split_does_not_depend_on_what_moves():
    world = opened(Sokoban.task("heldout", 0))
    before = world.room
    for _ in range(6):
        world.step(action_of(world.play(random.Random(0), noise=0.5)))
    world.at, world.boxes = (1, 1), frozenset({(2, 2)})
    assert world.room == before


def test_the_solutions_are_as_long_in_both_splits():
    mean = {
        split: sum((w := opened(Sokoban.task(split, n))).left[w.at, w.boxes] for n in range(300)) / 300
        for split in ("train", "heldout")
    }
    assert mean["train"] == pytest.approx(mean["heldout"], abs=0.8) and mean["train"] > 4


def test_an_unknown_split_is_a_task_that_fails():
    with pytest.raises(TaskFailed, match="unknown split 'test'"):
        opened(Task("x", "sokoban", "test", 0))


@settings(deadline=None, max_examples=50)
@given(st.integers(0, 10_000), st.lists(st.sampled_from(sorted(MOVES)), max_size=12), st.integers(1, 3))
def test_an_episode_is_its_task_and_its_actions(seed, moves, boxes):
    def episode():
        world = opened(Task("x", "sokoban", "train", seed), boxes=boxes)
        seen = [world.state_key()]
        for move in moves:
            turn = world.step(move)
            seen.append((turn.text, turn.reward, turn.done, turn.parts, world.state_key()))
            if turn.done:
                break
        return seen

    assert episode() == episode()


def test_an_observation_says_where_boxes_and_targets_are():
    world = drawn("######", "#_PX_#", "#___O#", "#_#__#", "#____#", "######")
    assert world.step("up").text == (
        "stayed box right1 target right1 down1 left floor right box up wall down floor\n"
        " # # # # # #\n # _ P X _ #\n # _ _ _ O #\n # _ # _ _ #\n # _ _ _ _ #\n # # # # # #"
    )


def test_a_box_is_pushed_and_paid_by_name_but_never_pulled():
    world = drawn("#######", "#PXOX_#", "#____O#", "#_____#", "#_____#", "#_____#", "#######", boxes=2)
    on = world.step("right")
    assert on.parts == {"step": -0.1, "box_on_target": 1.0} and on.reward == pytest.approx(0.9) and not on.done
    assert world.state_key().split("/")[1] == "#_P*X_#" and on.text.startswith("pushed box right2 target right1 down1 ")
    blocked = world.step("right")  # two boxes in a row do not move
    assert blocked.text.startswith("stayed") and blocked.parts == {"step": -0.1}
    away = world.step("left")
    assert away.text.startswith("moved") and world.state_key().split("/")[1] == "#P_*X_#"
    world = drawn("######", "#P*__#", "#___O#", "#____#", "#___X#", "######", boxes=2)
    off = world.step("right")
    assert off.parts == {"step": -0.1, "box_off_target": -1.0} and world.state_key().split("/")[1] == "#_SX_#"


def test_the_last_box_in_its_place_ends_the_episode():
    end = drawn("######", "#____#", "#PXO_#", "#____#", "#____#", "######").step("right")
    assert (end.text, end.done, end.success) == ("solved", True, True)
    assert end.parts == {"step": -0.1, "box_on_target": 1.0, "finished": 10.0} and end.reward == pytest.approx(10.9)


def test_what_is_paid_can_be_chosen():
    options = {"step": 0.0, "box_on_target": 0.0, "box_off_target": -3.0, "finished": 1.0}
    world = drawn("######", "#____#", "#PXO_#", "#____#", "#____#", "######", **options)
    assert world.step("up").reward == 0.0
    world.step("down")
    assert world.step("right").reward == 1.0


@pytest.mark.parametrize(("text", "to"), [("down", (2, 2)), (" LEFT.\n", (1, 1)), ("not sure; Down then left", (2, 2))])
def test_the_first_known_word_is_the_move(text, to):
    world = drawn("######", "#_P__#", "#____#", "#_XO_#", "#____#", "######")
    world.step(text)
    assert world.at == to


@settings(max_examples=100, deadline=None)
@given(st.text())
def test_what_is_no_move_is_invalid_and_changes_nothing(text):
    world = drawn("######", "#_P__#", "#____#", "#_XO_#", "#____#", "######")
    before = world.state_key()
    try:
        world.step(text)
    except InvalidAction as error:
        assert all(move in str(error) for move in MOVES) and world.state_key() == before
    else:
        assert any(move in text.lower() for move in MOVES)


@pytest.mark.parametrize("boxes", [1, 2])
@pytest.mark.parametrize("think", THINK)
def test_a_tokenizer_made_from_the_corpus_reads_one_token_a_cell_and_a_word(tmp_path, think, boxes):
    tokenizer = Tokenizer.from_file(str(make_tiny(tmp_path, Sokoban.corpus()) / "tokenizer.json"))
    for picture in ("#P_X*#", "#SOX*#"):
        world = drawn("######", picture, "#__OO#", "#____#", "#X___#", "######", think=think, boxes=boxes)
        status, *rows = world._observation("pushed").split("\n")
        digits = sum(character.isdigit() for character in status)
        assert len(tokenizer.encode(world._observation("pushed")).ids) == len(status.split()) + digits + 6 * (1 + 6)
        message = world.play(random.Random(0), noise=0.0)
        words = message.replace("<think>", "").replace("</think>", "").split()
        assert len(rows) == 6 and len(tokenizer.encode(message).ids) == 2 + len(words)


@pytest.mark.parametrize(
    ("row", "think", "message"),
    [
        ("#PXO_#", "plan", "<think>push right</think> right"),
        ("#PXO_#", "none", "<think></think> right"),
        ("#P_XO#", "plan", "<think>walk right</think> right"),
    ],
)
def test_the_player_says_what_helps_to_act(row, think, message):
    world = drawn("######", "######", row, "######", "######", "######", think=think)
    assert world.play(random.Random(0), noise=0.0) == message


def test_the_player_says_that_a_room_is_lost():
    world = drawn("######", "#X_P_#", "#__O_#", "#____#", "#____#", "######")
    assert world.play(random.Random(0), noise=0.0).startswith("<think>lost ")


def test_noise_costs_the_player_success():
    sure, unsure = (player_score(Sokoban, {}, n=100, noise=noise).success for noise in (0.0, 0.6))
    assert sure == 1.0 and 0.1 < unsure < 0.7


@pytest.mark.parametrize(
    "options",
    [
        {"size": 4},
        {"size": 11},
        {"boxes": 0},
        {"boxes": 4},
        {"boxes": 3, "size": 5},
        {"walls": 0.6},
        {"walls": float("nan")},
        {"think": "deep"},
        {"step": float("nan")},
        {"finished": 101},
    ],
)
def test_options_out_of_range_are_named(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        Sokoban(**options)


def test_a_room_that_cannot_be_is_a_task_that_fails(monkeypatch):
    monkeypatch.setattr(Sokoban, "max_turns", 1)
    monkeypatch.setattr("troupe.envs.sokoban._DRAWS", 5)
    with pytest.raises(TaskFailed, match=r"no solvable room of size 6 with boxes 1 and walls 0\.2 in 5 draws"):
        opened(Sokoban.task("train", 0))
