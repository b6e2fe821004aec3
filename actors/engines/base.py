"""The promise of every generation engine: token ids in, token ids out, with the truth about each of them.

Promises of an implementation:
- it never sees text; the prompt is fed exactly as given;
- `Generated.logprobs` are of the distribution that was sampled from (after temperature, top_k, top_p), and
  `Generated.versions` name the weights that sampled each token, stamped where the token is sampled;
- weights change between two tokens, never inside one; a request in flight goes on, its later tokens name the new one;
- `load_weights` answers with the checksum of the tensors that the engine now holds, computed from its own copies.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from troupe.protocol.messages import Generate, Generated


class Engine(Protocol):
    """One replica of the policy. All methods may be called concurrently from one asyncio event loop."""

    version: int
    """Weight version in use; -1 before the first `load_weights`."""

    async def start(self) -> None:
        """Load the model. Call once."""

    async def generate(self, request: Generate) -> Generated:
        """Sample a continuation. Raises NotReady before the first `load_weights`, Overloaded when the queue is full."""

    async def abort(self, request: str) -> None:
        """End the request early: its `generate` returns what was sampled (finish "abort"). Unknown ids are ignored."""

    async def end_session(self, session: str) -> None:
        """Drop what was kept for the session between turns."""

    async def load_weights(self, version: int, tensors: Mapping[str, np.ndarray[Any, Any]]) -> str:
        """Take over `tensors` (see `learner.model.tensors_of`) as `version`; returns the checksum of what is held."""

    def stats(self) -> dict[str, float]:
        """`load` (requests in flight), `busy` (share of the time since the last call), `tokens` (sampled since start).

        An engine may add numbers of its own.
        """

    async def close(self) -> None:
        """Stop; requests in flight end with "abort"."""
