"""What the actors say to each other: one frozen vocabulary, one request type in, one reply type out.

Promises:
- pure data: no Ray, no torch; every field has a type that `codec` checks when the message arrives;
- bulk (weights, batches) travels beside the message as a `Blob`, so that a host can pass it without copying.

Times are seconds, token ids int32, logprobs float32 natural logarithms. `version` counts weight updates; 0 is the
policy after its cold start.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import ConfigDict

from troupe.protocol.latency import Latencies
from troupe.protocol.trajectory import Finish, Float32, Int32, Kind, Status, StopReason, Task, Trajectory

_CONFIG = ConfigDict(arbitrary_types_allowed=True, extra="forbid")


@dataclass(slots=True)
class Blob:
    """A handle to bulk data that lies beside the message. Opaque: only the host that made it can open it."""

    __pydantic_config__ = _CONFIG
    ref: Any


@dataclass(slots=True)
class Ack:
    """Done, nothing to report."""

    __pydantic_config__ = _CONFIG


@dataclass(slots=True)
class Ping:
    """Are you alive? Answered even while work is going on."""

    __pydantic_config__ = _CONFIG


@dataclass(slots=True)
class Health:
    """Answer to `Ping`. `busy`: fraction of time spent working since the last ping; `load`: requests in flight.

    latency: of the worlds of an environment pool, since `born` (seconds since the epoch); lag: seconds that its event loop
    last made others wait.
    """

    __pydantic_config__ = _CONFIG
    name: str
    pid: int
    load: int = 0
    busy: float = 0.0
    detail: dict[str, Any] = field(default_factory=dict)
    latency: Latencies = field(default_factory=dict)
    born: float = 0.0
    lag: float = 0.0


# -- where time goes -------------------------------------------------------------------------------------------------


Track = Literal["", "weights"]
"""What a generator does with its weights goes on beside its requests."""


@dataclass(slots=True)
class Span:
    """What an actor did from `begin` to `end`, seconds since the epoch by its own clock.

    track: spans of one track of an actor nest; those that are `beside` may overlap as they like. labels: what else is to be
    known of it. value: then it is no span but a number that was so at `begin`.
    """

    __pydantic_config__ = _CONFIG
    name: str
    begin: float
    end: float
    track: Track = ""
    beside: bool = False
    labels: dict[str, Any] = field(default_factory=dict)
    value: float | None = None


@dataclass(slots=True)
class GetSpans:
    """What have you done since span number `since`, at most the newest `limit` of it? Changes nothing: to be asked again if the
    answer is lost."""

    __pydantic_config__ = _CONFIG
    since: int = 0
    limit: int = 1000


@dataclass(slots=True)
class Spans:
    """Answer to `GetSpans`. born: names this life of the actor. count: spans so far, which is the next `since`.

    spans: in the order of their ends; the oldest may be forgotten. totals: seconds by what was done, since `born`.
    """

    __pydantic_config__ = _CONFIG
    name: str
    born: float
    count: int
    spans: list[Span]
    totals: dict[str, float]


# -- sampling and limits ---------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Sampling:
    """How tokens are drawn. Logprobs are of the distribution after temperature, top_k and top_p.

    max_tokens: per turn. top_k 0 and top_p 1 mean off. stop_ids end a turn and are kept as sampled tokens, as is every
    token up to the one in which a string of `stop` is complete.
    """

    __pydantic_config__ = _CONFIG
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

    __pydantic_config__ = _CONFIG
    max_turns: int = 8
    max_episode_tokens: int = 4096
    context_window: int = 0
    max_tool_calls: int = 64
    generate_s: float = 120.0
    env_step_s: float = 30.0
    episode_s: float = 600.0


# -- generator -------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Generate:
    """Extend `prompt` (token ids, shape [n]). `session` lets the engine keep its KV cache between the turns of one
    trajectory. The same `seed`, prompt and weights draw the same uniform numbers. A replica whose weights are older than
    `min_version` refuses it.

    group: requests of one group begin alike (the members of a training group share a prompt); None: of no group.
    """

    __pydantic_config__ = _CONFIG
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

    __pydantic_config__ = _CONFIG
    tokens: Int32
    logprobs: Float32
    versions: Int32
    finish: Finish
    generator: str = ""


@dataclass(slots=True)
class Abort:
    """Nobody waits for this request any more: its tokens need not be sampled."""

    __pydantic_config__ = _CONFIG
    request: str


@dataclass(slots=True)
class EndSession:
    """The trajectory is over: its KV cache may go."""

    __pydantic_config__ = _CONFIG
    session: str


@dataclass(slots=True)
class Weights:
    """A weight version on its way: `checksum` is `checksum_of` the tensors, dict[str, numpy array].

    tensors: opens to them, or to the path of a file that holds them (see `actors.transfer`). size: their bytes. packed_s: how
    long it took to bring them on their way.
    """

    __pydantic_config__ = _CONFIG
    version: int
    checksum: str
    tensors: Blob
    size: int = 0
    packed_s: float = 0.0


@dataclass(slots=True)
class WeightsHeld:
    """Proof: the checksum of the tensors that this replica really holds, computed from its own copies."""

    __pydantic_config__ = _CONFIG
    generator: str
    version: int
    checksum: str


# -- environment pool ------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Sibling:
    """An attempt that has ended and is deposited: fork from it. `segment`: as in `RolloutSettings.tree_segment`."""

    __pydantic_config__ = _CONFIG
    episode: str
    attempt: int
    segment: int = 0


@dataclass(slots=True)
class RunEpisode:
    """Run one attempt of one episode to its end and deposit the trajectory in the store.

    sibling: begin with a part of what it did, drawn from `seed`, if the store still has it and it is long enough.
    min_version: no older weights sample any of its tokens."""

    __pydantic_config__ = _CONFIG
    episode: str
    attempt: int
    group: int
    member: int
    kind: Kind
    step: int
    task: Task
    sampling: Sampling
    limits: Limits
    seed: int
    sibling: Sibling | None = None
    min_version: int = -1


@dataclass(slots=True)
class EpisodeDone:
    """How an attempt ended; the trajectory itself is in the store if `stored`. `tokens`: sampled for it."""

    __pydantic_config__ = _CONFIG
    episode: str
    attempt: int
    status: Status
    stop: StopReason
    stored: bool
    pool: str
    reward: float = 0.0
    success: bool | None = None
    turns: int = 0
    tokens: int = 0
    oldest_version: int = -1
    failure_kind: Literal["infrastructure", "data", ""] = ""
    failure: str = ""


@dataclass(slots=True)
class CancelEpisode:
    """Nobody needs this attempt any more."""

    __pydantic_config__ = _CONFIG
    episode: str
    attempt: int


@dataclass(slots=True)
class Drain:
    """Take no more work and finish what runs: a pool its episodes, a generator its turns. `now`: end episodes as cancelled,
    and hand turns over (see `generator.py`). Answered with `Health`; asked again until its load is 0."""

    __pydantic_config__ = _CONFIG
    now: bool = False


@dataclass(slots=True)
class Routes:
    """The generators that hold proved weights and take work, by actor name."""

    __pydantic_config__ = _CONFIG
    generators: list[str]


@dataclass(slots=True)
class Demonstrate:
    """Let the world's scripted player play `tasks`; `noise` is the share of its moves that are random."""

    __pydantic_config__ = _CONFIG
    tasks: list[Task]
    noise: float
    max_turns: int
    seed: int
    env_step_s: float = 30.0


@dataclass(slots=True)
class Demonstrations:
    """Demonstrations as trajectories whose assistant tokens are the teacher's: `supervised` [n] says which they are.
    `broken`: why the last one that broke did, if any."""

    __pydantic_config__ = _CONFIG
    tokens: list[Int32]
    supervised: list[Int32]
    success: float
    broken: str = ""


@dataclass(slots=True)
class Rehearse:
    """Play `task` without a model, as the world's scripted player does; without one, with tools and words picked at random."""

    __pydantic_config__ = _CONFIG
    task: Task
    seed: int
    limits: Limits


@dataclass(slots=True)
class Rehearsed:
    """How it went: actions, those that the world did not accept, the return; what broke it, or an empty string."""

    __pydantic_config__ = _CONFIG
    steps: int = 0
    refused: int = 0
    reward: float = 0.0
    failure: str = ""


# -- dispatcher ------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Pools:
    """The environment pools that take episodes: actor name → slots; and those that take no more but finish what they run."""

    __pydantic_config__ = _CONFIG
    slots: dict[str, int]
    draining: list[str] = field(default_factory=list)


@dataclass(slots=True)
class PoolsHeard:
    """Answer to `Pools`. left: episodes on their way to each draining pool, or in it, by its name."""

    __pydantic_config__ = _CONFIG
    left: dict[str, int]


@dataclass(slots=True)
class Announce:
    """Every generator has proved that it holds `version`. Steps up to `version` are finished."""

    __pydantic_config__ = _CONFIG
    version: int


@dataclass(slots=True)
class Evaluate:
    """Run `tasks` × `trials` with the policy's current weights; never trained on (law 8)."""

    __pydantic_config__ = _CONFIG
    name: str
    version: int
    tasks: list[Task]
    trials: int
    sampling: Sampling
    limits: Limits
    seed: int


@dataclass(slots=True)
class Evaluated:
    """Scores in the order of tasks × trials. Broken episodes are not trials: they are counted in `failed`."""

    __pydantic_config__ = _CONFIG
    name: str
    version: int
    successes: list[bool]
    rewards: list[float]
    turns: float
    failed: int
    sampling: Sampling
    task_ids: list[str] = field(default_factory=list)


@dataclass(slots=True)
class DispatcherStatus:
    """Counts since the run began (restored after a restart, but for `retried`). `tokens`: sampled, evaluations included.

    dropped_groups: that a failure, a filter, their age or over-sampling kept from training; filtered_groups: of these, by
    the filter; stale_groups: because a token was older than the staleness budget allows (not restored).
    quarantined: task id → what it failed with. waiting: episodes that wait for a slot; used: slots that are taken, of
    `slots` in all pools that take episodes. moved: attempts that a draining pool gave up and another ran. granted: slots that
    were given so far in this life of the dispatcher, after waiting `queued_s` seconds in all.
    """

    __pydantic_config__ = _CONFIG
    version: int
    in_flight: int
    completed: int
    failed: int
    retried: int
    dropped_groups: int
    cancelled: int = 0
    filtered_groups: int = 0
    tokens: int = 0
    quarantined: dict[str, str] = field(default_factory=dict)
    events: list[str] = field(default_factory=list)
    waiting: int = 0
    used: int = 0
    slots: int = 0
    moved: int = 0
    stale_groups: int = 0
    granted: int = 0
    queued_s: float = 0.0


@dataclass(slots=True)
class EvaluateVersion:
    """Ask the evaluator for the held-out score of `version`."""

    __pydantic_config__ = _CONFIG
    version: int


@dataclass(slots=True)
class Evaluation:
    """Held-out score. `low`, `high`: 95 % Wilson interval of the success rate. None where no episode could be scored."""

    __pydantic_config__ = _CONFIG
    version: int
    success: float | None
    low: float | None
    high: float | None
    reward: float | None
    turns: float
    trials: int
    failed: int
    sampling: Sampling
    seconds: float = 0.0


# -- store -----------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Deposit:
    """The finished trajectory, once."""

    __pydantic_config__ = _CONFIG
    trajectory: Trajectory


@dataclass(slots=True)
class Receipt:
    """`accepted` is False for a late write of a dead attempt or a second write; `reason` says which."""

    __pydantic_config__ = _CONFIG
    accepted: bool
    reason: str = ""


@dataclass(slots=True)
class GetDeposit:
    """What this attempt has deposited, while its group is not committed. (A member that forks from it asks.)"""

    __pydantic_config__ = _CONFIG
    episode: str
    attempt: int


@dataclass(slots=True)
class Deposited:
    """The trajectory; None if the store does not hold it (any more)."""

    __pydantic_config__ = _CONFIG
    trajectory: Trajectory | None


@dataclass(slots=True)
class Fence:
    """Attempts below `attempt` of this episode are dead: refuse their writes from now on."""

    __pydantic_config__ = _CONFIG
    episode: str
    attempt: int


@dataclass(slots=True)
class CommitGroup:
    """These deposited trajectories are a whole group: make them durable. `trains` is False for evaluations and for
    groups that a filter dropped: they are stored, never trained."""

    __pydantic_config__ = _CONFIG
    group: int
    kind: Kind
    step: int
    episodes: list[str]
    trains: bool = True


@dataclass(slots=True)
class GetBatch:
    """The trajectories of training step `step`, once `groups` groups for it are committed. Waits at most `wait_s`."""

    __pydantic_config__ = _CONFIG
    step: int
    groups: int
    wait_s: float = 60.0


@dataclass(slots=True)
class Batch:
    """A training batch. `trajectories` opens to a pyarrow.Table as in `protocol.arrow`, rows ordered by id. None: not
    there yet."""

    __pydantic_config__ = _CONFIG
    step: int
    trajectories: Blob | None
    count: int = 0


@dataclass(slots=True)
class GetCommitted:
    """Which groups are durable? (A dispatcher that restarts asks.)"""

    __pydantic_config__ = _CONFIG


@dataclass(slots=True)
class Committed:
    """Group numbers by training step, for the groups that train; and counts of everything stored.

    dropped: training groups that do not train. data_failures: task id → messages of its failures of kind "data".
    """

    __pydantic_config__ = _CONFIG
    groups: dict[int, list[int]]
    dropped: list[int]
    completed: int
    failed: int
    cancelled: int = 0
    tokens: int = 0
    data_failures: dict[str, list[str]] = field(default_factory=dict)


# -- learner ---------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class ColdStart:
    """Supervised steps on demonstrations before reinforcement learning."""

    __pydantic_config__ = _CONFIG
    demonstrations: Demonstrations
    steps: int
    batch: int


@dataclass(slots=True)
class Train:
    """One training step on `batch`; produces version `batch.step`.

    settings: keys of [learner] that a remedy has changed, with their values in this step. restart: the step begins with the
    weights and the optimiser of the checkpoint of that step, instead of the learner's own.
    """

    __pydantic_config__ = _CONFIG
    batch: Batch
    settings: dict[str, Any] = field(default_factory=dict)
    restart: int | None = None


@dataclass(slots=True)
class Trained:
    """The learner's step is done: the new weights and what was measured on the way (field's usual names)."""

    __pydantic_config__ = _CONFIG
    step: int
    weights: Weights
    metrics: dict[str, float]


@dataclass(slots=True)
class GetWeights:
    """The newest weights, for a generator that joins late."""

    __pydantic_config__ = _CONFIG


@dataclass(slots=True)
class SaveCheckpoint:
    """Write a complete checkpoint of the current step, or none."""

    __pydantic_config__ = _CONFIG


@dataclass(slots=True)
class Saved:
    """Where the checkpoint lies."""

    __pydantic_config__ = _CONFIG
    step: int
    path: str


@dataclass(slots=True)
class LearnerStatus:
    """`step` 0 and `started` False: nothing learned yet, not even the cold start."""

    __pydantic_config__ = _CONFIG
    step: int
    started: bool
    progress: float = 0.0
    detail: dict[str, float] = field(default_factory=dict)


# -- director --------------------------------------------------------------------------------------------------------


@dataclass(slots=True)
class Scale:
    """Wanted numbers of children; None leaves a kind as it is."""

    __pydantic_config__ = _CONFIG
    env_actors: int | None = None
    generators: int | None = None


@dataclass(slots=True)
class GetStatus:
    """Ask the director how the run is doing. `since`: index of the first event wanted."""

    __pydantic_config__ = _CONFIG
    since: int = 0


@dataclass(slots=True)
class RunStatus:
    """What the terminal shows.

    metrics: the last line of metrics.jsonl. history: the success rate of each step. health: "ok", or what holds now.
    """

    __pydantic_config__ = _CONFIG
    phase: str
    step: int
    steps: int
    version: int
    progress: float
    metrics: dict[str, Any]
    history: list[float]
    actors: dict[str, str]
    events: list[str]
    events_total: int
    finished: bool = False
    health: str = "ok"
    error: str = ""


@dataclass(slots=True)
class Stop:
    """Stop at the next safe point and leave a resumable run folder. `reason` goes to the journal."""

    __pydantic_config__ = _CONFIG
    reason: str = ""
