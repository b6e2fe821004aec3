"""Tool calls as text: every request can be met, the reward is the sum of its parts, no request is in both splits."""

import json
import random

import pytest

from troupe.envs.base import Task, rng_of
from troupe.envs.check import player_score
from troupe.envs.tool_calls import ToolCalls, read, written
from troupe.envs.tool_grading import ToolCall


def opened(split="train", seed=0, **options):
    world, task = ToolCalls(**options), Task("x", "tool_calls", split, seed)
    world.rng = rng_of(task)
    return world, world.reset(task)


@pytest.mark.parametrize("split", ["train", "heldout"])
def test_the_reference_earns_format_and_correctness_and_is_asked_for_in_the_request(split):
    for seed in range(100):
        world, request = opened(split, seed, calls=4)
        for call in world.reference:
            assert all(str(value) in request for value in call.arguments.values())
            assert call.name in world.system
        turn = world.step(world.play(random.Random(0), noise=0.0))
        assert (turn.reward, turn.done, turn.success) == (4.0, True, True)
        assert sum(turn.parts.values()) == pytest.approx(4.0)


def test_no_request_is_in_both_splits():
    keys = {s: {str(sorted(map(str, opened(s, i)[0].reference))) for i in range(400)} for s in ("train", "heldout")}
    assert not keys["train"] & keys["heldout"]


def test_a_wrong_value_costs_its_share():
    world, _ = opened()
    world.reference = [ToolCall("turn_on", {"device": "lamp", "room": "kitchen"})]
    turn = world.step(written([ToolCall("turn_on", {"device": "lamp", "room": "office"})]))
    assert turn.reward == pytest.approx(1 + 6 * 3 / 4 - 3) and turn.success is False
    assert turn.parts == pytest.approx({"format": 1, "lowest": -3, "names": 1.5, "arguments": 1.5, "values": 1.5})


@pytest.mark.parametrize(
    "message",
    [
        "",
        "turn on the lamp",
        "<calls>\n</calls>",
        "<calls>\n\n</calls>x",
        "<calls>\n{broken\n</calls>",
        '<calls>\n{"name": 3, "arguments": {}}\n</calls>',
        '<calls>\n{"name": "play"}\n</calls>',
        '<calls>\n{"name": "play", "arguments": {}, "why": 1}\n</calls>',
        '<calls>\n["play"]\n</calls>',
        "<calls>\n" + "[" * 3000 + "\n</calls>",
        "<calls>\n" + "9" * 3900 + "\n</calls>",
        "<calls>\n" + "\n".join(['{"name": "f", "arguments": {}}'] * 9) + "\n</calls>",
    ],
)
def test_what_cannot_be_read_has_no_format_and_the_lowest_correctness(message):
    world, _ = opened()
    turn = world.step(message)
    assert turn.reward <= -2.0 and turn.done and turn.success is False and turn.parts["format"] == 0.0


def test_words_around_the_calls_cost_the_format_and_no_more():
    world, _ = opened()
    turn = world.step(f"Of course!\n{written(world.reference)}")
    assert (turn.reward, turn.parts["format"], turn.success) == (3.0, 0.0, False)


def test_calls_are_read_as_they_are_written():
    made = [ToolCall("f", {"x": [1, {"y": None}]}), ToolCall("g", {})]
    assert read(written(made)) == (made, True)
    assert json.loads(written(made).splitlines()[1]) == {"name": "f", "arguments": {"x": [1, {"y": None}]}}


def test_the_player_is_right_unless_it_is_noisy():
    assert player_score(ToolCalls, n=50).reward == 4.0
    assert 0.0 < player_score(ToolCalls, n=100, noise=0.7).reward < 3.9


@pytest.mark.parametrize("calls", [0, 5])
def test_options_out_of_range_are_refused(calls):
    with pytest.raises(ValueError, match=f"calls is {calls}; it is 1 to 4"):
        ToolCalls(calls=calls)
