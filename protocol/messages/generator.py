"""What is said to a generator (`actors/generator.py`) and to a router in front of several: turns to sample, weights to hold."""

from __future__ import annotations

from dataclasses import dataclass

from troupe.protocol.messages.common import CONFIG, Blob, Sampling
from troupe.protocol.trajectory import Finish, Float32, Int32


@dataclass(slots=True)
class Generate:
    """Extend `prompt` (token ids, shape [n]). `session` lets the engine keep its KV cache between the turns of one
    trajectory. The same `seed`, prompt and weights draw the same uniform numbers. A replica whose weights are older than
    `min_version` refuses it.

    group: requests of one group begin alike (the members of a training group share a prompt); None: of no group.
    """

    __pydantic_config__ = CONFIG
    request: str
    session: str
    prompt: Int32
    sampling: Sampling
    seed: int = 0
    min_version: int = -1
    group: int | None = None


@dataclass(slots=True)
class Generated:
    """Sampled ids [k], their logprobs [k] and the weight version that sampled each of them [k], from the engine itself.

    finish: "stop" (a stop id, included), "length" (max_tokens) or "abort" (what was sampled until then).
    """

    __pydantic_config__ = CONFIG
    tokens: Int32
    logprobs: Float32
    versions: Int32
    finish: Finish
    generator: str = ""


@dataclass(slots=True)
class Abort:
    """Nobody waits for this request any more: its tokens need not be sampled."""

    __pydantic_config__ = CONFIG
    request: str


@dataclass(slots=True)
class EndSession:
    """The trajectory is over: its KV cache may go."""

    __pydantic_config__ = CONFIG
    session: str


@dataclass(slots=True)
class Weights:
    """A weight version on its way: `checksum` is `checksum_of` the tensors, dict[str, numpy array].

    base: of an adapter, the checksum of the frozen weights that it was trained over; "" if that is not to be compared.
    tensors: opens to them, or to the path of a file that holds them (see `actors.transfer`). size: their bytes. packed_s: how
    long it took to bring them on their way.
    """

    __pydantic_config__ = CONFIG
    version: int
    checksum: str
    tensors: Blob
    size: int = 0
    packed_s: float = 0.0
    base: str = ""


@dataclass(slots=True)
class WeightsHeld:
    """Proof: the checksum of the tensors that this replica really holds, computed from its own copies."""

    __pydantic_config__ = CONFIG
    generator: str
    version: int
    checksum: str
