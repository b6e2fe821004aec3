"""`subprocess`: programs run as you, on your files, with your network. For code that you trust as your own.

Time, CPU, memory, output and the size of one file are limited as elsewhere, and what a run started is ended; nothing keeps a
program from undoing that. The folder is a temporary one and goes when the sandbox is closed or its owner dies.
"""

from __future__ import annotations

import asyncio
import os
import sys
import tempfile
from pathlib import Path

from troupe.envs.sandbox import owner
from troupe.envs.sandbox.base import ProcessChannel, warden_command
from troupe.envs.sandbox.settings import SandboxSettings
from troupe.protocol.errors import ConfigError

NAME = "subprocess"


def missing() -> str:
    """Empty: it is always there."""
    return ""


def check(settings: SandboxSettings) -> None:
    """Raises ConfigError unless the code is said to be trusted."""
    if not settings.trusted:
        raise ConfigError("the subprocess sandbox protects nothing: set trusted = true, or use docker or bubblewrap")


async def start(settings: SandboxSettings) -> ProcessChannel:
    """A fresh folder and its warden. Raises ConfigError unless the code is said to be trusted."""
    check(settings)
    root = tempfile.mkdtemp(prefix=f"{owner.PREFIX}{owner.me()}-")
    path = f"{Path(sys.executable).parent}:{os.environ.get('PATH', '/usr/bin:/bin')}"
    process = await asyncio.create_subprocess_exec(
        *warden_command(sys.executable, root=root, path=path, settings=settings),
        stdin=asyncio.subprocess.PIPE,
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
    )
    return ProcessChannel(process)
