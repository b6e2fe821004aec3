"""TextWorld's quests: the same games everywhere, admissible commands only, progress that no loop earns."""

import random
from importlib.util import find_spec

import pytest

from troupe.envs import registry
from troupe.envs.adapters.textworld import Quests, _made
from troupe.envs.check import check, player_score
from troupe.protocol.errors import ConfigError, InvalidAction

needs_package = pytest.mark.skipif(
    find_spec("textworld") is None, reason="the package textworld is missing: pip install 'troupe-rl[textworld]'"
)
pytestmark = [needs_package, pytest.mark.slow]  # to import it takes seconds
SMALL = {"rooms": 2, "objects": 3, "quest": 2, "games": 3}


def opened(index=0, split="train", **options):
    world = registry.make(Quests, {**SMALL, **options})
    task = Quests.task(split, index)
    world._begin(task)
    return world, world.reset(task)


def test_it_conforms():
    report = check(Quests, {"games": 3}, episodes=3)
    assert report.ok, str(report)


def test_a_game_is_made_by_its_number_and_no_opening_is_in_both_splits():
    openings = {split: [opened(index, split)[1] for index in range(4)] for split in ("train", "heldout")}
    _made.cache_clear()
    assert openings["train"] == [opened(index, "train")[1] for index in range(4)]
    assert openings["train"][3] == openings["train"][0] != openings["train"][1]
    assert not set(openings["train"]) & set(openings["heldout"])


def test_the_quests_own_policy_ends_it_and_is_paid_in_named_parts():
    assert player_score(Quests, SMALL, n=3).reward == 1.0
    world, _ = opened(progress=0.5)
    turns = []
    while not turns or not turns[-1].done:
        turns.append(world.step(world.play(random.Random(0), 0.0)))
    assert sum(turn.parts["progress"] for turn in turns) == pytest.approx(0.5)
    assert [turn.parts["outcome"] for turn in turns] == [0.0] * (len(turns) - 1) + [1.0] and turns[-1].success


def test_going_in_circles_earns_nothing_and_comes_back_to_the_same_state():
    world, _ = opened(progress=1.0)
    start, paid, visited = world.state_key(), 0.0, []
    for there, back in (("take ", "drop "), ("drop ", "take "), ("open ", "close "), ("close ", "open ")):
        command = next((c for c in world._useful() if c.startswith(there) and " from " not in c), None)
        if command is None:
            continue
        for said in (command, back + command.removeprefix(there)):
            turn = world.step(said.upper() + ".")
            if turn.done:
                return
            paid += turn.reward
            visited.append(world.state_key())
        assert visited[-1] == start != visited[-2]
    assert visited and paid == pytest.approx(0.0)


def test_what_is_not_admissible_changes_nothing_and_is_told():
    world, opening = opened()
    before = world.state_key()
    for said in ("", "dance", "go up and away", "x" * 5000):
        with pytest.raises(InvalidAction, match="commands: "):
            world.step(said)
    assert world.state_key() == before and world._shown() in opening
    hidden, opening = opened(commands=False)
    assert "commands:" not in opening
    with pytest.raises(InvalidAction, match="not possible here"):
        hidden.step("dance")


@pytest.mark.parametrize(
    ("options", "reason"),
    [({"rooms": 0}, "rooms is 0; it is 1 to 30"), ({"progress": 2.0}, "from 0 to 1"), ({"room": 2}, "Did you mean 'rooms'?")],
)
def test_wrong_options_are_one_clear_line(options, reason):
    with pytest.raises(ConfigError) as error:
        registry.make(Quests, options)
    assert reason in str(error.value) and "\n" not in str(error.value)
