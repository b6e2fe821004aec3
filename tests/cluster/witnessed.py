"""The command line of Troupe, with embedded engines that are slow and write down every answer. Run as a script.

    python tests/cluster/witnessed.py FOLDER SECONDS train recipe.toml ...

Each step of a model takes SECONDS more. FOLDER/<generator>-<pid>.jsonl gets a line for each call of an engine's `generate`
that ended: prompt, tokens, logprobs, versions, finish.
"""

from __future__ import annotations

import sys
from typing import Any


def watched(folder: str, seconds: float) -> Any:
    """`factories.make_engine` with a witness. All is defined in here, so that it travels to other processes by value."""

    def make(name: str, settings: Any, model: Any, seed: int, steady: bool = False) -> Any:
        import json
        import os
        import time
        from pathlib import Path

        from troupe.actors.engines.local import LocalEngine
        from troupe.learner.model import load

        file = Path(folder) / f"{name}-{os.getpid()}.jsonl"

        def slow() -> Any:
            loaded = load(model, seed=seed)
            loaded.register_forward_pre_hook(lambda *_: time.sleep(seconds))
            return loaded

        class Watched(LocalEngine):
            async def generate(self, request: Any) -> Any:
                made = await super().generate(request)
                told = {key: getattr(made, key).tolist() for key in ("tokens", "logprobs", "versions")}
                row = {"request": request.request, "prompt": request.prompt.tolist(), "finish": made.finish, **told}
                with open(file, "a") as output:
                    output.write(json.dumps(row) + "\n")
                return made

        return Watched(slow, generator_name=name, max_running=settings.max_running)

    return make


if __name__ == "__main__":
    from troupe.actors import factories
    from troupe.cluster.cli import main

    factories.make_engine = watched(sys.argv[1], float(sys.argv[2]))
    del sys.argv[1:3]
    main()
