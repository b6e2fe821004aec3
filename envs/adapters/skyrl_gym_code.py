"""Grades a program as skyrl-gym's lcb does, but in a sandbox: there its own `livecodebench.py` runs, on the sandbox's Python.

The program and what judges it share one process there, as they do in skyrl-gym. The verdict therefore carries a word that the
program is not told and that is gone from files and arguments before it starts; a program that searches the memory of its own
process could still find it.
"""

from __future__ import annotations

import json
import secrets
from pathlib import Path
from typing import Any

from troupe.envs import sandbox
from troupe.envs.sandbox.base import Sandbox
from troupe.envs.sandbox.settings import SandboxSettings
from troupe.protocol.errors import TaskFailed

_JUDGE = """
import json, sys, os
word, seconds = sys.stdin.readline().strip(), int(sys.stdin.readline())
sys.path.insert(0, os.getcwd())
import livecodebench as judge
def there(line):
    try:
        exec(line, {})
    except ImportError:
        return False
    return True
judge.import_string = "\\n".join(filter(there, judge.BASE_IMPORTS.splitlines()))
with open("task.json") as file:
    task = json.load(file)
sample = judge.postprocess_lcb_sample(task["tests"])
write = os.write
found = judge.run_test(sample, test=task["program"], timeout=seconds)
results = found[0] if found else [False]
write(1, ("\\n" + word + (" right" if results and all(each is True for each in results) else " wrong")).encode())
"""


def chosen(settings: SandboxSettings) -> SandboxSettings:
    """`settings` with the back-end that there is. Raises ValueError if no sandbox can be opened here with them."""
    names = ("docker", "bubblewrap") if settings.backend == "auto" else (settings.backend,)
    reasons = {name: sandbox.missing(name) for name in names}
    if all(reasons.values()):
        raise ValueError("the agent's programs need a sandbox; " + "; ".join(f"{name}: {why}" for name, why in reasons.items()))
    if settings.backend == "subprocess" and not settings.trusted:
        raise ValueError("the sandbox 'subprocess' holds nothing back: say trusted = true if the agent may do what you may")
    return settings.model_copy(update={"backend": next(name for name, why in reasons.items() if not why)})


async def grade(box: Sandbox, program: str, tests: str, seconds: int) -> bool:
    """Whether `program` passes all tests (a JSON list of input, output and testtype), `seconds` for each.

    Raises TaskFailed if they are no tests, EnvironmentFailed if the sandbox broke.
    """
    from skyrl_gym.envs.lcb import livecodebench

    try:
        listed: list[dict[str, Any]] = json.loads(tests)
        livecodebench.postprocess_lcb_sample(listed)
    except Exception as error:
        raise TaskFailed(f"lcb: the ground truth is no list of tests: {error!r}") from error
    word = secrets.token_hex(16)
    await box.write("livecodebench.py", Path(livecodebench.__file__).read_text())
    await box.write("task.json", json.dumps({"program": program, "tests": listed}))
    result = await box.run(code=_JUDGE, stdin=f"{word}\n{seconds}\n", timeout_s=(seconds + 1) * len(listed) + 5)
    return result.stdout.decode(errors="replace").rstrip().endswith(f"\n{word} right")
