"""Stockroom: the tools tell the truth, two or three calls are enough, no question is in both splits."""

import asyncio
import re

import pytest

from troupe.envs.base import Task
from troupe.envs.drive import Driver
from troupe.envs.stockroom import Stockroom
from troupe.protocol.errors import BadArguments, InvalidAction


async def opened(split="train", seed=0, **options):
    driver = Driver(Stockroom(**options))
    return driver, await driver.reset(Task("x", "stockroom", split, seed))


async def solve(driver, question):
    """(calls made, the turn that ended the episode)."""
    item, places = re.fullmatch(r"How many (.*)s are there in the (.*) warehouses?\?", question).groups()
    found = await driver.call("find_item", {"name": item})
    stock = [driver.call("stock", {"item_id": found.text, "warehouse": place}) for place in places.split(" and the ")]
    counts = [int(turn.text) for turn in await asyncio.gather(*stock)]
    return 1 + len(counts), await driver.step(f"{sum(counts)}")


@pytest.mark.parametrize("split", ["train", "heldout"])
async def test_two_or_three_calls_are_enough_for_every_question(split):
    needed = set()
    for seed in range(50):
        calls, turn = await solve(*await opened(split, seed))
        needed.add(calls)
        assert (turn.done, turn.success, turn.reward, turn.parts) == (True, True, 1.0, {"outcome": 1.0})
    assert needed == {2, 3}


async def test_no_question_is_in_both_splits_and_no_answer_can_be_learnt_by_heart():
    questions = {s: [(await opened(s, seed))[1] for seed in range(400)] for s in ("train", "heldout")}
    assert not set(questions["train"]) & set(questions["heldout"])
    answers = {}
    for seed, question in enumerate(questions["train"]):
        answers.setdefault(question, set()).add((await opened("train", seed))[0].world.total)
    assert any(len(totals) > 1 for totals in answers.values())


@pytest.mark.parametrize("wrong", ["", "none", "{total} or 3", "{total} {total}", "9" * 5000, "-{total}9", "1{total}"])
async def test_anything_but_the_one_right_number_earns_nothing(wrong):
    driver, _ = await opened()
    turn = await driver.step(wrong.format(total=driver.world.total))
    assert turn.done and turn.reward == 0.0 and turn.success is False


async def test_an_episode_that_a_limit_ends_earns_nothing():
    driver, _ = await opened()
    assert (await driver.verify()).reward == 0.0


async def test_wrong_calls_are_told():
    driver, _ = await opened()
    with pytest.raises(InvalidAction, match="there is no 'lamp'"):
        await driver.call("find_item", {"name": "lamp"})
    with pytest.raises(InvalidAction, match="no item has the id 'A1'"):
        await driver.call("stock", {"item_id": "A1", "warehouse": "north"})
    with pytest.raises(BadArguments, match="argument 'warehouse'"):
        await driver.call("stock", {"item_id": "A1", "warehouse": "west"})


async def test_the_state_key_is_what_is_known():
    driver, question = await opened()
    first = driver.state_key()
    await solve(driver, question)
    other, _ = await opened()
    assert first == other.state_key() != driver.state_key()


@pytest.mark.parametrize("options", [{"items": 1}, {"items": 41}, {"largest": 0}])
def test_options_out_of_range_are_refused(options):
    with pytest.raises(ValueError, match="it is"):
        Stockroom(**options)


async def test_the_smallest_and_the_largest_stockroom_can_be_played():
    for items in (2, 40):
        assert (await solve(*await opened("heldout", 3, items=items)))[1].success
