"""Bugs to mend: issues tell the truth, the player mends them, no module is in both splits."""

import random
import re

import pytest

from troupe.envs.base import Task, belongs, rng_of
from troupe.envs.bugs import _FUNCTIONS
from troupe.envs.check import player_score
from troupe.envs.patches import reward
from troupe.envs.swe_patch import SwePatch, edit


def opened(split="train", seed=0, **options):
    world, task = SwePatch(**options), Task("x", "swe_patch", split, seed)
    world.rng = rng_of(task)
    return world, world.reset(task)


def value(source, call):
    scope = {}
    exec(source, scope)
    return repr(eval(call, scope))


@pytest.mark.parametrize("functions", [1, 2, 4])
def test_what_an_issue_says_is_true_and_the_right_patch_mends_it(functions):
    seen = set()
    for seed in range(150):
        world, observation = opened(seed=seed, functions=functions)
        call, wrong, right = re.match(r"Issue: (.*) gives (.*), but it should be (.*)\.", observation).groups()
        assert value(world.module.before, call) == wrong != right == value(world.module.after, call)
        assert world.module.before in observation and world.module.path in observation
        turn = world.step(world.play(random.Random(0), noise=0.0))
        assert (turn.reward, turn.done, turn.success, turn.text) == (1.0, True, True, "Merged.")
        changed = [
            pair
            for pair in zip(world.module.before.splitlines(), world.module.after.splitlines(), strict=True)
            if len(set(pair)) > 1
        ]
        assert len(changed) == 1
        seen.add(re.sub(r"\w+\(", "(", call) + wrong)
    assert len(seen) > 0.7 * sum(len(kind.bugs) for kind in _FUNCTIONS)


def test_no_module_is_in_both_splits():
    for split in ("train", "heldout"):
        assert all(belongs(opened(split, seed)[0].module.before, split) for seed in range(100))


def test_a_noisy_player_is_graded_as_the_reward_says():
    rewards = set()
    for seed in range(60):
        world, _ = opened(seed=seed)
        message = world.play(random.Random(seed), noise=1.0)
        turn = world.step(message)
        assert (
            turn.reward
            == reward(message, {world.module.path: world.module.before}, {world.module.path: world.module.after})
            == sum(turn.parts.values())
        )
        rewards.add(turn.reward)
    assert -1.0 in rewards and len(rewards) > 10 and player_score(SwePatch, n=40).success == 1.0


def test_an_edit_that_breaks_another_function_too_is_not_merged():
    world, _ = opened(seed=1)
    line = world.module.before.splitlines()[1]
    turn = world.step(edit(world.module.path, [line], ["    pass"]))
    assert turn.success is False and 0.0 < turn.reward < 1.0


@pytest.mark.parametrize("functions", [0, 5])
def test_options_out_of_range_are_refused(functions):
    with pytest.raises(ValueError, match=f"functions is {functions}; it is 1 to 4"):
        SwePatch(functions=functions)
