"""Playing an episode again while somebody looks at it between all turns."""

from __future__ import annotations

import asyncio
from typing import Any

from troupe.envs.check.episodes import Episode, Playing, replayed
from troupe.envs.check.others import difference
from troupe.envs.drive import Driver


class Looking:
    """Plays an episode again, and looks at it between all turns."""

    def __init__(self, driver: Driver, episode: Episode) -> None:
        self.driver, self.was = driver, episode
        self.playing = Playing(driver, episode.task, replayed(episode.actions), episode.turns)

    async def differs(self) -> str:
        """What looking has changed; empty if nothing."""
        await self.playing.begin()
        try:
            more = True
            while more:
                if found := await self._look():
                    return found
                more = await self.playing.turn()
            now = await self.playing.end()
        except IndexError:
            return "the episode was longer when it was looked at"
        found_pair = difference(self.was.seen, now.seen)
        return f"{found_pair[0]} then {found_pair[1]}, when it was looked at" if found_pair else ""

    async def _look(self) -> str:
        for name in ("state_key", "tools", "state"):
            one, two = await self._ask(name), await self._ask(name)
            if one != two:
                return f"{name}() says {str(one)[:60]}, and then {str(two)[:60]}"
        return ""

    async def _ask(self, name: str) -> Any:
        answer = getattr(self.driver, name)()
        return await answer if asyncio.iscoroutine(answer) else answer
