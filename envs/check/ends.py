"""How a world ends: what it has changed, whether it closes, and what is left of it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
from time import perf_counter
from typing import TYPE_CHECKING

from troupe.envs.check.again import replays
from troupe.envs.check.episodes import TOLD, apply
from troupe.envs.check.left import KINDS, Left, Watch, look, since
from troupe.envs.check.report import Found
from troupe.protocol.errors import EpisodeError, TimedOut

if TYPE_CHECKING:
    from troupe.envs.check.suite import Suite

_REPEATED = 3  # of a kind: no longer one for all episodes together
_GROWS_MB = 1.0  # an episode
_SETTLE_S = 1.0  # for what ends by itself after `close`


async def process(suite: Suite) -> Found:
    """What all episodes of a process share, and the options, must be as they were."""
    if suite.options != suite.given:
        return "broken", f"it has changed the options that it was given: {str(suite.given)[:80]} to {str(suite.options)[:80]}"
    if changed := suite.process.changed(grave=True):
        return "broken", f"it has changed what all episodes of a process share: {_first(changed)}"
    if drawn := suite.process.drawn():
        told = f"it draws from or seeds {' and '.join(drawn)}, which all episodes of a process share: use self.rng"
        return ("broken" if suite.unsure else "warning"), told
    if changed := suite.process.changed(grave=False):
        return "warning", f"it has changed what all episodes of a process share: {_first(changed)}"
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
    """What there was more of after all episodes had been played once more is leaked; what is there once may be shared."""
    if isinstance(suite.close_failed, TimedOut):
        return "unknown", "not looked at: it does not close"
    gc.collect()  # of a world that nobody holds, and then an end of one, at which others let go of what they shared
    async with suite.open() as driver:
        with contextlib.suppress(*TOLD, EpisodeError):
            await driver.reset(suite.played[0].task)
            await apply(driver, suite.played[0].actions[0])
    until = perf_counter() + _SETTLE_S
    leaked, left = _left(suite)
    while (leaked or left["process"]) and perf_counter() < until:
        await asyncio.sleep(0.02)
        leaked, left = _left(suite)
    if leaked:
        return "broken", leaked
    if len(left["open file"]) >= max(_REPEATED, len(suite.played)):
        return "warning", f"{len(left['open file'])} in all, perhaps one a task: open file {_some(left, 'open file')}"
    for kind in ("process", "thread", "asyncio task", "temporary file"):
        if left[kind]:
            return "warning", f"once, perhaps for all episodes together: {kind} {_some(left, kind)}"
    if suite.watch.megabytes >= _GROWS_MB and (more := await _grows(suite)) >= _GROWS_MB:
        return "warning", f"it takes {more:.0f} MB of memory with each of its episodes, and does not give them back"
    return "ok", ""


def _left(suite: Suite) -> tuple[str, Left]:
    """What was left of the episodes that were played once more, and not for the first time, in words; and all that is left."""
    now = look(suite.folder)
    left, still = since(suite.before, now), suite.watch.still(now)
    for kind in KINDS:
        if still[kind] and len(left[kind]) >= _REPEATED:
            count = f"{len(still[kind])} more after {suite.watch.episodes} closed episodes, {len(left[kind])} in all"
            return f"{count}: {kind} {_some(still, kind)}", left
    return "", left


async def _grows(suite: Suite) -> float:
    """MB with each episode, all of them played again: what grew at first may be kept for what comes next."""
    with Watch(suite.folder) as watch:
        await replays(suite, watch)
    return watch.megabytes


def _some(left: Left, kind: str) -> str:
    return _first(sorted(set(left[kind].values())))


def _first(names: list[str]) -> str:
    return ", ".join(names[:3]) + (" …" if len(names) > 3 else "")
