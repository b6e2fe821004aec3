"""vLLM's HTTP API, as far as the engine speaks it: requests in token ids, scores, and weights.

What the server tells is taken as it is: ids and logprobs come from its answer, and one that contradicts itself is an error,
never mended. Versions are not the server's to tell: no request outlives the weights that it was sent to (`vllm.py`).
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import numpy as np

from troupe.actors.engines.base import Piece
from troupe.actors.engines.wire import ServerWire
from troupe.protocol.errors import RemoteError
from troupe.protocol.messages import Generate

MODEL = "troupe"
"""What the model is called at the server."""


def request_body(request: Generate, max_new_tokens: int, vocabulary: int, interval: int) -> dict[str, Any]:
    """What /v1/completions is asked for. interval: tokens in a piece."""
    settings = request.sampling
    greedy = settings.temperature == 0
    return {
        "model": MODEL,
        "prompt": request.prompt.tolist(),
        "max_tokens": max_new_tokens,
        "temperature": settings.temperature,
        "top_p": 1.0 if greedy else settings.top_p,
        "top_k": settings.top_k if 0 < settings.top_k < vocabulary and not greedy else 0,
        "stop_token_ids": [i for i in settings.stop_ids if 0 <= i < vocabulary],
        "ignore_eos": True,  # a turn ends at the ids above, not at what the model's folder calls its end
        "seed": request.seed,  # see `addressed`
        "logprobs": 0,  # of the sampled token
        "return_token_ids": True,
        "return_tokens_as_token_ids": True,
        "stream_interval": interval,
    }


class Wire(ServerWire):
    """name: of the server, in errors. url: http://host:port."""

    version = -1
    """Of the weights that sample what is sent now. It changes only while no request is at the server."""

    def __init__(self, name: str, url: str) -> None:
        super().__init__(name, url, ready="/health")

    def addressed(self, body: dict[str, Any], rid: str, salt: str, said: list[int]) -> dict[str, Any]:
        """What is sent for a request, or for the rest of one. Each place in a sequence draws with numbers of its own."""
        prompt = body["prompt"] + said
        seed = np.random.SeedSequence([body["seed"] % 2**64, len(prompt)]).generate_state(1, np.uint64)[0]
        return body | {
            "prompt": prompt,
            "max_tokens": body["max_tokens"] - len(said),
            "seed": int(seed >> np.uint64(1)),
            "request_id": rid,
            "cache_salt": salt,
        }

    async def generate(self, body: dict[str, Any]) -> AsyncIterator[tuple[Piece, dict[str, Any] | None]]:
        """Pieces of one request as they come, each with the reason for which it is the last one, or None."""
        version = self.version
        async for chunk in self.chunks("/v1/completions", body):
            for choice in chunk["choices"]:
                ended = choice.get("finish_reason")
                yield self._piece(choice, version), {"type": ended} if ended else None
                if ended:
                    return
        yield self._piece({}, version), {"type": "abort"}  # of one that ends before its first token vLLM says nothing

    def _piece(self, choice: dict[str, Any], version: int) -> Piece:
        ids = choice.get("token_ids") or []
        told = choice.get("logprobs") or {}
        if [f"token_id:{i}" for i in ids] != (told.get("tokens") or []):
            raise RemoteError(f"{self._name} told logprobs of other tokens than it sampled: {told.get('tokens')} for {ids}")
        logprobs = told.get("token_logprobs") or []
        if None in logprobs:
            raise RemoteError(f"{self._name}: the model's logits are not finite numbers: its weights have diverged")
        return Piece(np.array(ids, np.int32), np.array(logprobs, np.float32), np.full(len(ids), version, np.int32))

    async def abort(self, rid: str) -> None:
        """Has the server end the request."""
        await self.call("/abort_requests", {"request_ids": [f"cmpl-{rid}-0"]})

    async def score(self, ids: list[int], temperature: float, salt: str, limit_s: float) -> list[float] | None:
        """Logprobs of the ids after the first; None if the request was ended by a change of weights."""
        body = {
            "model": MODEL,
            "prompt": ids,
            "max_tokens": 1,  # vLLM samples one at least
            "temperature": temperature,
            "prompt_logprobs": 0,
            "return_token_ids": True,
            "cache_salt": salt,
        }
        choice = (await self.call("/v1/completions", body, limit_s=limit_s))["choices"][0]
        if choice["finish_reason"] == "abort":
            return None
        found = choice["prompt_logprobs"][1:]
        if len(found) != len(ids) - 1 or any(str(i) not in told for i, told in zip(ids[1:], found, strict=True)):
            raise RemoteError(f"{self._name} scored other ids than it was given")
        scores = [told[str(i)]["logprob"] for i, told in zip(ids[1:], found, strict=True)]
        if None in scores:
            raise RemoteError(f"{self._name}: the model's logits are not finite numbers: its weights have diverged")
        return scores

    async def ask(self, method: str, *arguments: str, limit_s: float) -> Any:
        """Calls a method of the worker (`vllm_inside.py`)."""
        answer = await self.call("/collective_rpc", {"method": method, "args": arguments}, limit_s=limit_s)
        results = answer.get("results")
        if not isinstance(results, list) or len(results) != 1:
            raise RemoteError(f"{self._name} answered {method} with {results}: it was to have one rank")
        return results[0]
