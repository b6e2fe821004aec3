"""The process in which `symbolic` compares: a line of JSON with `expected` and `answer` in, its verdict out.

A verdict is true or false, null if nothing mathematical is in `expected`, or a text that says what went wrong. Run as a script,
so that it imports nothing of Troupe's. It ends with its standard input.
"""

import json
import logging
import resource
import sys

_MEMORY = 2 << 30  # bytes of address space


def compare(expected: str, answer: str) -> bool | str | None:
    from math_verify import parse, verify

    try:
        right = parse(expected, parsing_timeout=None)
        if not right:
            return None
        return bool(verify(right, parse(answer, parsing_timeout=None), timeout_seconds=None))
    except Exception as error:
        return f"{type(error).__name__}: {error}"[:500]


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (_MEMORY, _MEMORY))
    logging.disable()
    out, sys.stdout = sys.stdout, sys.stderr  # nothing else may write between the verdicts
    import math_verify  # noqa: F401

    print("ready", file=out, flush=True)
    for line in sys.stdin:
        print(json.dumps(compare(**json.loads(line))), file=out, flush=True)


if __name__ == "__main__":
    main()
