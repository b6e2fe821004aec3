"""Whether a held-out task is in training: tasks are the same if they open alike and, played alike, go on alike."""

from __future__ import annotations

import json
import random
from time import perf_counter
from typing import TYPE_CHECKING

from troupe.envs.base import SPLITS, TextWorld
from troupe.envs.check.episodes import play, player_or_guesser, replayed
from troupe.envs.check.report import Found

if TYPE_CHECKING:
    from troupe.envs.check.suite import Suite

_SAMPLE = 50  # tasks a split whose first observations are compared
_PAIRS = 10  # tasks that open alike, and are played to see whether they are


async def splits(suite: Suite) -> Found:
    """Tasks are the same if they open alike and, played alike, go on alike."""
    opens: dict[str, dict[str, int]] = {split: {} for split in SPLITS}
    states: dict[str, dict[str, int]] = {split: {} for split in SPLITS}
    pairs: list[tuple[int, int]] = []
    began, looked = perf_counter(), 0
    async with suite.open() as driver:
        if driver.world.recurring:
            return "unknown", "tasks differ in luck alone, as the world says, so an opening does not tell them apart"
        for index in range(_SAMPLE):
            for split in SPLITS:
                text = await driver.reset(suite.task(split, index))
                opens[split].setdefault(text, index)
                if type(driver.world).state is not TextWorld.state:
                    states[split][text + json.dumps(await driver.state(), sort_keys=True)] = index
                if split == "heldout" and text in opens["train"]:
                    pairs.append((opens["train"][text], index))
            looked += 1
            if perf_counter() - began > suite.share_s:
                break
    shared = opens["train"].keys() & opens["heldout"].keys()
    if not shared:
        return "ok", f"{looked} tasks of each compared"
    told = f"both splits open with {min(shared)[:80]!r}"
    alike = all([await _go_on_alike(suite, *pair) for pair in pairs[:_PAIRS]])
    if alike and len(opens["train"].keys() | opens["heldout"].keys()) > 1:
        return "broken", f"{told}, and go on alike: split by what a task is, with troupe.envs.base.belongs"
    same = states["train"].keys() & states["heldout"].keys()
    if same:
        return "broken", f"both splits have the state {min(same)[:120]!r}"
    if states["train"]:
        return "ok", f"{looked} tasks of each told apart by state()"
    if alike:
        return "warning", "all tasks look and go on alike: if they are one, a held-out score says nothing"
    return "unknown", f"{told} and go on differently, so they cannot be told apart: define state()"


async def _go_on_alike(suite: Suite, train: int, heldout: int) -> bool:
    async with suite.open() as driver:
        one = await play(driver, suite.task("train", train), player_or_guesser(driver, random.Random(0)))
    async with suite.open() as driver:
        try:
            other = await play(driver, suite.task("heldout", heldout), replayed(one.actions), one.turns)
        except IndexError:
            return False
    return one.seen == other.seen
