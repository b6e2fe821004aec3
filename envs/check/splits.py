"""Whether a held-out task is in training: tasks are the same if they open alike, have one state, and go on alike.

Promise: of a world that does not tell its states, only tasks that the same actions win are called the same.
"""

from __future__ import annotations

import json
import random
from time import perf_counter
from typing import TYPE_CHECKING, Literal

from troupe.envs.base import SPLITS, TextWorld
from troupe.envs.check.episodes import play, player_or_guesser, replayed
from troupe.envs.check.report import Found

if TYPE_CHECKING:
    from troupe.envs.check.suite import Suite

_SAMPLE = 50  # tasks a split whose first observations are compared
_Pair = tuple[str, int, int]  # what was seen in both splits, and the number of a task of each
_PAIRS = 10  # tasks that open alike, and are played to see whether they are


async def splits(suite: Suite) -> Found:
    """By their states, if they have any; else the same actions have to win in both splits, to be called the same task."""
    seen: dict[str, list[tuple[str, str]]] = {split: [] for split in SPLITS}
    began = perf_counter()
    async with suite.open() as driver:
        if driver.world.recurring:
            return "unknown", "tasks differ in luck alone, as the world says, so an opening does not tell them apart"
        tells = type(driver.world).state is not TextWorld.state
        for index in range(_SAMPLE):
            for split in SPLITS:
                text = await driver.reset(suite.task(split, index))
                state = json.dumps(await driver.state(), sort_keys=True) if tells else ""
                seen[split].append((text, state))
            if perf_counter() - began > suite.share_s:
                break
    looked = len(seen["train"])
    pairs = _shared({split: [text for text, _ in seen[split]] for split in SPLITS})
    if not pairs:
        return "ok", f"{looked} tasks of each compared"
    if len({state for split in SPLITS for _, state in seen[split]}) > 1:  # else it says nothing of a task
        return await _by_state(suite, seen)
    told, on = f"both splits open with {pairs[0][0][:80]!r}", await _go_on(suite, pairs)
    if on == "differently":
        return "unknown", f"{told} and go on differently, so they cannot be told apart: define state()"
    if len({text for split in SPLITS for text, _ in seen[split]}) == 1:
        return "warning", "all tasks look and go on alike: if they are one, a held-out score says nothing"
    if on == "won":
        return "broken", f"{told}, and the same actions win: split by what a task is, with troupe.envs.base.belongs"
    return "unknown", (
        f"{told} and go on alike as far as they were played: split by what a task is, with troupe.envs.base.belongs, and if "
        "that is done already, define state()"
    )


async def _by_state(suite: Suite, seen: dict[str, list[tuple[str, str]]]) -> Found:
    pairs = _shared({split: [text + state for text, state in seen[split]] for split in SPLITS})
    if not pairs:
        return "ok", f"{len(seen['train'])} tasks of each told apart by state()"
    told = f"both splits have the state {pairs[0][0][:120]!r}"
    if await _go_on(suite, pairs) == "differently":
        return "unknown", f"{told} and go on differently: define state() so that it tells what is hidden"
    return "broken", told


def _shared(seen: dict[str, list[str]]) -> list[_Pair]:
    """Tasks of both splits of which the same was seen."""
    first = {text: index for index, text in reversed([*enumerate(seen["train"])])}
    return sorted((text, first[text], index) for index, text in enumerate(seen["heldout"]) if text in first)


async def _go_on(suite: Suite, pairs: list[_Pair]) -> Literal["alike", "won", "differently"]:
    """How both tasks of the pairs do with the same actions. "won": alike, and in one of them to their success."""
    won, began = False, perf_counter()
    for number, (_, train, heldout) in enumerate(pairs[:_PAIRS]):
        async with suite.open() as driver:
            one = await play(driver, suite.task("train", train), player_or_guesser(driver, random.Random(number), 0.0))
        async with suite.open() as driver:
            try:
                other = await play(driver, suite.task("heldout", heldout), replayed(one.actions), one.turns)
            except IndexError:
                return "differently"
        if one.seen != other.seen:
            return "differently"
        won = won or one.success
        if perf_counter() - began > suite.share_s:
            break
    return "won" if won else "alike"
