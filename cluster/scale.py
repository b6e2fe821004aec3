"""`troupe scale`: changes the number of actors of a live run, and says what came of it.

Promises: it waits no longer than it was told to; what it has begun goes on in the run without it.
"""

from __future__ import annotations

import asyncio
import time
from typing import Any

from troupe.actors.context import within
from troupe.actors.director import Director
from troupe.cluster.launch import attached
from troupe.protocol.errors import ConfigError, TimedOut
from troupe.protocol.messages import GetStatus, RunStatus, Scale

_LOOK_S = 0.5


def scale(run: str, wanted: Scale, wait_s: float) -> str:
    """Asks the run for that many; returns what to tell. Raises ConfigError if it does not run or does not want that."""
    if wanted == Scale():
        raise ConfigError("say what to scale: --pools N or --generators N")
    with attached(run) as context:
        return asyncio.run(_change(context, run, wanted, wait_s))


async def _change(context: Any, run: str, wanted: Scale, wait_s: float) -> str:
    director = context.ref("director", Director)
    deadline = time.monotonic() + wait_s
    before = await _status(director)
    try:
        await within(wait_s, "director.scale", director.scale(wanted))
    except TimedOut as error:
        raise TimedOut(f"'{run}' is still scaling after {wait_s:g} s and goes on with it; --wait S waits longer") from error
    while (status := await _status(director)) and _draining(status) and time.monotonic() < deadline:
        await asyncio.sleep(_LOOK_S)
    lines = []
    if wanted.env_actors is not None:
        lines.append(f"pools {_count(before, 'env-')} → {_count(status, 'env-')}")
    if wanted.generators is not None:
        lines.append(f"generators {_count(before, 'generator-')} → {_count(status, 'generator-')}")
    if leaving := _draining(status):
        lines.append(f"still finishing what they run: {', '.join(leaving)} (the run ends them)")
    lines.append("actors: " + ", ".join(sorted(name for name, state in status.actors.items() if state != "draining")))
    return "\n".join(lines)


async def _status(director: Any) -> RunStatus:
    status: RunStatus = await within(60.0, "director.status", director.status(GetStatus()))
    return status


def _draining(status: RunStatus) -> list[str]:
    return sorted(name for name, state in status.actors.items() if state == "draining")


def _count(status: RunStatus, kind: str) -> int:
    return sum(name.startswith(kind) and state != "draining" for name, state in status.actors.items())
