"""Does a query find what it should? It is run on SQLite, beside the reference query, and the rows are compared.

Promises:
- what counts is the rows: values in the columns' order, whatever the columns are called; the order of the rows only where the
  reference query has an ORDER BY of its own; each row as often as it occurs. 1 is 1.0; floats to nine significant digits;
- the agent's query only reads: one statement, each time on a database made anew, without files, PRAGMA or ATTACH;
- it is bounded in steps of SQLite's machine, not in time: whether a query is too long does not depend on how busy a machine is.
"""

from __future__ import annotations

import re
import sqlite3
from collections import Counter
from contextlib import closing
from pathlib import Path
from typing import Any

from troupe.protocol.errors import ConfigError, TaskFailed

_EACH = 1_000  # steps between two looks at the count
_LONGEST = 1_000_000  # bytes of a value or a query
_READS = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
_NOT_CODE = re.compile(r"""'(?:[^']|'')*'|"(?:[^"]|"")*"|`[^`]*`|\[[^\]]*\]|--[^\n]*|/\*.*?(?:\*/|\Z)""", re.DOTALL)
_ORDERED = re.compile(r"\border\s+by\b", re.IGNORECASE)

Rows = list[tuple[Any, ...]]


class ExecutionMatch:
    """1 if the query that is said gives the rows of `reference`, else 0; so also if it is wrong SQL, writes, or is too long.

    database: a file of SQLite, or a script of SQL that makes one. steps: of SQLite's machine that a query may take (ten
    million are about a second). Raises ConfigError for a database that cannot be made, TaskFailed for a reference that fails.
    """

    def __init__(self, reference: str, database: str | Path, *, steps: int = 10_000_000) -> None:
        self.reference, self.steps = reference, steps
        self.in_order = bool(_ORDERED.search(_top_level(reference)))
        try:
            self._image = _image(database)
        except (sqlite3.Error, OSError) as error:
            raise ConfigError(f"ExecutionMatch: the database cannot be made: {error}") from None
        self._expected: Rows | None = None

    def __call__(self, query: str) -> float:
        expected = self.expected
        try:
            return float(self._comparable(self._rows(query, len(expected) + 1)) == self._comparable(expected))
        except (sqlite3.Error, sqlite3.Warning, ValueError):  # ValueError: a lone surrogate or a NUL in what was said
            return 0.0

    @property
    def expected(self) -> Rows:
        """The rows of the reference. Raises TaskFailed."""
        if self._expected is None:
            try:
                self._expected = self._rows(self.reference, None)
            except (sqlite3.Error, sqlite3.Warning) as error:
                raise TaskFailed(f"ExecutionMatch: the reference query fails: {error}") from None
        return self._expected

    def _rows(self, query: str, most: int | None) -> Rows:
        """At most `most` of what a query gives, on a database of its own."""
        left = self.steps // _EACH

        def go_on() -> bool:
            nonlocal left
            left -= 1
            return left < 0  # true: stop

        with closing(sqlite3.connect(":memory:")) as database:
            database.deserialize(self._image)
            database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, _LONGEST)
            database.setlimit(sqlite3.SQLITE_LIMIT_SQL_LENGTH, _LONGEST)
            database.set_authorizer(lambda action, *_: sqlite3.SQLITE_OK if action in _READS else sqlite3.SQLITE_DENY)
            database.set_progress_handler(go_on, _EACH)
            cursor = database.execute(query)
            if cursor.description is None:  # nothing, or a comment: that is no answer, not even to what finds nothing
                raise sqlite3.ProgrammingError("the text has no query")
            return cursor.fetchall() if most is None else cursor.fetchmany(most)

    def _comparable(self, rows: Rows) -> Any:
        values = [tuple(float(f"{one:.9g}") if isinstance(one, float) else one for one in row) for row in rows]
        return values if self.in_order else Counter(values)


def _image(database: str | Path) -> bytes:
    path = Path(database) if isinstance(database, Path) or not {"\n", ";"} & set(database) else None
    if path is None:
        with closing(sqlite3.connect(":memory:")) as made:
            made.executescript(str(database))
            return made.serialize()
    with closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as stored:
        stored.execute("SELECT count(*) FROM sqlite_master")  # a file that is no database is found out here
        image = stored.serialize()
    return image[:18] + b"\1\1" + image[20:]  # not in WAL mode, which memory does not have (SQLite's file format, 1.3.3)


def _top_level(query: str) -> str:
    """A query without what stands in parentheses, quotes and comments."""
    text, depth = [], 0
    for char in _NOT_CODE.sub(" ", query):
        depth += (char == "(") - (char == ")")
        text.append(char if depth == 0 and char != ")" else " ")
    return "".join(text)
