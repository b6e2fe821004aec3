"""A stranger's query on a SQLite database: it reads, it is bounded, and what is wrong with it is told in one line.

Promises:
- a query is one statement that only reads, each time on a database made anew: no writing, ATTACH, PRAGMA or extension;
- it is bounded in steps of SQLite's machine, so whether it is too long does not depend on how busy a machine is. Seconds of CPU
  time are the second bound, for preparing it (half of one) and for the few functions that take long over one step; memory
  is the third. They decide nothing about an honest query, and are kept by a process of its own (`sqlite_child`);
- a value has a largest length. Random numbers are refused: the same query gives the same rows.
"""

from __future__ import annotations

import atexit
import inspect
import marshal
import os
import re
import select
import sqlite3
import subprocess
import sys
import weakref
from collections.abc import Collection
from contextlib import closing, suppress
from pathlib import Path
from time import monotonic
from typing import Any

from troupe.envs import sqlite_child
from troupe.protocol.errors import ConfigError, EnvironmentFailed, InvalidAction

Rows = list[tuple[Any, ...]]

_SHOWN = 200  # characters of SQLite's own words that are told
_PATIENCE = 10.0  # times the seconds of CPU time that an answer is waited for, and so many more
_IDLE = 4  # processes that wait for the next query


class Reader:
    """Reads one database. database: a file of SQLite, or a script of SQL that makes one.

    steps: that a query may take (ten million are about a second). longest: bytes of a value, of a row and of a query.
    seconds: of CPU time, see the module. functions: names of those that may be called; None: all but random ones.
    recursive: whether WITH RECURSIVE may recur. Raises ConfigError for a database that cannot be made.
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
        _readers.add(self)
        weakref.finalize(self, _end_with_the_last).atexit = False

    def close(self) -> None:
        """No process waits for this reader any more. It may still be read, at the cost of starting one."""
        _readers.discard(self)
        _end_with_the_last()

    def read(self, query: str, most: int | None = None) -> tuple[list[str], Rows]:
        """Names of the columns, and the rows, at most `most`.

        Raises InvalidAction with what is wrong with the query; EnvironmentFailed if no query can be run here."""
        functions = None if self.functions is None else list(self.functions)
        bounds = {"steps": self.steps, "longest": self.longest, "seconds": self.seconds}
        asked = {"query": query, "most": most, **bounds, "functions": functions, "recursive": self.recursive}
        until = monotonic() + _PATIENCE * (1 + min(self.seconds, 1e6))
        kind, *answer = _worker().ask(self._image, asked, until)
        if kind == "rows":
            names, rows = answer
            return names, rows
        raise InvalidAction(answer[0] if kind == "refused" else _line(answer[0]))


class _Worker:
    """A process that answers one query after the other, and is kept for the next if it lives."""

    def __init__(self) -> None:
        command = [sys.executable, "-I", "-S", "-c", inspect.getsource(sqlite_child)]
        pipe = subprocess.PIPE
        self._process = subprocess.Popen(command, stdin=pipe, stdout=pipe, stderr=subprocess.DEVNULL, start_new_session=True)
        self._image = b""

    def ask(self, image: bytes, asked: dict[str, Any], until: float) -> tuple[Any, ...]:
        assert self._process.stdin is not None
        try:
            if image is not self._image:
                self._process.stdin.write(marshal.dumps(image))
                self._image = image
            self._process.stdin.write(marshal.dumps(asked))
            self._process.stdin.flush()
            answer: tuple[Any, ...] = marshal.loads(self._read(until))
        except (OSError, EOFError):
            code = self.end()
            if code > 0:  # no query does that: it is a signal that ends one
                raise EnvironmentFailed(f"the process that runs queries has ended with exit code {code}") from None
            return ("refused", "the query takes too long")
        except BaseException:
            self.end()
            raise
        if len(_idle) < _IDLE and _readers:
            _idle.append(self)
        else:
            self.end()
        return answer

    def _read(self, until: float) -> bytes:
        """An answer: its length comes first. Raises EOFError if the process ends, or does not answer in time."""
        assert self._process.stdout is not None
        told, wanted = bytearray(), 8
        while len(told) < wanted:
            ready, _, _ = select.select([self._process.stdout], [], [], max(0.0, until - monotonic()))
            read = os.read(self._process.stdout.fileno(), 1 << 20) if ready else b""
            if not read:
                raise EOFError
            told += read
            if len(told) >= 8:
                wanted = 8 + int.from_bytes(told[:8], "little")
        return bytes(told[8:])

    @property
    def alive(self) -> bool:
        return self._process.poll() is None

    def end(self) -> int:
        """Its exit code; below 0 for a signal. One that can end by itself does."""
        assert self._process.stdin is not None
        with suppress(OSError):
            self._process.stdin.close()
        with suppress(subprocess.TimeoutExpired):
            self._process.wait(0.1)
        self._process.kill()
        code = self._process.wait()
        for pipe in (self._process.stdin, self._process.stdout):
            with suppress(OSError):
                if pipe is not None:
                    pipe.close()
        return code


_idle: list[_Worker] = []
_readers: weakref.WeakSet[Reader] = weakref.WeakSet()


def _worker() -> _Worker:
    with suppress(IndexError):
        while True:
            if (one := _idle.pop()).alive:
                return one
            one.end()
    return _Worker()


def _end_with_the_last() -> None:
    """Where nobody reads any more, no process waits."""
    if not _readers:
        _end()


@atexit.register
def _end() -> None:
    with suppress(IndexError):
        while True:
            _idle.pop().end()


os.register_at_fork(after_in_child=_idle.clear)


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


def _line(words: str) -> str:
    return re.sub(r"[\ud800-\udfff]", "\ufffd", " ".join(words.split()))[:_SHOWN]
