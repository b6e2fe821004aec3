"""SGLang's native HTTP API, as far as the engine speaks it: calls, streams of pieces, and weights.

What the server tells is taken as it is: ids, logprobs and versions come from its answer, and one that contradicts itself is an
error, never mended.
"""

from __future__ import annotations

import base64
import pickle
from collections.abc import AsyncIterator, Iterable, Iterator
from typing import Any

import numpy as np
import torch

from troupe.actors.engines.base import Piece
from troupe.actors.engines.wire import ServerWire
from troupe.protocol.errors import ActorLost, ConfigError, RemoteError
from troupe.protocol.messages import Generate

BUCKET_BYTES = 256 * 2**20
"""Weights sent in one call, at most (or one tensor)."""


def request_body(request: Generate, max_new_tokens: int, vocabulary: int, interval: int) -> dict[str, Any]:
    """What /generate is asked for. interval: tokens in a piece. Raises ConfigError for what SGLang means otherwise."""
    settings = request.sampling
    greedy = settings.temperature == 0
    top_k = settings.top_k if 0 < settings.top_k < vocabulary and not greedy else 0
    top_p = settings.top_p if not greedy else 1.0
    if top_k and top_p < 1:
        raise ConfigError(
            f"top_k = {top_k} and top_p = {top_p} together: SGLang takes top_p of the whole distribution, Troupe of what top_k "
            "left; set one of them, or generator.engine = 'local'"
        )
    return {
        "input_ids": request.prompt.tolist(),
        "return_logprob": True,
        "sampling_params": {
            "max_new_tokens": max_new_tokens,
            "temperature": settings.temperature,
            "top_p": top_p,
            "top_k": top_k or (vocabulary if top_p < 1 else -1),  # with one, SGLang tells the logprob of what is left, too
            "stop_token_ids": [i for i in settings.stop_ids if 0 <= i < vocabulary],
            "sampling_seed": request.seed % 2**63,
            "stream_interval": interval,
        },
    }


class Wire(ServerWire):
    """name: of the server, in errors. url: http://host:port. servers: all that stand behind it (`sglang_routed.py`)."""

    def __init__(self, name: str, url: str) -> None:
        super().__init__(name, url, ready="/model_info")  # `/ready` is not for one that is paused
        self.servers: list[Wire] = [self]

    def addressed(self, body: dict[str, Any], rid: str, salt: str, said: list[int]) -> dict[str, Any]:
        """What is sent for a request. SGLang keeps those in flight itself: nothing was said before."""
        return {**body, "rid": rid, "extra_key": salt}

    async def generate(self, body: dict[str, Any]) -> AsyncIterator[tuple[Piece, dict[str, Any] | None]]:
        """Pieces of one request as they come, each with the reason for which it is the last one, or None."""
        told, limited = 0, body["sampling_params"]["top_k"] > 0
        async for chunk in self.chunks("/generate", body):
            piece = self._piece(chunk, told, limited)
            told += len(piece.tokens)
            ended = chunk["meta_info"]["finish_reason"]
            yield piece, ended
            if ended:
                return
        raise ActorLost(f"{self._name} ended an answer before its end")

    async def abort(self, rid: str) -> None:
        """Has the server end the request."""
        await self.call("/abort_request", {"rid": rid})

    def _piece(self, chunk: dict[str, Any], told: int, limited: bool = False) -> Piece:
        """told: how many of the request's tokens came before. A chunk may repeat some of them. limited: whether it was drawn
        from a part of the distribution."""
        meta = chunk["meta_info"]
        ids = chunk["output_ids"]
        ids = ids[len(ids) - (meta["completion_tokens"] - told) :] if meta["completion_tokens"] > told else []
        k = len(ids)
        if told + k != meta["completion_tokens"]:
            raise RemoteError(f"{self._name} left out tokens of '{meta['id']}': {told} + {k} of {meta['completion_tokens']}")
        pairs = meta["output_token_logprobs"][-k:] if k else []
        logprobs = [pair[0] for pair in pairs]
        if limited and k:
            logprobs = (meta.get("output_token_sampling_logprobs") or [])[-k:]
        if [pair[1] for pair in pairs] != ids or len(logprobs) != k:
            raise RemoteError(f"{self._name} told logprobs of other tokens than it sampled for '{meta['id']}'")
        versions = np.full(k, -1, np.int32)
        for span in meta.get("weight_versions") or ():
            versions[max(span["start"] - told, 0) : max(span["end"] - told, 0)] = _version(self._name, span["version"])
        if k and versions.min() < 0:
            raise RemoteError(f"{self._name} did not tell which weights sampled '{meta['id']}': start it by sglang_inside.py")
        return Piece(np.array(ids, np.int32), np.array(logprobs, np.float32), versions)

    async def score(self, body: dict[str, Any], limit_s: float) -> list[list[Any]]:
        """Logprobs of the prompt's ids: [logprob, id, None] of each; the first has none."""
        answer = await self.call("/generate", body, limit_s=limit_s)
        found: list[list[Any]] = answer["meta_info"]["input_token_logprobs"]
        return found

    async def up(self) -> bool:
        """Whether it serves by now; or a router, whose own word is another."""
        return await super().up() or await self._serves("/readiness")

    async def listed(self) -> list[dict[str, Any]]:
        """The servers behind a router, each with its `id` and `url`. Raises RemoteError if it is none."""
        found: list[dict[str, Any]] = (await self.call("/workers"))["workers"]
        return found

    async def take_off(self, entry: dict[str, Any]) -> None:
        """Has a router forget one that it `listed`. It does so a little later."""
        await self._asked("DELETE", f"/workers/{entry['id']}", None, 60.0)

    async def held(self, limit_s: float) -> str:
        """The checksum of the tensors in the server's model (see `sglang_inside`)."""
        answer = await self.call("/weights_checker", {"action": "held"}, limit_s=limit_s)
        return str(answer["ranks"][0]["checksums"]["held"])

    async def send_tensors(self, version: int, tensors: list[tuple[str, torch.Tensor]], flush: bool, limit_s: float) -> None:
        """Weights in buckets; the last one makes them `version`. flush: and forget the keys and values of others."""
        await self.call("/begin_weight_update", {}, limit_s=limit_s)
        buckets = list(_buckets(tensors))
        for i, bucket in enumerate(buckets):
            last = i == len(buckets) - 1
            payload = base64.b64encode(pickle.dumps(bucket, protocol=5)).decode()
            body = {"serialized_named_tensors": [payload], "flush_cache": flush and last}
            await self.call(
                "/update_weights_from_tensor", body | ({"weight_version": str(version)} if last else {}), limit_s=limit_s
            )
        await self.call("/end_weight_update", {}, limit_s=limit_s)


def _version(name: str, text: str) -> int:
    try:
        return int(text)
    except ValueError:
        raise RemoteError(f"{name} sampled with weights '{text}' that were not loaded through this engine") from None


def _buckets(tensors: Iterable[tuple[str, torch.Tensor]]) -> Iterator[list[tuple[str, torch.Tensor]]]:
    bucket: list[tuple[str, torch.Tensor]] = []
    size = 0
    for name, tensor in tensors:
        if bucket and size + tensor.nbytes > BUCKET_BYTES:
            yield bucket
            bucket, size = [], 0
        bucket.append((name, tensor))
        size += tensor.nbytes
    yield bucket
