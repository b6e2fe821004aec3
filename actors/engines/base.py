"""The promise of every generation engine: token ids in, token ids out, with the truth about each of them.

Promises of an implementation:
- it never sees text; the prompt is fed exactly as given;
- logprobs are of the distribution that was sampled from (after temperature, top_k, top_p), and versions name the weights that
  sampled each token, stamped where the token is sampled;
- weights change between two tokens, never inside one; a request in flight goes on, its later tokens name the new one;
- `load_weights` answers with the checksum of the tensors that the engine now holds, computed from its own copies.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from troupe.actors.line import Offer
from troupe.protocol.messages import Generate, Generated
from troupe.protocol.trajectory import Finish

if TYPE_CHECKING:
    import torch

Pause = Literal["in_place", "retract", "abort"]
"""What becomes of the requests in flight when an engine pauses.

in_place: they keep their place and their keys and values, and go on from there. retract: they give their keys and values up;
all their tokens are fed again when the engine goes on, to the weights of then. abort: they end with what was sampled.
"""


@dataclass(frozen=True, slots=True)
class Capabilities:
    """What an engine can do, so that whoever configures it is refused at start and not in the middle of a run."""

    name: str
    pauses: frozenset[Pause]
    score: bool
    """Whether it tells logprobs of ids that it did not sample."""
    adapters: bool
    """Whether a LoRA adapter can be sent alone: the engine holds it beside its base, or merges the two."""
    repeatable: bool
    """Whether the same request, seed and weights draw the same tokens in any company."""
    pulls: bool = False
    """Whether it takes an `Offer` in the place of tensors, and has them sent to where it holds them."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some tokens of a request, as in `Generated`: ids [k], their logprobs [k] and versions [k].

    finish: how the request ended, in its last piece (which may have no token); None before.
    """

    tokens: np.ndarray[Any, np.dtype[np.int32]]
    logprobs: np.ndarray[Any, np.dtype[np.float32]]
    versions: np.ndarray[Any, np.dtype[np.int32]]
    finish: Finish | None = None


class Engine(Protocol):
    """One replica of the policy. All methods may be called concurrently from one asyncio event loop."""

    version: int
    """Weight version in use; -1 before the first `load_weights`."""

    base: str
    """Of adapters, once one is loaded: the checksum of the weights under them that are held (`learner.model.base_of`)."""

    @property
    def capabilities(self) -> Capabilities:
        """Known before `start`."""

    async def start(self) -> None:
        """Load the model. Call once."""

    async def generate(self, request: Generate) -> Generated:
        """Sample a continuation. Raises NotReady before the first `load_weights`, Overloaded when the queue is full."""

    def stream(self, request: Generate) -> AsyncIterator[Piece]:
        """The same as it comes: pieces which together are what `generate` returns. Raises as `generate` does. Leaving the
        iterator early aborts the request."""

    async def abort(self, request: str) -> None:
        """End the request early: its `generate` returns what was sampled (finish "abort"). Unknown ids are ignored."""

    async def pause(self, mode: Pause) -> None:
        """Sample nothing from now on. Returns when no token is being computed. Requests still come in, and wait."""

    async def resume(self) -> None:
        """Go on after `pause`; without one it does nothing."""

    async def score(self, sequences: Sequence[np.ndarray[Any, Any]], temperature: float = 1.0) -> list[np.ndarray[Any, Any]]:
        """Logprobs of given ids under the weights in use, without top_k and top_p.

        sequences: ids, each [n], n ≥ 2. Returns for each [n - 1] float32: of id i + 1 after those up to i.
        """

    async def end_session(self, session: str) -> None:
        """Drop what was kept for the session between turns."""

    async def load_weights(self, version: int, tensors: Mapping[str, np.ndarray[Any, Any] | torch.Tensor] | Offer) -> str:
        """Take over `tensors` (see `learner.model.tensors_of`) as `version`; returns the checksum of what is held. Arrays may
        not be written to, torch tensors become the engine's own."""

    async def check(self) -> None:
        """Raises ActorLost or RemoteError if the engine cannot work any more."""

    def stats(self) -> dict[str, float]:
        """`load` (requests in flight), `busy` (share of the time since the last call), `tokens` (sampled since start).

        An engine may add numbers of its own.
        """

    async def close(self) -> None:
        """Stop; requests in flight end with "abort"."""
