"""RUN/timeline.json: who did what when, in Chrome's trace event format, which https://ui.perfetto.dev opens.

Owns that file. Promises:
- after each `append` it is a JSON array; after a kill in the middle of one, too, once it is opened again: what was half
  written is cut off, and what it had in it is told again by the actors (`heard`), so nothing is in it twice;
- it is never longer than `LIMIT` bytes: before that it becomes `timeline.old.json`, in the place of the one before, and a new
  one begins; of what would not fit into that either, the newest is written;
- spans of one track nest, as the format wants it; times are whole microseconds since the epoch.

A process of the trace is an actor, a thread of it a track. Not synced to disk: nothing depends on it.
"""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Iterable, Iterator, Sequence
from typing import Any, get_args

from troupe.protocol.messages import Span, Spans, Track

LIMIT = 32 * 2**20
_END = b"\n]\n"
_MARK = b'{"name":"heard"'
_SINGLE = ("director", "learner", "dispatcher", "store", "evaluator")
_MANY = {"generator": 100, "env": 10_000}
_TRACKS = get_args(Track)


class TraceFile:
    """The file at `path`. heard: by actor, which life of it (`Spans.born`), and up to which of its spans the file goes."""

    def __init__(self, path: str, limit: int = LIMIT) -> None:
        self._path, self._limit = path, limit
        self._named: set[str] = set()
        self.heard: dict[str, tuple[float, int]] = {}
        self._length = self._recover()

    def append(self, told: Sequence[Spans], gone: Iterable[str] = ()) -> None:
        """Adds what actors told. gone: actors that will tell nothing any more."""
        for name in gone:
            self.heard.pop(name, None)
        self.heard |= {spans.name: (spans.born, spans.count) for spans in told}
        # The last line says up to where the file goes: if it is there, what is before it is whole. (A text, because there are
        # readers that take no arrays.)
        mark = " ".join(f"{name}={born!r}/{count}" for name, (born, count) in self.heard.items())
        end = _line({"name": "heard", "ph": "M", "pid": pid_of("director"), "args": {"spans": mark}})
        spans = sorted(((told.name, span) for told in told for span in told.spans), key=lambda one: one[1].end)
        lines = [b",\n".join(map(_line, _events(name, span))) for name, span in spans]
        if self._length and _size([*self._names(), *lines, end]) > self._limit - self._length:
            os.replace(self._path, _old(self._path))
            self._length, self._named = 0, set()
        names = self._names()
        self._named |= self.heard.keys()
        lines = [*names, *_fitting(lines, self._limit - self._length - _size([*names, end])), end]
        with open(self._path, "r+b" if self._length else "wb") as file:
            file.seek(self._length)
            file.write((b",\n" if self._length else b"[\n") + b",\n".join(lines))
            self._length = file.tell()
            file.write(_END)
            file.truncate()

    def _names(self) -> list[bytes]:
        """What the file does not yet say of those who are heard."""
        return [_line(event) for name in sorted(self.heard.keys() - self._named) for event in _named(name)]

    def _recover(self) -> int:
        """Reads what is heard, and returns the length of what is whole; 0 if there is nothing of use."""
        try:
            with open(self._path, "rb") as file:
                held = file.read()
        except FileNotFoundError:
            return 0
        begin = len(held)
        while (begin := held.rfind(_MARK, 0, begin)) >= 0:
            line = held[begin:].split(b"\n", 1)[0].rstrip(b",")
            with contextlib.suppress(ValueError):  # half written
                known = (one.replace("=", "/").split("/") for one in json.loads(line)["args"]["spans"].split())
                self.heard = {name: (float(born), int(count)) for name, born, count in known}
                return begin + len(line)
        return 0


def pid_of(name: str) -> int:
    """The number that stands for an actor."""
    kind, _, number = name.rpartition("-")
    return _MANY[kind] + int(number) if kind in _MANY else 1 + _SINGLE.index(name)


def _tid(name: str, track: str) -> int:
    return pid_of(name) + 1_000_000 * _TRACKS.index(track)


def _named(name: str) -> Iterator[dict[str, Any]]:
    pid = pid_of(name)
    for key, value in (("process_name", {"name": name}), ("process_sort_index", {"sort_index": pid})):
        yield {"name": key, "ph": "M", "pid": pid, "args": value}
    for track in _TRACKS:
        yield {"name": "thread_name", "ph": "M", "pid": pid, "tid": _tid(name, track), "args": {"name": track or name}}


def _events(name: str, span: Span) -> Iterator[dict[str, Any]]:
    begin, end = int(span.begin * 1e6), int(span.end * 1e6)
    common = {"name": span.name, "pid": pid_of(name), "tid": _tid(name, span.track), "ts": begin}
    if span.value is not None:
        yield {**common, "ph": "C", "args": {"value": span.value}}
    elif span.beside:  # a pair of its own: such spans overlap
        pair = {**common, "cat": span.name, "id": f"{name}/{span.labels.get('id', begin)}"}
        yield {**pair, "ph": "b", "args": span.labels}
        yield {**pair, "ph": "e", "ts": end}
    else:
        yield {**common, "ph": "X", "dur": end - begin, "args": span.labels}


def _size(lines: Sequence[bytes]) -> int:
    """Bytes of `lines`, with what is between them, and after the last."""
    return sum(map(len, lines)) + len(_END) * len(lines)


def _fitting(lines: list[bytes], room: int) -> list[bytes]:
    """The last of them that have room."""
    for number in reversed(range(len(lines))):
        room -= _size(lines[number : number + 1])
        if room < 0:
            return lines[number + 1 :]
    return lines


def _line(event: dict[str, Any]) -> bytes:
    return json.dumps(event, ensure_ascii=False, separators=(",", ":")).encode()


def _old(path: str) -> str:
    stem, extension = os.path.splitext(path)
    return f"{stem}.old{extension}"
