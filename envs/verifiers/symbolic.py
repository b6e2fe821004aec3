"""Is an answer mathematically equal to the right one? The package math-verify decides: 1/2 is 0.5 is \\frac{1}{2}.

Promises:
- reading and comparing happen in a child process, one for each process: what computes for ever or takes all memory (9^9^9^9)
  is killed with it, and the next question gets a new one;
- what is compared is what an answer ends with: what stands in its last \\boxed{}, if it has one. A tuple is read as a whole. An
  equation is read as its right side, and is wrong if two numbers in it are not equal;
- an answer in which nothing mathematical is found is wrong. A comparison that is not done in time breaks the episode (law 6).
"""

from __future__ import annotations

import atexit
import json
import os
import selectors
import subprocess
import sys
import threading
from importlib.util import find_spec
from pathlib import Path
from typing import IO

from troupe.envs.verifiers.bounds import seconds
from troupe.protocol.errors import ConfigError, EnvironmentFailed, TaskFailed

_CHILD = Path(__file__).with_name("math_child.py")
_START_S = 120.0  # for the child to import what it needs, on a busy machine
_BUSY_S = 60.0  # for those who asked before
_READ = 20_000  # characters of an answer, the last ones


class Symbolic:
    """1 if the answer equals `expected`, else 0. Both are text with LaTeX, between marks or not, or plain expressions; the
    answer may be the last of many. timeout_s: for one comparison.

    Raises ConfigError where math-verify is not installed, or for a time that is none; TaskFailed if nothing mathematical is in
    `expected`; EnvironmentFailed if there is no verdict in time.
    """

    def __init__(self, expected: str, *, timeout_s: float = 10.0) -> None:
        if find_spec("math_verify") is None:
            raise ConfigError("Symbolic needs the package math-verify: pip install 'troupe-rl[math]'")
        self.expected, self.timeout_s = expected, seconds("Symbolic: timeout_s", timeout_s)

    def __call__(self, answer: str) -> float:
        verdict = _ask({"expected": self.expected, "answer": answer[-_READ:]}, self.timeout_s)
        match verdict:
            case bool():
                return float(verdict)
            case None:
                raise TaskFailed(f"Symbolic: nothing mathematical is in the right answer {self.expected[:80]!r}")
        raise EnvironmentFailed(f"Symbolic: the comparison with {self.expected[:80]!r} failed: {verdict}")


class _Child:
    """A process that answers one line for each line."""

    def __init__(self) -> None:
        self.parent = os.getpid()
        self._process = subprocess.Popen(
            [sys.executable, str(_CHILD)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
        )
        self._ready = False

    def ask(self, question: object, seconds: float) -> object:
        """Raises TimeoutError, or EOFError if the child has died: it is then of no more use."""
        assert self._process.stdin and self._process.stdout
        if not self._ready:
            _line(self._process.stdout, _START_S)
            self._ready = True
        try:
            self._process.stdin.write(json.dumps(question).encode() + b"\n")
            self._process.stdin.flush()
        except BrokenPipeError:
            raise EOFError from None
        return json.loads(_line(self._process.stdout, seconds))

    def end(self) -> None:
        if self.parent == os.getpid():  # else it is another process's
            self._process.kill()
            self._process.wait(10)
            for pipe in (self._process.stdin, self._process.stdout):
                if pipe:
                    pipe.close()


_one_at_a_time = threading.Lock()
_child: _Child | None = None


def _ask(question: object, seconds: float) -> object:
    global _child
    if not _one_at_a_time.acquire(timeout=_BUSY_S):
        raise EnvironmentFailed(f"Symbolic: others have been comparing for {_BUSY_S:g} s")
    answered = False
    try:
        if _child is None or _child.parent != os.getpid():
            _child = _Child()
        answer = _child.ask(question, seconds)
        answered = True
        return answer
    except TimeoutError:
        raise EnvironmentFailed(f"Symbolic: no verdict after {seconds:g} s") from None
    except EOFError:
        raise EnvironmentFailed("Symbolic: the process that compares has died, perhaps for want of memory") from None
    finally:  # whatever has come in between, also the end of this very thread: what it would say next answers no one
        if not answered:
            _end()
        _one_at_a_time.release()


def _end() -> None:
    global _child
    child, _child = _child, None
    if child is not None:
        child.end()


atexit.register(_end)


def _line(pipe: IO[bytes], seconds: float) -> bytes:
    """One whole line. (One question, one line: nothing more is waiting behind it.) Raises TimeoutError, EOFError."""
    with selectors.DefaultSelector() as waiting:
        waiting.register(pipe, selectors.EVENT_READ)
        if not waiting.select(seconds):
            raise TimeoutError
    line = pipe.readline()
    if not line.endswith(b"\n"):
        raise EOFError
    return line
