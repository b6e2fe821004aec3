"""The image of Docker sandboxes when the settings name none: the Python that runs Troupe, a shell and a few tools.

It is a tar of this machine's own files, so that it needs no registry: the standard library, the programs below, and the shared
libraries that they ask for. Python's installed packages are not in it.
"""

from __future__ import annotations

import hashlib
import io
import os
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
from pathlib import Path

from troupe.envs.sandbox.base import python_of_this_process

_PROGRAMS = (
    *("sh", "bash", "cat", "ls", "cp", "mv", "rm", "mkdir", "grep", "sed", "head", "tail", "sort", "wc", "find", "diff"),
    *("env", "sleep", "true", "test", "touch", "tr", "cut", "uniq", "xargs", "echo", "tee", "patch"),
)
_SKIPPED = {"__pycache__", "site-packages", "dist-packages", "test", "tests", "idlelib", "tkinter", "turtledemo", "ensurepip"}
_SKIPPED_START = ("config-",)  # what is needed to build Python itself


def tag() -> str:
    """The image's name: another Python, or another list here, is another image."""
    made_of = f"{sys.version}|{sys.base_prefix}|{_PROGRAMS}|{sorted(_SKIPPED)}"
    return f"troupe-sandbox:{hashlib.sha256(made_of.encode()).hexdigest()[:16]}"


def root() -> bytes:
    """The root file system as a tar, some 70 MB. Takes seconds."""
    python = Path(python_of_this_process())
    library = Path(sysconfig.get_path("stdlib", vars={"installed_base": sys.base_prefix, "base": sys.base_prefix}))
    found = [Path(path) for name in _PROGRAMS if (path := shutil.which(name, path="/usr/bin:/bin"))]
    made = io.BytesIO()
    with tarfile.open(fileobj=made, mode="w") as tar:
        for folder, mode in (("work", 0o777), ("tmp", 0o1777), ("proc", 0o755), ("sys", 0o755), ("dev", 0o755), ("etc", 0o755)):
            entry = tarfile.TarInfo(folder)
            entry.type, entry.mode = tarfile.DIRTYPE, mode
            tar.addfile(entry)
        users = b"root:x:0:0::/:/bin/sh\nnobody:x:65534:65534::/work:/bin/sh\n"
        entry = tarfile.TarInfo("etc/passwd")
        entry.size = len(users)
        tar.addfile(entry, io.BytesIO(users))
        tar.add(library, arcname=str(library).lstrip("/"), filter=_kept)
        extensions = [each for each in library.rglob("*.so") if not _SKIPPED & set(each.relative_to(library).parts)]
        libraries = _libraries([python, *found, *extensions])
        for file in sorted({python, *libraries}):
            tar.add(os.path.realpath(file), arcname=str(file).lstrip("/"), filter=_anonymous)
        for file in found:
            tar.add(os.path.realpath(file), arcname=f"bin/{file.name}", filter=_anonymous)
        entry = tarfile.TarInfo("usr/local/bin/python3")
        entry.type, entry.linkname = tarfile.SYMTYPE, str(python)
        tar.addfile(entry)
    return made.getvalue()


def _libraries(programs: list[Path]) -> set[Path]:
    """The shared libraries of programs and extensions, and the loader, at the paths where they look for them."""
    said = subprocess.run(["ldd", *map(str, programs)], capture_output=True, text=True, timeout=60).stdout
    return {Path(path) for path in re.findall(r"^\s+(?:\S+ => )?(/\S+) \(0x", said, re.MULTILINE)}


def _kept(entry: tarfile.TarInfo) -> tarfile.TarInfo | None:
    name = entry.name.rpartition("/")[2]
    return None if name in _SKIPPED or name.startswith(_SKIPPED_START) else _anonymous(entry)


def _anonymous(entry: tarfile.TarInfo) -> tarfile.TarInfo:
    """Root's, readable by all, and without set-user-id."""
    entry.uid = entry.gid = 0
    entry.uname = entry.gname = ""
    entry.mode = (entry.mode | 0o444 | (0o111 if entry.isdir() else 0)) & 0o755
    return entry
