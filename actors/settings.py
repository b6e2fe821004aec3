"""A recipe as typed data: what `cluster/config.py` reads from TOML and every actor is started with.

Each field's description is what `troupe config` prints; unknown keys are refused.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self
from urllib.parse import urlsplit

from pydantic import AfterValidator, ConfigDict, Field, model_validator

from troupe.learner.config import LearnerConfig, LoraSettings, ModelConfig
from troupe.learner.health.settings import HealthConfig
from troupe.learner.settings import Device, Settings
from troupe.protocol.messages import COLDEST


class _Section(Settings):
    model_config = ConfigDict(protected_namespaces=())


class EnvSettings(_Section):
    """[env]: the world and how many of it."""

    name: str = Field("frozen_lake", description="built-in name, entry point, module:Class or file.py:Class")
    options: dict[str, Any] = Field(default_factory=dict, description="passed to the world's constructor")
    actors: int = Field(2, ge=1, le=10_000, description="environment pool actors (processes) at the start")
    min_actors: int | None = Field(
        None, ge=1, le=10_000, description="fewest pools when idle; unset: `actors`. See docs/pools.md"
    )
    max_actors: int | None = Field(None, ge=1, le=10_000, description="most pools under load; unset: `actors`")
    slots: int = Field(32, ge=1, description="environments that one pool holds at a time")
    scale_out_s: float = Field(10.0, ge=0, allow_inf_nan=False, description="seconds of pressure until pools are added")
    scale_in_s: float = Field(60.0, ge=0, allow_inf_nan=False, description="seconds of little load until pools are taken away")
    slow_step_s: float | None = Field(
        None,
        gt=0,
        description="a p90 of world steps above this is pressure too; unset: only episodes that wait, and late loops",
    )
    drain_s: float | None = Field(
        None, ge=0, description="seconds that a pool that goes may finish its episodes; unset: rollout.episode_s"
    )
    max_turns: int | None = Field(None, ge=1, description="turns an episode may take; unset: the world's own number")

    def bounds(self) -> tuple[int, int]:
        """Fewest and most pools."""
        return self.min_actors or self.actors, self.max_actors or self.actors

    @property
    def elastic(self) -> bool:
        """Does the number of pools follow the load?"""
        least, most = self.bounds()
        return least < most

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        least, most = self.bounds()
        if not least <= self.actors <= most:
            raise ValueError(
                f"actors = {self.actors} is the number at the start; it is not within min_actors = {least}, max_actors = {most}"
            )
        return self


class TinyModel(_Section):
    """[model.tiny]: a policy of our own, made by the recipe when no pretrained one is named."""

    hidden: int = Field(128, ge=16, description="hidden size")
    layers: int = Field(4, ge=1, description="transformer layers")
    heads: int = Field(4, ge=1, description="attention heads")


class ModelSettings(_Section):
    """[model]: the policy."""

    path: str = Field("", description="Hugging Face folder or a fetched model's name; empty: make [model.tiny]")
    renderer: str = Field(
        "auto", description="messages to tokens: auto, chatml, generic, a family such as qwen3, or module:Class of your own"
    )
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="dtype of the weights that are served")
    lora: LoraSettings | None = Field(None, description="train adapters instead of all weights")
    tiny: TinyModel = Field(default_factory=TinyModel)


_STALENESS = {"sync": 0, "one-step-off": 1}
"""Modes that fix max_staleness."""


class RolloutSettings(_Section):
    """[rollout]: how experience is made."""

    groups_per_step: int = Field(8, ge=1, description="tasks in one training step")
    group_size: int = Field(8, ge=1, description="episodes of each task (one group)")
    tree: int = Field(
        0,
        ge=0,
        description="episodes of a group that begin at the start; each other one goes on from where a sibling was "
        "(see docs/dispatch.md); 0: all begin at the start",
    )
    tree_segment: int = Field(
        0, ge=0, description="with tree: fork also within a turn, after every so many tokens; 0: only between turns"
    )
    mode: Literal["sync", "one-step-off", "async"] = Field(
        "async",
        description="sync: generate, then train; one-step-off: generate the next step's batch, whole and with one version, "
        "beside training; async: as max_staleness allows (see docs/asynchrony.md)",
    )
    max_staleness: int = Field(
        1,
        ge=0,
        description="weight versions that a trained token may lag behind; sync: 0, one-step-off: 1; without mode, 0 is sync",
    )
    in_flight: Literal["finish", "update", "restart"] = Field(
        "update",
        description="turns that are being sampled when new weights come: finish them first, go on with the new weights from "
        "the next token, or sample them anew",
    )
    temperature: float = Field(1.0, ge=COLDEST, allow_inf_nan=False, description="sampling temperature")
    top_p: float = Field(1.0, gt=0, le=1, description="nucleus sampling; 1: off")
    top_k: int = Field(0, ge=0, description="top-k sampling; 0: off")
    max_tokens: int = Field(64, ge=1, description="tokens the agent may say in one turn")
    max_episode_tokens: int = Field(4096, ge=8, description="tokens of a whole episode, observations included")
    context_window: int | None = Field(None, ge=8, description="tokens of a prompt and its turn; unset: what the model can see")
    max_tool_calls: int = Field(64, ge=1, description="tool calls that an episode may take")
    stop: list[Annotated[str, Field(min_length=1)]] = Field(
        default_factory=list, description="strings that end a turn, beside the model's own end of turn"
    )
    oversample: float = Field(
        0.0, ge=0, le=4, description="share of further groups that are started; the stragglers are cancelled when enough are in"
    )
    filter: Literal["none", "informative"] = Field(
        "none", description="informative: groups whose rewards are all equal are stored, not trained, and replaced"
    )
    on_failure: Literal["retry", "drop-episode", "drop-group"] = Field(
        "retry",
        description="an episode that broke: retry elsewhere with the same task and seed (then drop its group), or drop at once "
        "the episode or its whole group",
    )
    attempts: int = Field(3, ge=1, le=100, description="with retry: attempts at an episode before it counts as failed")
    quarantine_after: int = Field(3, ge=1, description="failures that are the task's own until it is never dispatched again")
    env_step_s: float = Field(30.0, gt=0, allow_inf_nan=False, description="seconds that a world may take for one step")
    generate_s: float = Field(120.0, gt=0, allow_inf_nan=False, description="seconds that one turn's generation may take")
    episode_s: float = Field(600.0, gt=0, allow_inf_nan=False, description="seconds that one episode may take")

    @model_validator(mode="before")
    @classmethod
    def _completed(cls, given: Any) -> Any:
        """Of mode and max_staleness, the one that is left out follows from the other."""
        if not isinstance(given, dict):
            return given
        mode, most = given.get("mode"), given.get("max_staleness")
        if most is None and mode in _STALENESS:
            return given | {"max_staleness": _STALENESS[mode]}
        return given | {"mode": "sync"} if mode is None and most == 0 else given

    @model_validator(mode="after")
    def _agrees(self) -> RolloutSettings:
        meant = _STALENESS.get(self.mode)
        if meant is not None and self.max_staleness != meant:
            raise ValueError(
                f"mode = '{self.mode}' means max_staleness = {meant}, not {self.max_staleness}: leave it out (or set it "
                f"to {meant}), or set mode = '{'async' if self.max_staleness else 'sync'}'"
            )
        if meant is None and self.max_staleness == 0:
            raise ValueError("mode = 'async' with max_staleness = 0 is step by step: set mode = 'sync', or allow 1 or more")
        return self

    @model_validator(mode="after")
    def _grows(self) -> RolloutSettings:
        if self.tree >= self.group_size > 0 and self.tree:
            raise ValueError(f"tree = {self.tree} leaves none of {self.group_size} episodes to fork: make it less, or 0 (off)")
        if self.tree_segment and not self.tree:
            raise ValueError("tree_segment has no effect without tree: set tree to how many episodes begin at the start")
        if self.tree_segment and self.stop:
            raise ValueError("a stop string could begin before a fork and end after it: with stop, set tree_segment = 0")
        return self


class AgentSettings(_Section):
    """[agent]: how the policy and the world take turns."""

    loop: Literal["auto", "text", "react", "program"] = Field(
        "auto", description="auto: react if the world has tools, else text; program: your own harness (see docs/loops.md)"
    )
    program: str = Field("", description="module:function or file.py:function of the harness, for loop = 'program'")


def _warm(temperature: float) -> float:
    if 0 < temperature < COLDEST:
        raise ValueError(f"a temperature is 0 (greedy), or {COLDEST} or more")
    return temperature


def _address(url: str) -> str:
    try:
        parts = urlsplit(url)
        if not url or (parts.scheme in ("http", "https") and parts.hostname and parts.port != 0):
            return url
    except ValueError:  # a port that is none
        pass
    raise ValueError(f"'{url}' is no address of a server: write it as http://127.0.0.1:30000")


class GeneratorSettings(_Section):
    """[generator]: the replicas that sample tokens."""

    replicas: int = Field(1, ge=1, le=1024, description="generator actors")
    engine: Literal["local", "sglang", "vllm"] = Field("local", description="generation engine, see docs/engines.md")
    max_running: int = Field(64, ge=1, description="requests that one replica advances together")
    threads: int = Field(1, ge=1, le=1024, description="CPU threads of one replica")
    device: Device = Field("cpu", description="cpu, cuda or cuda:N")
    sglang_python: str = Field("", description="interpreter in which SGLang is installed; empty: the one that runs Troupe")
    sglang_url: Annotated[str, AfterValidator(_address)] = Field(
        "",
        description="http://host:port of a server that somebody else owns, or of an sglang-router before several; empty: each "
        "replica starts one",
    )
    sglang_tokens: int = Field(
        65_536, ge=64, description="tokens whose keys and values a server holds; their memory is taken at once"
    )
    sglang_update: Literal["retract", "in_place"] = Field(
        "retract",
        description="when weights change, requests in flight: are fed again to the new ones, or keep what the old computed",
    )
    sglang_weights: Literal["tensors", "disk", "distributed"] = Field(
        "tensors", description="how weights get to the server; distributed: from the learner itself, by `transfer`"
    )
    sglang_start_s: float = Field(300.0, gt=0, le=590, description="seconds that a server may take to start; an actor has 600")
    sglang_args: list[str] = Field(default_factory=list, description="further flags of the server")
    vllm_python: str = Field("", description="interpreter in which vLLM is installed; empty: the one that runs Troupe")
    vllm_tokens: int = Field(65_536, ge=64, description="tokens whose keys and values a vLLM server holds")
    vllm_start_s: float = Field(300.0, gt=0, le=590, description="seconds that a vLLM server may take to start (an actor: 600)")
    vllm_args: list[str] = Field(default_factory=list, description="further flags of the vLLM server")

    transfer: Literal["object_store", "disk", "gloo", "nccl"] = Field(
        "object_store",
        description="how new weights come from the learner: object_store, disk, straight into each replica's process by gloo, "
        "or from GPU to GPU by nccl (see docs/weights.md)",
    )

    @property
    def start_s(self) -> float:
        """Seconds that a replica may take to start."""
        return {"sglang": self.sglang_start_s, "vllm": self.vllm_start_s}.get(self.engine, 600.0)

    @model_validator(mode="after")
    def _straight(self) -> Self:
        inside = self.engine == "sglang" and self.sglang_weights == "distributed"
        if inside and self.transfer not in ("gloo", "nccl"):
            raise ValueError(
                "sglang_weights = 'distributed' has the learner send into the server's own process: set transfer = 'gloo' (or "
                "'nccl', on GPUs), or sglang_weights = 'tensors'"
            )
        if self.transfer == "nccl" and not (self.engine == "local" or inside):
            fix = "sglang_weights = 'distributed'" if self.engine == "sglang" else "transfer = 'gloo'"
            raise ValueError(f"transfer = 'nccl' cannot reach into the {self.engine} server's process like this: set {fix}")
        return self

    @model_validator(mode="after")
    def _one_each(self) -> Self:
        if self.sglang_url and self.replicas > 1:
            raise ValueError(f"sglang_url is one server, and {self.replicas} replicas need one each: set replicas = 1")
        return self


class ColdStartSettings(_Section):
    """[cold_start]: supervised steps on a scripted player's demonstrations before reinforcement learning."""

    steps: int = Field(0, ge=0, description="supervised steps; 0: none")
    batch: int = Field(32, ge=1, description="demonstrations a step")
    demonstrations: int = Field(2048, ge=1, description="demonstrations to play")
    noise: float = Field(0.5, ge=0, le=1, description="share of the scripted player's moves that are random")


class EvalSettings(_Section):
    """[eval]: held-out tasks, never trained on, with their own sampling settings."""

    tasks: int = Field(200, ge=0, description="held-out tasks; 0: no evaluation")
    trials: int = Field(1, ge=1, description="episodes of each")
    every: int = Field(0, ge=0, description="evaluate each this many steps too; 0: only first and last")
    temperature: Annotated[float, AfterValidator(_warm)] = Field(
        1.0, ge=0, allow_inf_nan=False, description="sampling temperature of evaluations; 0: greedy"
    )


class RunConfig(_Section):
    """The whole recipe."""

    name: str = Field("", description="name of the recipe; empty: its file's name")
    seed: int = Field(0, ge=0, description="seed of everything that is drawn")
    steps: int = Field(100, ge=1, description="training steps")
    checkpoint_every: int = Field(20, ge=1, description="steps between checkpoints")
    keep_checkpoints: int = Field(3, ge=1, description="newest checkpoints that are kept, beside the first")
    max_restarts: int = Field(8, ge=0, description="deaths of one actor within five minutes that stop the run")
    env: EnvSettings = Field(default_factory=EnvSettings)
    model: ModelSettings = Field(default_factory=ModelSettings)
    agent: AgentSettings = Field(default_factory=AgentSettings)
    rollout: RolloutSettings = Field(default_factory=RolloutSettings)
    learner: LearnerConfig = Field(default_factory=LearnerConfig)
    generator: GeneratorSettings = Field(default_factory=GeneratorSettings)
    cold_start: ColdStartSettings = Field(default_factory=ColdStartSettings)
    eval: EvalSettings = Field(default_factory=lambda: EvalSettings())
    health: HealthConfig = Field(default_factory=HealthConfig)

    @model_validator(mode="after")
    def _can_be_sampled(self) -> Self:
        engine = self.generator.engine
        if self.generator.transfer == "nccl":
            devices = {"learner.device": self.learner.device, "generator.device": self.generator.device}
            for name, device in devices.items():
                if not device.startswith("cuda"):
                    raise ValueError(
                        f"generator.transfer = 'nccl' goes from GPU to GPU, and {name} = '{device}': set it to 'cuda', with a "
                        "GPU for the learner and one for each replica, or set generator.transfer = 'gloo'"
                    )
        if engine == "sglang" and self.rollout.top_k and self.rollout.top_p < 1:
            raise ValueError("generator.engine = 'sglang' takes top_k or top_p, not both: leave one out, or use 'local'")
        return self

    def model_settings(self, folder: str) -> ModelConfig:
        """What learner and generator load: the model in `folder` with this recipe's dtype and adapter."""
        return ModelConfig.model_validate({"path": folder, "dtype": self.model.dtype, "lora": self.model.lora})
