"""Does a query find what it should? It is run on SQLite, beside the reference query, and the rows are compared.

Promises:
- what counts is the rows: values in the columns' order, whatever the columns are called; the order of the rows only where the
  reference query has an ORDER BY of its own; each row as often as it occurs. 1 is 1.0; floats to nine significant digits;
- the agent's query only reads, and is bounded (see `troupe.envs.sqlite`).
"""

from __future__ import annotations

import re
from collections import Counter
from pathlib import Path
from typing import Any

from troupe.envs.sqlite import Reader, Rows
from troupe.protocol.errors import ConfigError, InvalidAction, TaskFailed

_NOT_CODE = re.compile(r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|`[^`]*`|\[[^\]]*\]|--[^\n]*|/\*.*?(?:\*/|\Z)""", re.DOTALL)
_ORDERED = re.compile(r"\border\s+by\b", re.IGNORECASE)


class ExecutionMatch:
    """1 if the query that is said gives the rows of `reference`, else 0; so also if it is wrong SQL, writes, or is too long.

    database: a file of SQLite, a script of SQL that makes one, or a Reader with bounds of its own. steps: of SQLite's machine
    that a query may take (ten million are about a second). Raises ConfigError for a database that cannot be made, TaskFailed
    for a reference that fails.
    """

    def __init__(self, reference: str, database: str | Path | Reader, *, steps: int = 10_000_000) -> None:
        self.reference = reference
        self.in_order = bool(_ORDERED.search(_top_level(reference)))
        try:
            self.reader = database if isinstance(database, Reader) else Reader(database, steps=steps)
        except ConfigError as error:
            raise ConfigError(f"ExecutionMatch: {error}") from None
        self._expected: Rows | None = None

    def __call__(self, query: str) -> float:
        expected = self.expected
        try:
            return float(self._comparable(self.reader.read(query, len(expected) + 1)[1]) == self._comparable(expected))
        except InvalidAction:
            return 0.0

    @property
    def expected(self) -> Rows:
        """The rows of the reference. Raises TaskFailed."""
        if self._expected is None:
            try:
                self._expected = self.reader.read(self.reference)[1]
            except InvalidAction as error:
                raise TaskFailed(f"ExecutionMatch: the reference query fails: {error}") from None
        return self._expected

    def _comparable(self, rows: Rows) -> Any:
        values = [tuple(float(f"{one:.9g}") if isinstance(one, float) else one for one in row) for row in rows]
        return values if self.in_order else Counter(values)


def _top_level(query: str) -> str:
    """A query without what stands in parentheses, quotes and comments."""
    text, depth = [], 0
    for char in _NOT_CODE.sub(" ", query):
        depth += (char == "(") - (char == ")")
        text.append(char if depth == 0 and char != ")" else " ")
    return "".join(text)
