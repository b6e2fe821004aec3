"""A vLLM server as an engine: one server process a replica, spoken to over its HTTP API.

Promises, beyond those of `served.py`:
- versions are certain: for a change of weights the server ends all requests, what they had sampled is kept, and they are sent
  again with it, as requests of their own. So each request at the server begins and ends with the same weights;
- hence requests in flight are always fed again to the new weights (`retract`), never kept with what the old ones computed;
- keys and values of other versions are never used: each version's requests are salted anew, and the cache is emptied;
- the checksum is of what the server's model holds (`vllm_inside.py`);
"""

from __future__ import annotations

import asyncio
import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import torch

from troupe.actors.engines import vllm_launch
from troupe.actors.engines.base import Capabilities, Pause
from troupe.actors.engines.served import CALL_S, LOAD_S, ServedEngine
from troupe.actors.engines.vllm_wire import Wire, request_body
from troupe.protocol.messages import Generate


class VLLMEngine(ServedEngine[Wire]):
    """See `ServedEngine`."""

    KIND, SETTING, MARGIN = "vLLM", "vllm", 0

    @property
    def capabilities(self) -> Capabilities:
        """Seeds are obeyed; in other company a logit may round otherwise, so tokens are not repeatable without fail.

        vLLM itself can also pause in place; it is left out, because weights could not change then without a request living on.
        """
        pauses: frozenset[Pause] = frozenset(("retract", "abort"))
        return Capabilities("vllm", pauses, score=True, adapters=True, repeatable=False)

    def _connect(self, url: str) -> Wire:
        return Wire(self._name, url)

    def _launch(self, port: int, scratch: Path) -> tuple[list[str], dict[str, str]]:
        command = vllm_launch.command(
            self._model,
            port,
            python=self._python,
            device=self._device,
            context=self._context,
            max_running=self._max_running,
            max_cached_tokens=self._max_cached,
            more=self._args,
        )
        return command, vllm_launch.environment(self._device, self._threads, scratch)

    async def _greet(self, wire: Wire) -> None:
        answer = await wire.call("/v1/models")
        self._context = min(self._context, int(answer["data"][0]["max_model_len"]) - 1)
        await self._go_on(wire)  # whoever used it before may have died in a pause

    def _body(self, request: Generate, room: int, interval: int) -> dict[str, Any]:
        return request_body(request, room, self._vocabulary, interval)

    async def _score(self, wire: Wire, ids: np.ndarray[Any, Any], temperature: float) -> np.ndarray[Any, Any]:
        """Waits for the end of a pause. One that a change of weights meets is asked again."""
        while True:
            scores = await wire.score(ids.tolist(), temperature, self._flights.salt, LOAD_S)
            if scores is not None:
                return np.array(scores, np.float32)

    async def _halt(self, wire: Wire, mode: Pause) -> None:
        """Ends what is at the server, and then what was still on its way there when it was told."""
        recalled = asyncio.create_task(self._flights.recall(CALL_S))
        try:
            await wire.call("/pause?mode=abort&clear_cache=true", {}, limit_s=CALL_S)
            await recalled
        finally:
            recalled.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await recalled

    async def _go_on(self, wire: Wire) -> None:
        await wire.call("/resume", {}, limit_s=CALL_S)

    async def _change(self, wire: Wire, version: int, named: list[tuple[str, torch.Tensor]]) -> str:
        from safetensors.torch import save_file

        if self._paused is None:
            await self._halt(wire, "retract")
        assert self._scratch is not None
        path = Path(self._scratch.name) / "weights.safetensors"
        try:
            await asyncio.to_thread(save_file, dict(named), path)
            await wire.ask("troupe_load", str(path), limit_s=LOAD_S)
        finally:
            path.unlink(missing_ok=True)
        held = str(await wire.ask("troupe_held", limit_s=LOAD_S))
        wire.version = version
        if self._paused is None:
            await self._go_on(wire)
        return held
