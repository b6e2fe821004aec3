"""Real servers for tests: where they are installed, and ones that many tests share: one takes half a minute to start."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from troupe.actors.engines.served import ServedEngine
from troupe.actors.engines.server import Server, free_port
from troupe.actors.engines.sglang import SGLangEngine
from troupe.actors.engines.sglang_wire import Wire
from troupe.actors.engines.vllm import VLLMEngine
from troupe.learner.config import LoraSettings, ModelConfig
from troupe.protocol.errors import TroupeError

ROOT = Path(__file__).parents[3]
START_S = 400.0


class Installed:
    """Where a kind of server is installed, and the marks of a test that needs a real one."""

    def __init__(self, kind: type[ServedEngine[Any]]) -> None:
        name = kind.SETTING
        self.python = os.environ.get(f"TROUPE_{name.upper()}_PYTHON") or str(ROOT / f".venv-{name}" / "bin" / "python")
        there = Path(self.python).exists()
        reason = f"no {kind.KIND} at {self.python}: `make test-{name}` installs it and runs these tests"
        self.marks = (
            getattr(pytest.mark, name),
            pytest.mark.slow,
            pytest.mark.timeout(900),
            pytest.mark.skipif(not there, reason=reason),
        )
        self.alone = (*self.marks, pytest.mark.xdist_group(name))
        """And of one that shares its servers with others: all such run in one process."""

    def __call__(self, test: Any) -> Any:
        for mark in self.alone:
            test = mark(test)
        return test


SGLANG, VLLM = Installed(SGLangEngine), Installed(VLLMEngine)


class _Owner(ServedEngine[Any]):
    """Starts a server for others and keeps it. Folder, dtype and sizes are those of the first who asked."""

    @property
    def url(self) -> str:
        return str(self._wire._http.base_url)

    @property
    def running(self) -> bool:
        return self._server is not None and self._server.alive

    async def release(self) -> None:
        """Leaves the server running for the next test, which has an event loop of its own."""
        assert self._watch is not None
        self._watch.cancel()
        await self._wire.close()

    async def end(self) -> None:
        assert self._server is not None
        await self._server.stop()


SERVERS: dict[tuple[Any, ...], Any] = {}


class _Shared(ServedEngine[Any]):
    """The engine as a client of a shared server: `load_model` says of which architecture and dtype."""

    OWNER: Any
    INSTALLED: Installed

    def __init__(
        self,
        load_model: Callable[[], torch.nn.Module],
        *,
        max_cached_tokens: int = 131_072,
        steady: bool = False,
        **limits: Any,
    ) -> None:
        self._load_model = load_model
        self._base: tempfile.TemporaryDirectory[str] | None = None
        super().__init__(ModelConfig(path=""), url="http://later", max_cached_tokens=max_cached_tokens, **limits)

    async def start(self) -> None:
        try:
            model: Any = self._load_model()
        except TroupeError as error:
            self._dead = error
            raise
        lora, dtype = None, str(model.dtype).removeprefix("torch.")
        if hasattr(model, "peft_config"):
            adapter = model.peft_config["default"]
            lora = LoraSettings(rank=adapter.r, alpha=adapter.lora_alpha, targets=sorted(adapter.target_modules))
            model = model.unload()
        key = (self.OWNER, model.config.model_type, dtype, self._max_cached)
        if key not in SERVERS or not SERVERS[key].running:
            folder = tempfile.mkdtemp(prefix=f"troupe-test-{self.SETTING}-")
            model.config.architectures = [type(model).__name__]
            model.config.save_pretrained(folder)
            sizes: dict[str, Any] = {"max_running": 64, "max_cached_tokens": self._max_cached, "start_s": START_S}
            SERVERS[key] = self.OWNER(ModelConfig(path=folder, dtype=dtype), python=self.INSTALLED.python, **sizes)
            await SERVERS[key].start()
            await SERVERS[key].release()
        self._model, self._url = SERVERS[key]._model, SERVERS[key].url
        if lora is not None:  # the base is the engine's to send
            self._base = tempfile.TemporaryDirectory(prefix=f"troupe-test-{self.SETTING}-")
            model.save_pretrained(self._base.name)
            self._model = ModelConfig(path=self._base.name, dtype=dtype, lora=lora)
        await super().start()

    async def close(self) -> None:
        await super().close()
        if self._base is not None:
            self._base.cleanup()


class _SGLangOwner(_Owner, SGLangEngine):
    pass


class SharedSGLang(_Shared, SGLangEngine):
    OWNER, INSTALLED = _SGLangOwner, SGLANG


class Routed:
    """Two servers behind an sglang-router; see `_Owner`."""

    def __init__(self, model: ModelConfig, **limits: Any) -> None:
        self._model = model
        self.owners = [_SGLangOwner(model, **limits) for _ in range(2)]
        self.url = f"http://127.0.0.1:{free_port()}"
        self._router: Server | None = None

    @property
    def running(self) -> bool:
        return self._router is not None and self._router.alive and all(owner.running for owner in self.owners)

    async def start(self) -> None:
        for owner in self.owners:
            await owner.start()
        command = [SGLANG.python, "-m", "sglang_router.launch_router", "--host", "127.0.0.1", "--policy", "cache_aware"]
        command += ["--port", self.url.rpartition(":")[2], "--prometheus-port", str(free_port())]
        command += ["--health-check-endpoint", "/model_info", "--worker-urls", *(owner.url for owner in self.owners)]
        self._router = Server("the router", command, Path(self._model.path) / "router.log", {"HF_HUB_OFFLINE": "1"})
        await self._router.start(self._knows_all, START_S)

    async def _knows_all(self) -> bool:
        wire = Wire("the router", self.url)
        try:
            return await wire.up() and len(await wire.listed()) == 2
        finally:
            await wire.close()

    async def release(self) -> None:
        for owner in self.owners:
            await owner.release()

    async def end(self) -> None:
        if self._router is not None:
            await self._router.stop()
        for owner in self.owners:
            await owner.end()


class SharedRouted(_Shared, SGLangEngine):
    OWNER, INSTALLED = Routed, SGLANG


class _VLLMOwner(_Owner, VLLMEngine):
    pass


class SharedVLLM(_Shared, VLLMEngine):
    OWNER, INSTALLED = _VLLMOwner, VLLM


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
