"""The same episode again: at once, in another process, after another one, and beside others."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from troupe.envs.check.episodes import TOLD, Episode, Playing, apply, play, replayed
from troupe.envs.check.others import difference
from troupe.envs.check.report import Found
from troupe.envs.drive import Driver
from troupe.protocol.errors import EpisodeError, NotReady

if TYPE_CHECKING:
    from troupe.envs.check.suite import Suite

REPLAYS = "same task and actions give the same episode"
_BESIDE = 8  # worlds at once


async def replays(suite: Suite) -> Found:
    """In a new world of this process."""
    for episode in suite.played:
        async with suite.open() as driver:
            found = await _again(episode, driver)
        if found:
            suite.unsure = True
            return "broken", found
    return "ok", ""


async def elsewhere(suite: Suite) -> Found:
    """In processes with other hash seeds and other clocks."""
    if suite.others.missing:
        return "unknown", suite.others.missing
    try:
        found = await suite.others.differ(suite.played, suite.first_s)
    except NotReady as error:
        return "unknown", f"not judged: {error}"
    except EpisodeError as error:
        return "broken", f"in another process it breaks: {error}"
    finally:
        suite.others.close()
    same_here = not suite.is_broken(REPLAYS)
    if found:
        return (
            "broken",
            f"{found} (the order of a set, hash(), id(), the clock or the process itself)" if same_here else found,
        )
    if not same_here:
        suite.add(REPLAYS, "a new process gives the first one again: something outlives an episode, such as a class "
                  "attribute, a mutable default or a global")  # fmt: skip
    return "ok", ""


async def leaks(suite: Suite) -> Found:
    """One instance, and each episode after another one that was left in the middle."""
    async with suite.open() as driver:
        for episode in suite.played[::-1]:
            await _abandoned(suite, driver)
            found = await _again(episode, driver)
            if found:
                return "broken", found
    return "ok", ""


async def _abandoned(suite: Suite, driver: Driver) -> None:
    episode = suite.played[0]
    await driver.reset(episode.task)
    for action in ("\x00", *episode.actions[:1]):
        with contextlib.suppress(*TOLD, EpisodeError):
            if (await apply(driver, action)).done:
                break


async def beside(suite: Suite) -> Found:
    """First turn by turn, one after the other; then each as fast as it can."""
    played = suite.played[:_BESIDE]
    async with contextlib.AsyncExitStack() as stack:
        drivers = [await stack.enter_async_context(suite.open()) for _ in played]
        try:
            for found in (await _in_turns(played, drivers), await _at_once(played, drivers)):
                if found:
                    suite.unsure = True
                    return "broken", found
        except IndexError:
            return "broken", "an episode was longer beside others"
    return "ok", f"{len(played)} at once"


async def _in_turns(played: list[Episode], drivers: list[Driver]) -> str:
    games = [Playing(d, e.task, replayed(e.actions), e.turns) for e, d in zip(played, drivers, strict=True)]
    for game in games:
        await game.begin()
    active = games
    while active:
        active = [game for game in active if await game.turn()]
    found = [_differs(was, await game.end()) for was, game in zip(played, games, strict=True)]
    return next(filter(None, found), "")


async def _at_once(played: list[Episode], drivers: list[Driver]) -> str:
    again = [_again(episode, driver) for episode, driver in zip(played, drivers, strict=True)]
    results = await asyncio.gather(*again, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return next((found for found in results if isinstance(found, str) and found), "")


# -- helpers -----------------------------------------------------------------------------------------------------------


async def _again(episode: Episode, driver: Driver) -> str:
    """How the same actions came out otherwise; empty if they did not."""
    try:
        again = await play(driver, episode.task, replayed(episode.actions), episode.turns)
    except IndexError:  # the episode went on where it had ended before
        return f"task {episode.task.id}: longer the second time"
    return _differs(episode, again)


def _differs(was: Episode, now: Episode) -> str:
    found = difference(was.seen, now.seen)
    return f"task {was.task.id}, seed {was.task.seed}: {found[0]} then {found[1]}" if found else ""
