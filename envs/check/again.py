"""The same episode again: at once, in another process, and after another one."""

from __future__ import annotations

import contextlib
from typing import TYPE_CHECKING

from troupe.envs.check.episodes import TOLD, Episode, apply, play, replayed
from troupe.envs.check.left import Watch
from troupe.envs.check.others import difference
from troupe.envs.check.report import Found
from troupe.envs.drive import Driver
from troupe.protocol.errors import EpisodeError, NotReady

if TYPE_CHECKING:
    from troupe.envs.check.suite import Suite

REPLAYS = "same task and actions give the same episode"


async def replays(suite: Suite, watch: Watch) -> Found:
    """In a new world of this process. watch: counts them."""
    with watch:
        for episode in suite.played:
            async with suite.open() as driver:
                found = await once_more(episode, driver)
            watch.episodes += 1
            if found:
                suite.unsure = True
                return "broken", found
    return "ok", ""


async def elsewhere(suite: Suite) -> Found:
    """In processes with other hash seeds and other clocks; the last ones first, so that what one has left is another's."""
    if suite.others.missing:
        return "unknown", suite.others.missing
    try:
        found, suite.leaked = await suite.others.differ([*suite.played, *suite.otherwise], suite.first_s)
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
    """One instance, and each episode after one that was left in the middle, of the same task if it was played otherwise."""
    if suite.leaked:
        return "broken", f"{suite.leaked}, where the episodes were played in another order"
    otherwise = {episode.task.id: episode for episode in suite.otherwise}
    async with suite.open() as driver:
        for episode in suite.played[::-1]:
            await _abandoned(otherwise.get(episode.task.id, suite.played[0]), driver)
            found = await once_more(episode, driver)
            if found:
                return "broken", found
    return "ok", ""


async def _abandoned(episode: Episode, driver: Driver) -> None:
    await driver.reset(episode.task)
    for action in ("\x00", *episode.actions[:1]):
        with contextlib.suppress(*TOLD, EpisodeError):
            if (await apply(driver, action)).done:
                break


# -- helpers -----------------------------------------------------------------------------------------------------------


async def once_more(episode: Episode, driver: Driver) -> str:
    """How the same actions came out otherwise; empty if they did not."""
    try:
        again = await play(driver, episode.task, replayed(episode.actions), episode.turns)
    except IndexError:  # the episode went on where it had ended before
        return f"task {episode.task.id}: longer the second time"
    return differs(episode, again)


def differs(was: Episode, now: Episode) -> str:
    """Where the two come apart; empty if they do not."""
    found = difference(was.seen, now.seen)
    return f"task {was.task.id}, seed {was.task.seed}: {found[0]} then {found[1]}" if found else ""
