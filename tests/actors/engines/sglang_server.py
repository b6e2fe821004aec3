"""SGLang for tests: where it is installed, and servers that many tests share, because one takes half a minute to start."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from troupe.actors.engines.sglang import SGLangEngine
from troupe.learner.config import ModelConfig
from troupe.protocol.errors import TroupeError

ROOT = Path(__file__).parents[3]
PYTHON = os.environ.get("TROUPE_SGLANG_PYTHON") or str(ROOT / ".venv-sglang" / "bin" / "python")
MISSING = "" if Path(PYTHON).exists() else f"no SGLang at {PYTHON}: `make test-sglang` installs it and runs these tests"
SERVED = (
    pytest.mark.sglang,
    pytest.mark.slow,
    pytest.mark.timeout(900),
    pytest.mark.skipif(bool(MISSING), reason=MISSING),
)
"""Marks of a test that needs a real server."""
START_S = 280.0


class Owner(SGLangEngine):
    """Starts a server for others and keeps it. Folder, dtype and sizes are those of the first who asked."""

    @property
    def url(self) -> str:
        assert self._wire is not None
        return str(self._wire._http.base_url)

    @property
    def running(self) -> bool:
        return self._server is not None and self._server.alive

    async def release(self) -> None:
        """Leaves the server running for the next test, which has an event loop of its own."""
        assert self._watch is not None and self._wire is not None
        self._watch.cancel()
        await self._wire.close()

    async def end(self) -> None:
        assert self._server is not None
        await self._server.stop()


SERVERS: dict[tuple[Any, ...], Owner] = {}


class SharedSGLang(SGLangEngine):
    """The engine as a client of a shared server: `load_model` says of which architecture and dtype."""

    def __init__(
        self,
        load_model: Callable[[], torch.nn.Module],
        *,
        max_cached_tokens: int = 131_072,
        steady: bool = False,
        **limits: Any,
    ) -> None:
        self._load_model = load_model
        super().__init__(ModelConfig(path=""), url="http://later", max_cached_tokens=max_cached_tokens, **limits)

    async def start(self) -> None:
        try:
            model: Any = self._load_model()
        except TroupeError as error:
            self._dead = error
            raise
        dtype = str(model.dtype).removeprefix("torch.")
        key = (model.config.model_type, dtype, self._max_cached)
        if key not in SERVERS or not SERVERS[key].running:
            folder = tempfile.mkdtemp(prefix="troupe-test-sglang-")
            model.config.architectures = [type(model).__name__]
            model.config.save_pretrained(folder)
            sizes: dict[str, Any] = {"max_running": 64, "max_cached_tokens": self._max_cached, "start_s": START_S}
            SERVERS[key] = Owner(ModelConfig(path=folder, dtype=dtype), python=PYTHON, **sizes)
            await SERVERS[key].start()
            await SERVERS[key].release()
        self._model, self._url = SERVERS[key]._model, SERVERS[key].url
        await super().start()


def below(pid: int) -> dict[int, str]:
    """Processes below `pid`, with their command lines."""
    table = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            try:
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                table[int(entry.name)] = parent, (entry / "cmdline").read_text().replace("\0", " ")
            except OSError:
                continue
    found: dict[int, str] = {}
    new = {pid}
    while new:
        new = {child for child, (parent, _) in table.items() if parent in new} - found.keys()
        found |= {child: table[child][1] for child in new}
    return found
