"""Paths as they are shown to people."""

from __future__ import annotations

from pathlib import Path


def from_here(path: Path) -> str:
    """`path` relative to the working folder, if it lies in there."""
    try:
        return str(path.relative_to(Path.cwd()))
    except ValueError:
        return str(path)
