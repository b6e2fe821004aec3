"""An SGLang server as an engine: one server process a replica, spoken to over its native HTTP API.

The server is this engine's own, started by `sglang_inside.py` with the interpreter in which SGLang is installed, or somebody
else's, at an address; that one must have been started by `sglang_inside.py` too, and serves nobody else. An sglang-router may
stand there, with several such servers behind it (`sglang_routed.py`).

Promises, beyond those of `served.py`:
- spans of versions come from the server, which pauses for each change of weights; the checksum is of what its model holds;
- keys and values of other versions are never used by a request that comes after a change: each request's prefix cache is salted
  anew with each load. `retract`: requests in flight are fed again to the new weights, and the cache is emptied;
  `in_place`: they keep what the old weights computed for them, to their end, as do those that wait at the server;
- logprobs with top_k or with top_p are those that SGLang drew from. Both together are refused: it takes top_p of the whole
  distribution, Troupe of what top_k left.
"""

from __future__ import annotations

import asyncio
import tempfile
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch

from troupe.actors.engines import sglang_launch, sglang_routed
from troupe.actors.engines.base import Capabilities, Pause
from troupe.actors.engines.served import CALL_S, LOAD_S, ServedEngine
from troupe.actors.engines.sglang_group import Group
from troupe.actors.engines.sglang_wire import Wire, request_body
from troupe.actors.line import Offer
from troupe.learner.config import ModelConfig
from troupe.protocol.errors import ConfigError, NotReady, RemoteError, TroupeError
from troupe.protocol.messages import Generate


class SGLangEngine(ServedEngine[Wire]):
    """See `ServedEngine`.

    on_update: what becomes of requests in flight when weights change. transport: how weights get there; `disk`: as a file in a
    temporary folder that both see; `distributed`: from the learner's process into the server's own, if they come as an `Offer`.
    """

    KIND, SETTING, MARGIN = "SGLang", "sglang", sglang_launch.MARGIN

    def __init__(
        self,
        model: ModelConfig,
        *,
        on_update: Literal["retract", "in_place"] = "retract",
        transport: Literal["tensors", "disk", "distributed"] = "tensors",
        **common: Any,
    ) -> None:
        super().__init__(model, **common)
        self._on_update, self._transport = on_update, transport
        self._group = Group(self._name)

    @property
    def capabilities(self) -> Capabilities:
        """Seeds are obeyed; in other company a logit may round otherwise, so tokens are not repeatable without fail."""
        pauses: frozenset[Pause] = frozenset(("in_place", "retract", "abort"))
        pulls = self._transport == "distributed" and self._model.lora is None
        return Capabilities("sglang", pauses, score=True, adapters=True, repeatable=False, pulls=pulls)

    def _connect(self, url: str) -> Wire:
        return Wire(self._name, url)

    def _launch(self, port: int, scratch: Path) -> tuple[list[str], dict[str, str]]:
        command = sglang_launch.command(
            self._model,
            port,
            python=self._python,
            device=self._device,
            context=self._context,
            vocabulary=self._vocabulary,
            max_running=self._max_running,
            max_cached_tokens=self._max_cached,
            more=self._args,
        )
        return command, sglang_launch.environment(self._device, self._threads)

    async def _greet(self, wire: Wire) -> None:
        self._wire = wire = await sglang_routed.found(self._name, wire)
        if self._transport == "distributed" and len(wire.servers) > 1:
            raise ConfigError(
                f"{self._name}: the learner sends into one server, and behind {self._url} are {len(wire.servers)}: set "
                "generator.sglang_weights = 'tensors' or 'disk'"
            )
        for server in wire.servers:
            info = await server.call("/server_info")
            context = info.get("context_length") or self._context + self.MARGIN
            room = min(context, info.get("max_total_num_tokens") or self._max_cached)
            self._context = min(self._context, int(room) - self.MARGIN)
        await self._go_on(wire)  # whoever used it before may have died in a pause

    async def _look(self, wire: Wire) -> None:
        await wire.call("/server_info" if self._flights.held_back else "/health", limit_s=CALL_S)

    def _die(self, error: TroupeError) -> None:
        if self._dead is None and self._server is not None and self._server.wrote("NaN detected"):
            error = RemoteError(f"the model's logits are not finite numbers: its weights have diverged; {error}")
        super()._die(error)

    def _body(self, request: Generate, room: int, interval: int) -> dict[str, Any]:
        return request_body(request, room, self._vocabulary, interval)

    async def _score(self, wire: Wire, ids: np.ndarray[Any, Any], temperature: float) -> np.ndarray[Any, Any]:
        """Waits for the end of a pause."""
        body = {
            "input_ids": ids.tolist(),
            "return_logprob": True,
            "logprob_start_len": 0,
            "sampling_params": {"max_new_tokens": 0, "temperature": temperature},
            "extra_key": self._flights.salt,
        }
        found = await wire.score(body, LOAD_S)
        if [pair[1] for pair in found] != np.where(ids == self._vocabulary - 1, 0, ids).tolist():  # SGLang calls the last id 0
            raise RemoteError(f"{self._name} scored other ids than it was given")
        return np.array([pair[0] for pair in found[1:]], np.float32)

    async def _halt(self, wire: Wire, mode: Pause) -> None:
        await wire.call("/pause_generation", {"mode": "in_place" if mode == "abort" else mode}, limit_s=CALL_S)
        await wire.call("/server_info", limit_s=CALL_S)  # answered by the scheduler, after the step that was under way

    async def _go_on(self, wire: Wire) -> None:
        await wire.call("/continue_generation", {}, limit_s=CALL_S)

    async def _change(self, wire: Wire, version: int, named: list[tuple[str, torch.Tensor]]) -> str:
        if self._paused is None:
            await self._halt(wire, self._on_update)
        flush = (self._paused or self._on_update) == "retract"  # else it might be refused; the salt does without
        if self._transport != "disk":
            await wire.send_tensors(version, named, flush, LOAD_S)
        else:
            from safetensors.torch import save_file

            assert self._scratch is not None
            with tempfile.TemporaryDirectory(dir=self._scratch.name) as folder:
                await asyncio.to_thread(save_file, dict(named), f"{folder}/model.safetensors")
                body = {"model_path": folder, "load_format": "safetensors", "flush_cache": flush}
                await wire.call("/update_weights_from_disk", body | {"weight_version": str(version)}, limit_s=LOAD_S)
        held = await wire.held(LOAD_S)
        if self._paused is None:
            await self._go_on(wire)
        return held

    async def _pull(self, wire: Wire, offer: Offer) -> str:
        await self._group.enter(wire, offer)
        if self._paused is None:
            await self._halt(wire, self._on_update)
        try:
            await self._group.begin(offer)
        except NotReady:
            if self._paused is None:
                await self._go_on(wire)
            raise
        await self._group.take(wire, offer, (self._paused or self._on_update) == "retract", LOAD_S)
        held = await wire.held(LOAD_S)
        if self._paused is None:
            await self._go_on(wire)
        return held

    async def _end_server(self) -> None:
        self._group.close()
        await super()._end_server()
