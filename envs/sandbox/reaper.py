"""The last resort: what an owner left behind that could neither close it nor take it along when it died.

Sandboxes end with their owner by themselves; what can remain are containers that were created and not yet started, a bwrap
that was just starting, and folders whose warden was killed together with its owner. Each bears the name of its owner, and
only those of dead ones go.
"""

from __future__ import annotations

import shutil
import tempfile
from pathlib import Path

from troupe.envs.sandbox import bubblewrap, docker, owner


def reap() -> list[str]:
    """Removes what belongs to nobody any more; returns its names. May take some seconds; run it in a thread."""
    removed = docker.reap() + bubblewrap.reap()
    for folder in Path(tempfile.gettempdir()).glob(f"{owner.PREFIX}*"):
        name = folder.name.removeprefix(owner.PREFIX).rpartition("-")[0]
        if name and not owner.alive(name):
            shutil.rmtree(folder, ignore_errors=True)
            removed.append(folder.name)
    return removed
