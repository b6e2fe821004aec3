"""Is it a good world? A conformance suite for anybody's environment, and the scripted player's score.

`check` looks at a class, in this process; `examine` looks at a name, in a process of its own, so that nothing that a world
does (hang at its import, stop the event loop, end its process) reaches whoever asked. `suite.PROMISES` are what is looked at.
"""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from troupe.envs.base import TextWorld
from troupe.envs.check.apart import examine
from troupe.envs.check.episodes import Episode, PlayerScore, player_episodes, player_or_guesser, player_score
from troupe.envs.check.garbage import GARBAGE
from troupe.envs.check.report import Finding, Report
from troupe.envs.check.suite import PROMISES, Suite, Tell

__all__ = [
    "GARBAGE",
    "PROMISES",
    "Episode",
    "Finding",
    "PlayerScore",
    "Report",
    "check",
    "examine",
    "player_episodes",
    "player_or_guesser",
    "player_score",
]


def check(
    world: type[TextWorld],
    options: Mapping[str, Any] | None = None,
    episodes: int = 20,
    timeout_s: float = 30.0,
    *,
    others: int = 2,
    limit_s: float = 120.0,
    tell: Tell = lambda news: None,
) -> Report:
    """Runs the suite here. Raises ConfigError only if the world cannot be made with `options`.

    others: processes with other hash seeds that play the same episodes. limit_s: about how long all of it may take; a slow
    world plays fewer episodes then. timeout_s: of each call. tell: told of each promise as it is looked at, and as found.
    """
    return asyncio.run(Suite(world, dict(options or {}), episodes, timeout_s, others, limit_s, tell).run())
