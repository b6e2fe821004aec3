"""Sandboxes: where an agent's programs run. One interface, three back-ends (see docs/sandbox.md).

from troupe.envs import sandbox

async with await sandbox.open(sandbox.SandboxSettings(memory_mb=128)) as box:
    result = await box.run(code="print(6 * 7)", timeout_s=5)
"""

from __future__ import annotations

import asyncio
from types import ModuleType

from troupe.envs.sandbox import bubblewrap, docker, local
from troupe.envs.sandbox.base import Sandbox
from troupe.envs.sandbox.settings import Result, SandboxSettings
from troupe.protocol.errors import ConfigError

__all__ = ["Result", "Sandbox", "SandboxSettings", "check", "missing", "open"]

_BACKENDS: dict[str, ModuleType] = {each.NAME: each for each in (docker, bubblewrap, local)}
_AUTO = (docker.NAME, bubblewrap.NAME)


def missing(backend: str) -> str:
    """Why `backend` cannot be used on this machine, and what to do; empty if it can. May take some seconds the first time."""
    return str(_BACKENDS[backend].missing())


def check(settings: SandboxSettings) -> None:
    """Raises ConfigError, of one line, if there can be no sandbox of these settings here. May take some seconds, once."""
    name = settings.backend if settings.backend != "auto" else _best()
    if name == local.NAME:
        local.check(settings)
    elif why := missing(name):
        raise ConfigError(f"no {name} sandbox: {why}")


async def open(settings: SandboxSettings | None = None) -> Sandbox:
    """A fresh sandbox, of the back-end that the settings name.

    Raises ConfigError if there cannot be one here; it says what is needed. Raises EnvironmentFailed if it did not start.
    """
    settings = settings or SandboxSettings()
    name = settings.backend if settings.backend != "auto" else await asyncio.to_thread(_best)
    opened = Sandbox(name, settings, await _BACKENDS[name].start(settings))
    await opened.hello()  # closes it if there is no answer
    return opened


def _best() -> str:
    reasons = {name: missing(name) for name in _AUTO}
    for name, why in reasons.items():
        if not why:
            return name
    raise ConfigError("no sandbox can be opened here: " + "; ".join(f"{name}: {why}" for name, why in reasons.items()))
