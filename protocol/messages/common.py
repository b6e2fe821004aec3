"""What several actors are asked alike (are you alive, where did your time go, take no more work), and what messages to
different actors have in common."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import ConfigDict

from troupe.protocol.latency import Latencies

CONFIG = ConfigDict(arbitrary_types_allowed=True, extra="forbid")
"""Of every message: numpy arrays are welcome, fields that nobody knows are not."""


@dataclass(slots=True)
class Blob:
    """A handle to bulk data that lies beside the message. Opaque: only the host that made it can open it."""

    __pydantic_config__ = CONFIG
    ref: Any


@dataclass(slots=True)
class Ack:
    """Done, nothing to report."""

    __pydantic_config__ = CONFIG


@dataclass(slots=True)
class Ping:
    """Are you alive? Answered even while work is going on."""

    __pydantic_config__ = CONFIG


@dataclass(slots=True)
class Health:
    """Answer to `Ping`. `busy`: fraction of time spent working since the last ping; `load`: requests in flight.

    latency: of the worlds of an environment pool, since `born` (seconds since the epoch); lag: seconds that its event loop
    last made others wait.
    """

    __pydantic_config__ = CONFIG
    name: str
    pid: int
    load: int = 0
    busy: float = 0.0
    detail: dict[str, Any] = field(default_factory=dict)
    latency: Latencies = field(default_factory=dict)
    born: float = 0.0
    lag: float = 0.0


@dataclass(slots=True)
class Drain:
    """Take no more work and finish what runs: a pool its episodes, a generator its turns. `now`: end episodes as cancelled,
    and hand turns over (see `generator.py`). Answered with `Health`; asked again until its load is 0."""

    __pydantic_config__ = CONFIG
    now: bool = False


Track = Literal["", "weights"]
"""What a generator does with its weights goes on beside its requests."""


@dataclass(slots=True)
class Span:
    """What an actor did from `begin` to `end`, seconds since the epoch by its own clock.

    track: spans of one track of an actor nest; those that are `beside` may overlap as they like. labels: what else is to be
    known of it. value: then it is no span but a number that was so at `begin`.
    """

    __pydantic_config__ = CONFIG
    name: str
    begin: float
    end: float
    track: Track = ""
    beside: bool = False
    labels: dict[str, Any] = field(default_factory=dict)
    value: float | None = None


@dataclass(slots=True)
class GetSpans:
    """What have you done since span number `since`, at most the newest `limit` spans and numbers of it? Changes nothing: to be
    asked again if the answer is lost."""

    __pydantic_config__ = CONFIG
    since: int = 0
    limit: int = 1000


@dataclass(slots=True)
class Spans:
    """Answer to `GetSpans`. born: names this life of the actor. count: spans so far, which is the next `since`.

    spans: in the order of their ends; the oldest may be forgotten. totals: seconds by what was done, since `born`. busy: from
    when to when it was (had requests, trained), of those that it tells that of; no limit of spans shortens it.
    """

    __pydantic_config__ = CONFIG
    name: str
    born: float
    count: int
    spans: list[Span]
    totals: dict[str, float]
    busy: list[tuple[float, float]] = field(default_factory=list)


COLDEST = 0.01
"""The lowest temperature above 0 (greedy). Logits divided by less overflow sooner or later, and vLLM takes this one instead."""


@dataclass(slots=True)
class Sampling:
    """How tokens are drawn. Logprobs are of the distribution after temperature, top_k and top_p.

    max_tokens: per turn. top_k 0 and top_p 1 mean off. stop_ids end a turn and are kept as sampled tokens, as is every
    token up to the one in which a string of `stop` is complete.
    """

    __pydantic_config__ = CONFIG
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    max_tokens: int = 64
    stop_ids: list[int] = field(default_factory=list)
    stop: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Limits:
    """Named limits of an episode; docs/limits.md says what happens at each. Seconds for the *_s fields.

    max_episode_tokens: of all branches, each node once. context_window: of one branch; 0: unlimited.
    """

    __pydantic_config__ = CONFIG
    max_turns: int = 8
    max_episode_tokens: int = 4096
    context_window: int = 0
    max_tool_calls: int = 64
    generate_s: float = 120.0
    env_step_s: float = 30.0
    episode_s: float = 600.0
