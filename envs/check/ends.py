"""How a world ends: what it has changed, whether it closes, and what is left of it."""

from __future__ import annotations

import asyncio
import contextlib
from time import perf_counter
from typing import TYPE_CHECKING

from troupe.envs.check.episodes import TOLD, apply
from troupe.envs.check.left import KINDS, Left, look, since
from troupe.envs.check.report import Found
from troupe.protocol.errors import EpisodeError, TimedOut

if TYPE_CHECKING:
    from troupe.envs.check.suite import Suite

_CYCLES = 3  # episodes after which what is left behind is counted again
_SETTLE_S = 1.0  # for what ends by itself after `close`


async def process(suite: Suite) -> Found:
    """What all episodes of a process share, and the options, must be as they were."""
    if suite.options != suite.given:
        return "broken", f"it has changed the options that it was given: {str(suite.given)[:80]} to {str(suite.options)[:80]}"
    if moved := suite.process.moved():
        return "broken", f"the working folder is now {moved}: it is shared by all episodes of a process"
    if drawn := suite.process.drawn():
        told = f"it draws from or seeds {' and '.join(drawn)}, which all episodes of a process share: use self.rng"
        return ("broken" if suite.unsure else "warning"), told
    if variables := suite.process.variables():
        return "warning", f"it has changed environment variables: {', '.join(variables)[:80]}"
    return "ok", ""


async def closes(suite: Suite) -> Found:
    """Before any reset and in the middle of an episode, and each time once more."""
    if suite.close_failed is not None:
        raise suite.close_failed
    for when in ("before any reset", "in the middle of an episode"):
        driver = suite.driver()
        if when != "before any reset":
            await driver.reset(suite.task("train", 0))
            with contextlib.suppress(*TOLD, EpisodeError):
                await apply(driver, suite.played[0].actions[0] if suite.played else "1")
        try:
            await driver.release()
        except EpisodeError as error:
            return "broken", f"{when}: {error}"
        try:
            await driver.close()
        except EpisodeError as error:
            return "broken", f"the second time: {error}"
    return "ok", ""


async def leaves(suite: Suite) -> Found:
    """What there is more of after a few more episodes is leaked; what is there once may be shared by all of them."""
    if isinstance(suite.close_failed, TimedOut):
        return "unknown", "not looked at: it does not close"
    first = look(suite.folder)
    for episode in (suite.played * _CYCLES)[:_CYCLES]:
        async with suite.open() as driver:
            await driver.reset(episode.task)
            with contextlib.suppress(*TOLD, EpisodeError):
                await apply(driver, episode.actions[0])
    grown = since(first, look(suite.folder))
    until = perf_counter() + _SETTLE_S
    while any(len(grown[kind]) >= _CYCLES for kind in KINDS) and perf_counter() < until:
        await asyncio.sleep(0.02)
        grown = since(first, look(suite.folder))
    for kind in KINDS:
        if len(grown[kind]) >= _CYCLES:
            return "broken", f"{len(grown[kind])} more after {_CYCLES} closed episodes: {kind} {_some(grown, kind)}"
    left = since(suite.before, look(suite.folder))
    if left["process"]:
        return "broken", f"still running: process {_some(left, 'process')}"
    for kind in ("thread", "temporary file"):
        if left[kind]:
            return "warning", f"once, perhaps for all episodes together: {kind} {_some(left, kind)}"
    return "ok", ""


def _some(left: Left, kind: str) -> str:
    names = sorted(set(left[kind].values()))
    return ", ".join(names[:3]) + (" …" if len(names) > 3 else "")
