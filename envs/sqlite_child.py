"""Runs queries that nobody has read, in a process that may be killed: `python -I -S -c`, and only the standard library.

Preparing a statement is not counted in steps of SQLite's machine, and a short text can be prepared into gigabytes. So there is
a bound of CPU time and one of memory that the system keeps: a query beyond the first ends this process, which whoever asked
sees; beyond the second it is told that there is no memory.

stdin, stdout: marshal, an answer after its length in 8 bytes. A question is a dict (see `Reader.read`) or, before it, the bytes
of a database. Its answer is ("rows", names, rows), ("refused", reason), or ("failed", SQLite's words).
"""

from __future__ import annotations

import marshal
import resource
import signal
import sqlite3
import sys
from contextlib import closing, suppress
from time import process_time
from typing import Any

_EACH = 100  # steps between two looks at the bounds
_PATTERN = 1_000  # bytes of a pattern of LIKE: it costs its length times the text's
_COLUMNS = 200  # of a result or of a table in it
_PREPARING = 0.5  # seconds of CPU time before the first steps
_MEMORY = 512 * 1024**2  # bytes, and twice the database
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
_TOO_LARGE = ("refused", "the query takes too much memory")
_NEVER = {"random", "randomblob", "load_extension"}


def main() -> None:
    """Answers until stdin ends."""
    image = b""
    while True:
        try:
            asked = marshal.load(sys.stdin.buffer)
        except EOFError:
            return
        if isinstance(asked, bytes):
            image = asked
            continue
        _bound_memory(_MEMORY + 2 * len(image))
        signal.setitimer(signal.ITIMER_PROF, _PREPARING)
        answer = _answer(image, asked)
        signal.setitimer(signal.ITIMER_PROF, 0)
        try:
            told = marshal.dumps(answer)
        except MemoryError:
            told = marshal.dumps(_TOO_LARGE)
        sys.stdout.buffer.write(len(told).to_bytes(8, "little") + told)
        sys.stdout.buffer.flush()


def _bound_memory(most: int) -> None:
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    with suppress(OSError, ValueError):  # a system without that bound; CPU time bounds memory too
        resource.setrlimit(resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard))


def _answer(image: bytes, asked: dict[str, Any]) -> tuple[Any, ...]:
    refused: list[str] = []
    left, until = asked["steps"] // _EACH, 0.0

    def allow(action: int, first: str | None, second: str | None, *_: Any) -> int:
        reason = _objection(asked, action, second)
        refused.extend([reason] if reason else [])
        return sqlite3.SQLITE_DENY if reason else sqlite3.SQLITE_OK

    def stop() -> bool:
        nonlocal left, until
        if not until:  # the statement is prepared
            until = process_time() + asked["seconds"]
            signal.setitimer(signal.ITIMER_PROF, asked["seconds"] + 1)
        left -= 1
        return left < 0 or process_time() > until

    try:
        with closing(sqlite3.connect(":memory:")) as database:
            database.deserialize(image)
            database.setlimit(sqlite3.SQLITE_LIMIT_LENGTH, asked["longest"])
            database.setlimit(sqlite3.SQLITE_LIMIT_SQL_LENGTH, asked["longest"])
            database.setlimit(sqlite3.SQLITE_LIMIT_LIKE_PATTERN_LENGTH, _PATTERN)
            database.setlimit(sqlite3.SQLITE_LIMIT_COLUMN, _COLUMNS)
            database.set_authorizer(allow)
            database.set_progress_handler(stop, _EACH)
            cursor = database.execute(asked["query"])
            if cursor.description is None:  # nothing, or a comment: that is no answer, not even to what finds nothing
                return ("refused", "the text has no query")
            rows = cursor.fetchall() if asked["most"] is None else cursor.fetchmany(asked["most"])
            return ("rows", [name for name, *_ in cursor.description], rows)
    except MemoryError:
        return _TOO_LARGE
    except (sqlite3.Error, sqlite3.Warning, ValueError) as error:  # ValueError: a lone surrogate or a NUL in it
        slow = ["the query takes too long"] if str(error) == "interrupted" else []
        return ("refused", (slow or refused)[0]) if slow or refused else ("failed", str(error) or type(error).__name__)


def _objection(asked: dict[str, Any], action: int, second: str | None) -> str:
    """Why an action is not allowed; empty if it is."""
    if action == sqlite3.SQLITE_RECURSIVE and not asked["recursive"]:
        return _REFUSED[action]
    if action == sqlite3.SQLITE_FUNCTION:
        name = (second or "").lower()
        known = asked["functions"] is None or name in asked["functions"]
        return "" if known and name not in _NEVER else f"the function {name} is refused"
    return "" if action in _READS else _REFUSED.get(action, _ONLY_READ)


if __name__ == "__main__":
    main()
