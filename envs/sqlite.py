"""A stranger's query on a SQLite database: it reads, it is bounded, and what is wrong with it is told in one line.

Promises:
- a query is one statement that only reads, each time on a database made anew: no writing, ATTACH, PRAGMA or extension;
- it is bounded in steps of SQLite's machine, so whether it is too long does not depend on how busy a machine is. Seconds are
  the second bound, for the few functions that take long over one step; it decides nothing about an honest query;
- a value has a largest length. Random numbers are refused: the same query gives the same rows.
"""

from __future__ import annotations

import re
import sqlite3
from collections.abc import Collection
from contextlib import closing
from pathlib import Path
from time import monotonic
from typing import Any

from troupe.protocol.errors import ConfigError, InvalidAction

Rows = list[tuple[Any, ...]]

_EACH = 100  # steps between two looks at the bounds
_PATTERN = 1_000  # bytes of a pattern of LIKE: it costs its length times the text's
_SHOWN = 200  # characters of SQLite's own words that are told
_READS = {sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, sqlite3.SQLITE_RECURSIVE}
_REFUSED = {
    sqlite3.SQLITE_ATTACH: "ATTACH is refused",
    sqlite3.SQLITE_DETACH: "DETACH is refused",
    sqlite3.SQLITE_PRAGMA: "PRAGMA is refused",
    sqlite3.SQLITE_TRANSACTION: "transactions are refused",
    sqlite3.SQLITE_SAVEPOINT: "transactions are refused",
    sqlite3.SQLITE_RECURSIVE: "recursive queries are refused",
}
_ONLY_READ = "the database can only be read"
_NEVER = {"random", "randomblob", "load_extension"}


class Reader:
    """Reads one database. database: a file of SQLite, or a script of SQL that makes one.

    steps: that a query may take (ten million are about a second). longest: bytes of a value, of a row and of a query.
    seconds: see the module. functions: names of those that may be called; None: all but random ones. recursive: whether
    WITH RECURSIVE may recur. Raises ConfigError for a database that cannot be made.
    """

    def __init__(
        self,
        database: str | Path,
        *,
        steps: int = 10_000_000,
        longest: int = 100_000,
        seconds: float = 20.0,
        functions: Collection[str] | None = None,
        recursive: bool = True,
    ) -> None:
        self.steps, self.longest, self.seconds = steps, longest, seconds
        self.functions, self.recursive = functions, recursive
        try:
            self._image = _image(database)
        except (sqlite3.Error, OSError) as error:
            raise ConfigError(f"the database cannot be made: {error}") from None

    def read(self, query: str, most: int | None = None) -> tuple[list[str], Rows]:
        """Names of the columns, and the rows, at most `most`. Raises InvalidAction with what is wrong with the query."""
        refused: list[str] = []
        left, until = self.steps // _EACH, monotonic() + self.seconds

        def allow(action: int, first: str | None, second: str | None, *_: Any) -> int:
            reason = self._objection(action, second)
            refused.extend([reason] if reason else [])
            return sqlite3.SQLITE_DENY if reason else sqlite3.SQLITE_OK

        def stop() -> bool:
            nonlocal left
            left -= 1
            return left < 0 or monotonic() > until

        with closing(sqlite3.connect(":memory:")) as database:
            database.deserialize(self._image)
            database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, self.longest)
            database.setlimit(sqlite3.SQLITE_LIMIT_SQL_LENGTH, self.longest)
            database.setlimit(sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, _PATTERN)
            database.set_authorizer(allow)
            database.set_progress_handler(stop, _EACH)
            try:
                cursor = database.execute(query)
                if cursor.description is None:  # nothing, or a comment: that is no answer, not even to what finds nothing
                    raise InvalidAction("the text has no query")
                rows = cursor.fetchall() if most is None else cursor.fetchmany(most)
            except (sqlite3.Error, sqlite3.Warning, ValueError) as error:  # ValueError: a lone surrogate or a NUL in it
                slow = "the query takes too long" if str(error) == "interrupted" else ""
                raise InvalidAction(slow or next(iter(refused), _line(error))) from None
            return [name for name, *_ in cursor.description], rows

    def _objection(self, action: int, second: str | None) -> str:
        """Why an action is not allowed; empty if it is."""
        if action == sqlite3.SQLITE_RECURSIVE and not self.recursive:
            return _REFUSED[action]
        if action == sqlite3.SQLITE_FUNCTION:
            name = (second or "").lower()
            known = self.functions is None or name in self.functions
            return "" if known and name not in _NEVER else f"the function {name} is refused"
        return "" if action in _READS else _REFUSED.get(action, _ONLY_READ)


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


def _line(error: Exception) -> str:
    text = re.sub(r"[\ud800-\udfff]", "\ufffd", " ".join(str(error).split()))
    return text[:_SHOWN] or type(error).__name__
