"""Evaluates calls of a program that nobody has read, each in a process of its own; runs in a sandbox, as `python3 -c`.

It is given calls and never what they should give: that stays with `unit_tests.py`, outside. So there is nothing here to read
or to patch that would help a wrong program; it could only say other values.

stdin: JSON of files (path → text), imports, calls, each_s. stdout: READY; then for each call that gave data, a line of JSON
[number, value as Python writes it]. Only the standard library, and no code of the program, is loaded before READY is said.
"""

from __future__ import annotations

import json
import os
import resource
import select
import signal
import sys
import time
from typing import Any

READY = "ready"
LONGEST = 4_000  # bytes of a value


def main() -> None:
    """Says READY, writes the files, evaluates the calls."""
    given = json.load(sys.stdin)
    print(READY, flush=True)
    for path, text in given["files"].items():
        os.makedirs(os.path.dirname(path) or ".", exist_ok=True)
        with open(path, "w", encoding="utf-8") as file:
            file.write(text)
    for number, call in enumerate(given["calls"]):
        value, late = asked(call, given["imports"], given["each_s"])
        if value:
            print(json.dumps([number, value]), flush=True)
        if late:
            break


def asked(call: str, imports: str, seconds: int) -> tuple[str, bool]:
    """What a call gives, in a process of its own, empty if it gives nothing; and whether it took too long."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.close(reading)
            resource.setrlimit(resource.RLIMIT_CPU, (seconds, seconds))
            os.write(writing, evaluated(call, imports).encode()[: LONGEST + 1])
        finally:
            os._exit(0)
    os.close(writing)
    late = False
    deadline, said = time.monotonic() + 5 * seconds, b""
    while not said.endswith(b"\n") and len(said) <= LONGEST:
        left = deadline - time.monotonic()
        if left <= 0 or not select.select([reading], [], [], left)[0]:
            late = True
            break
        piece = os.read(reading, 65536)
        if not piece:
            break
        said += piece
    os.kill(child, signal.SIGKILL)
    used = os.wait4(child, 0)[2]
    os.close(reading)
    late = late or used.ru_utime + used.ru_stime >= seconds
    return said[:-1].decode("utf-8", "replace") if said.endswith(b"\n") else "", late


def evaluated(call: str, imports: str) -> str:
    """The value of `call` after `imports`, as Python writes it, and a line's end."""
    nowhere = os.open(os.devnull, os.O_RDWR)
    for fd in (0, 1, 2):
        os.dup2(nowhere, fd)
    sys.path.insert(0, os.getcwd())
    scope: dict[str, Any] = {"__name__": "tests"}
    exec(imports, scope)
    return repr(data(eval(call, scope))) + "\n"


def data(value: Any) -> Any:
    """The same of Python's own types only, so that it is written as a literal. Raises TypeError if it is no data."""
    if value is None or isinstance(value, bool):
        return value
    for one in (int, float, str):
        if isinstance(value, one):
            return one(value)
    for many in (list, tuple, set):
        if isinstance(value, many):
            return many(map(data, value))
    if isinstance(value, bytes):
        return bytes(value)
    if isinstance(value, dict):
        return {data(key): data(item) for key, item in value.items()}
    raise TypeError(type(value).__name__)


if __name__ == "__main__":
    main()
