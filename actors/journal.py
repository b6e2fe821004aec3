"""The run's diary: one JSON object a line, appended and synced, so that a restarted director knows what happened."""

from __future__ import annotations

import json
import os
import time
from typing import Any


def append(file: str, **entry: Any) -> None:
    """Appends one line durably. A half-written line after a kill is ignored by `read`."""
    line = json.dumps({"time": time.time(), **entry}) + "\n"
    with open(file, "a+b") as out:
        if out.tell() and not _ends_with_newline(file):
            line = "\n" + line
        out.write(line.encode())
        out.flush()
        os.fsync(out.fileno())


def read(file: str) -> list[dict[str, Any]]:
    """All whole lines."""
    if not os.path.exists(file):
        return []
    rows = []
    with open(file, "rb") as lines:
        for line in lines:
            try:
                rows.append(json.loads(line))
            except ValueError:
                continue
    return rows


def keep(file: str, wanted: Any) -> None:
    """Rewrites the file with the rows that `wanted(row)` accepts; complete or unchanged."""
    rows = [row for row in read(file) if wanted(row)]
    temporary = file + ".tmp"
    with open(temporary, "w") as out:
        out.writelines(json.dumps(row) + "\n" for row in rows)
        out.flush()
        os.fsync(out.fileno())
    os.replace(temporary, file)


def _ends_with_newline(file: str) -> bool:
    with open(file, "rb") as existing:
        existing.seek(-1, os.SEEK_END)
        return existing.read(1) == b"\n"
