"""Worlds side by side, some of them on one task, as the episodes of a group are."""

from __future__ import annotations

import asyncio
import contextlib
from typing import TYPE_CHECKING

from troupe.envs.check.again import differs, once_more
from troupe.envs.check.episodes import Episode, Playing, replayed
from troupe.envs.check.report import Found
from troupe.envs.drive import Driver
from troupe.protocol.errors import EpisodeError

if TYPE_CHECKING:
    from troupe.envs.check.suite import Suite

_BESIDE = 8  # worlds at once
_KINDRED = 2  # of them, that play a task of another one, with other actions

Player = tuple[Episode, Driver, contextlib.AsyncExitStack]
"""What is to come again, in which world, and what closes that."""


async def beside(suite: Suite) -> Found:
    """The first task is played by three, one of which does something else; if that differs, each task by one alone."""
    party = [*suite.otherwise[:_KINDRED], *suite.played[:1], *suite.played][:_BESIDE]
    found = await _disturbed(suite, party)
    if not found:
        return "ok", f"{len(party)} at once, {sum(e.task == party[0].task for e in party)} of them on one task"
    if not await _disturbed(suite, suite.played[:_BESIDE]):
        return "broken", f"{found} (only beside another episode of the same task)"
    suite.unsure = True
    return "broken", found


async def _disturbed(suite: Suite, party: list[Episode]) -> str:
    """What came out otherwise: first each as fast as it can, then turn by turn. Empty if nothing did."""
    async with contextlib.AsyncExitStack() as all_of_them:
        players = [await _player(suite, episode, all_of_them) for episode in party]
        try:
            return await _at_once(players) or await _in_turns(players)
        except IndexError:
            return "an episode was longer beside others"
        except EpisodeError as error:
            return str(error)


async def _player(suite: Suite, episode: Episode, stack: contextlib.AsyncExitStack) -> Player:
    own = await stack.enter_async_context(contextlib.AsyncExitStack())
    return episode, await own.enter_async_context(suite.open()), own


async def _at_once(players: list[Player]) -> str:
    again = [once_more(episode, driver) for episode, driver, _ in players]
    results = await asyncio.gather(*again, return_exceptions=True)
    for result in results:
        if isinstance(result, BaseException):
            raise result
    return next((found for found in results if isinstance(found, str) and found), "")


async def _in_turns(players: list[Player]) -> str:
    """The first is in the middle when the others begin, and each is closed when it has ended, whoever still plays."""
    games = [(Playing(driver, was.task, replayed(was.actions), was.turns), was, own) for was, driver, own in players]
    playing, waiting, found = games[:1], games[1:], ""
    await games[0][0].begin()
    while playing and not found:
        goes_on = []
        for game, was, own in playing:
            if await game.turn():
                goes_on.append((game, was, own))
            else:
                found = found or differs(was, await game.end())
                await own.aclose()
        for game, _, _ in waiting:
            await game.begin()
        playing, waiting = goes_on + waiting, []
    return found
