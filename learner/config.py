"""What can be set about learning. Unknown keys and wrong types are refused; every field says what it does.

A training step is put together from independent parts, each a key of [learner]: `advantage` (who is credited), `filter`
(which groups train), `loss` (per token), `correct` (for samples of other weights or another engine), `aggregate` (from
tokens to one number), `kl` (to a frozen reference) and `schedule` (of the learning rate).
"""

from __future__ import annotations

import itertools
from typing import Literal

from pydantic import ConfigDict, Field, field_validator, model_validator

from troupe.learner.settings import DeviceOrAuto, Settings


class _Settings(Settings):
    model_config = ConfigDict(allow_inf_nan=False)


class LoraSettings(_Settings):
    """Low-rank adapters (arXiv:2106.09685): the base stays frozen and only the adapters are trained and published."""

    rank: int = Field(16, ge=1, description="rank of each adapter")
    alpha: int = Field(32, ge=1, description="the adapter's output is scaled by alpha / rank")
    targets: list[str] | Literal["all-linear"] = Field(
        "all-linear", description="names of the modules that get an adapter; all-linear is all but the output head"
    )


class ModelConfig(_Settings):
    """Which policy."""

    path: str = Field(description="folder in Hugging Face layout; without weights in it, they are drawn from the seed")
    dtype: Literal["float32", "bfloat16"] = Field(
        "float32", description="type of the weights that act; bfloat16 is trained through float32 masters"
    )
    lora: LoraSettings | None = Field(None, description="train adapters instead of all weights")


class KlSettings(_Settings):
    """[learner.kl]: a price for leaving a frozen reference: with model.lora the base model, else a copy of the policy."""

    coef: float = Field(0.001, ge=0, description="weight of the penalty")
    estimator: Literal["k1", "k2", "k3"] = Field("k3", description="of the divergence at a token; see learner/kl.py")
    where: Literal["loss", "reward"] = Field(
        "loss", description="loss: differentiated with the loss; reward: taken off each token's reward (k1 is meant for it)"
    )
    reset_every: int = Field(
        0, ge=0, description="training steps after which the policy becomes the reference anew (ProRL); 0: never; not with LoRA"
    )
    reset_optimiser: bool = Field(False, description="whether the optimiser then forgets its moments too (ProRL)")

    @model_validator(mode="after")
    def _resets(self) -> KlSettings:
        if self.reset_optimiser and not self.reset_every:
            raise ValueError("reset_optimiser is of no effect without a reset: set reset_every, or leave it out")
        return self


class CriticSettings(_Settings):
    """[learner.critic]: the value model of estimators that ask for one (gae, bi_level_gae)."""

    kind: Literal["head", "separate"] = Field(
        "head",
        description="head: a linear head on the policy's last hidden states, which it does not change; separate: a model",
    )
    path: str = Field("", description="folder of the separate model; empty: the policy's")
    lr: float = Field(1e-3, gt=0, description="learning rate")
    value_clip: float | None = Field(None, gt=0, description="values move at most this far in a training step; unset: freely")


class OverlongSettings(_Settings):
    """[learner.overlong]: DAPO's soft overlong punishment (arXiv:2503.14476, equation 13)."""

    limit: int = Field(ge=1, description="tokens that an episode may have; the whole factor is taken off beyond them")
    buffer: int = Field(ge=1, description="tokens before the limit over which the punishment grows from nothing")
    factor: float = Field(1.0, ge=0, description="reward taken off at the limit")
    counts: Literal["generated", "all"] = Field(
        "generated", description="generated: sampled tokens only; all: observations too"
    )

    @model_validator(mode="after")
    def _fits(self) -> OverlongSettings:
        if self.buffer > self.limit:
            raise ValueError(f"buffer = {self.buffer} is larger than limit = {self.limit}: make it smaller")
        return self


class StageSettings(_Settings):
    """[[learner.stages]]: weights of named parts of the rewards, from a training step on."""

    from_step: int = Field(ge=1, description="first training step of the stage; steps count from 1")
    reward_parts: dict[str, float] = Field(description="the stage's weights, in place of learner.reward_parts")


class ToolCostSettings(_Settings):
    """[learner.tool_cost]: OTC-PO's reward, which scales successes by the tool calls they took; see learner/tool_cost.py."""

    scale: float = Field(1.0, gt=0, description="α: reward of a success with the fewest calls, as a share of the world's")
    smooth: float = Field(1.0, gt=0, description="c: where no call is needed, a larger one takes less off for each")


class LearnerConfig(_Settings):
    """How the policy's weights change."""

    lr: float = Field(3e-4, gt=0, description="peak learning rate of reinforcement learning")
    schedule: Literal["linear", "cosine"] = Field("linear", description="how the learning rate falls over decay_steps")
    warmup_steps: int = Field(0, ge=0, description="training steps over which the learning rate rises linearly to lr")
    decay_steps: int = Field(
        0, ge=0, description="training steps over which the learning rate then falls to a twentieth of lr; 0: it stays"
    )
    weight_decay: float = Field(0.0, ge=0, description="AdamW's decoupled weight decay")
    betas: tuple[float, float] = Field((0.9, 0.95), description="AdamW's moment decay rates")
    max_grad_norm: float = Field(1.0, gt=0, description="gradients longer than this are scaled down to it")

    objective: Literal["policy_gradient", "preference"] = Field(
        "policy_gradient",
        description="preference: direct preference optimisation on successful and failed trajectories of one task (ETO); "
        "advantage and loss are then not used",
    )

    # -- rewards and which of them train
    reward_parts: dict[str, float] = Field(
        default_factory=dict, description="weights of named parts of the rewards; a part that is not named counts once"
    )
    stages: list[StageSettings] = Field(
        default_factory=list, description="other reward_parts from a from_step on, for rewards that change during a run"
    )
    overlong: OverlongSettings | None = Field(None, description="punish episodes that come near their token limit")
    tool_cost: ToolCostSettings | None = Field(
        None, description="scale successes by their tool calls, against the fewest in the group; filters see rewards before it"
    )
    filter: str = Field(
        "all",
        description="groups that train: all, informative, top_std, top_k, top_p, softmax_top_p, min_p or module:function",
    )
    filter_value: float = Field(
        0.25, gt=0, description="share, number or probability that the filter takes; see learner/filters.py"
    )

    # -- credit
    advantage: str = Field("grpo", description="advantage estimator: a name, module:function or file.py:function")
    sigma: Literal["unbiased", "population"] = Field("unbiased", description="standard deviation that groups are divided by")
    whiten: Literal["auto", "none", "batch"] = Field(
        "auto", description="batch: advantages get mean 0 and deviation 1 over all tokens; auto: if the estimator says so"
    )
    gamma: float = Field(1.0, gt=0, le=1, description="discount from one sampled token to the next; observations do not count")
    gae_lambda: float = Field(1.0, ge=0, le=1, description="decay of GAE's trace from token to token")
    turn_gamma: float = Field(1.0, gt=0, le=1, description="discount from turn to turn, of estimators that think in turns")
    turn_lambda: float = Field(1.0, ge=0, le=1, description="decay of bi-level GAE's trace from turn to turn")
    gigpo_weight: float = Field(1.0, ge=0, description="ω: weight of GiGPO's step advantages beside those of episodes")
    gigpo_norm: Literal["mean", "mean-std"] = Field("mean", description="whether GiGPO also divides by the deviation")
    teacher: str = Field(
        "", description="model folder that distill learns from: of the same tokenizer, for example another run's checkpoint"
    )
    pass_k: int = Field(4, ge=1, description="k of pass_at_k")
    aspo_delta: float = Field(-2.0, description="δ of ASPO; below 0 an early tool call is favoured")
    aspo_cap: float = Field(0.7, ge=0, lt=1, description="ASPO's bias is at most this share of the advantage")

    # -- loss
    loss: str = Field("ppo_clip", description="policy loss: a name, module:function or file.py:function")
    ratio: Literal["old", "rollout"] = Field(
        "old", description="what the probability ratio starts from: old, the learner's own logprobs; rollout, the engine's"
    )
    clip_low: float = Field(0.2, gt=0, lt=1, description="the probability ratio is clipped below at 1 - clip_low")
    clip_high: float = Field(0.28, gt=0, description="the probability ratio is clipped above at 1 + clip_high")
    dual_clip: float = Field(3.0, gt=1, description="a token of negative advantage A loses at most dual_clip * |A|")
    cispo_cap: Literal["1+clip_high", "clip_high"] = Field("1+clip_high", description="what CISPO clips its weight at")
    sapo_positive: float = Field(1.0, gt=0, description="SAPO's gate temperature for positive advantages")
    sapo_negative: float = Field(1.05, gt=0, description="SAPO's gate temperature for negative advantages")
    aggregate: Literal["auto", "token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum", "constant"] = Field(
        "auto", description="from per-token losses to one number, see learner/aggregate.py; auto: as the loss is defined"
    )
    aggregate_length: int | None = Field(None, ge=1, description="L of constant: the most tokens an episode may generate")
    correct: Literal["none", "tis", "icepop", "decoupled"] = Field(
        "tis",
        description="weigh tokens by p_old / p_rollout, against staleness and engine mismatch: tis caps it, icepop rejects "
        "what is out of bounds, decoupled keeps it; see learner/correct.py",
    )
    correct_level: Literal["token", "sequence"] = Field("token", description="sequence: the weight is an episode's product")
    tis_cap: float = Field(2.0, gt=0, description="cap of the truncated importance weight")
    icepop_low: float = Field(0.5, ge=0, description="IcePop rejects tokens whose weight is lower")
    icepop_high: float = Field(5.0, gt=0, description="IcePop rejects tokens whose weight is higher")
    decoupled_cap: float | None = Field(None, gt=0, description="decoupled rejects tokens whose weight is higher; unset: none")
    kl: KlSettings | None = Field(None, description="stay near a frozen reference")
    entropy_coef: float = Field(0.0, ge=0, description="weight of an entropy bonus in the loss")
    critic: CriticSettings = Field(default_factory=CriticSettings, description="the value model, if the estimator needs one")
    dpo_beta: float = Field(0.1, gt=0, description="β of direct preference optimisation: how much a preference may move")
    passes: int = Field(1, ge=1, description="epochs over one batch")
    minibatches: int = Field(1, ge=1, description="optimiser steps in a pass; the seed deals trajectories to them")

    cold_start_lr: float = Field(1e-3, gt=0, description="peak learning rate of the cold start; it decays as a cosine")
    cold_start_warmup: int = Field(10, ge=0, description="cold-start steps over which the rate rises linearly")

    tokens_per_micro_batch: int = Field(
        2048, ge=1, description="tokens of one forward and backward pass; bounds memory, never changes gradients"
    )
    activation_checkpointing: bool = Field(
        False, description="keep no activations but each layer's input, and compute them again: less memory, more time"
    )
    ranks: int = Field(
        1,
        ge=1,
        le=1024,
        description="processes that share weights and work (FSDP), each on its own GPU, or on the CPU; see docs/ranks.md",
    )
    threads: int = Field(1, ge=1, le=1024, description="CPU threads of each rank")
    device: DeviceOrAuto = Field("auto", description="cpu, cuda or cuda:N; auto: the GPU that this process sees, else the CPU")

    @model_validator(mode="after")
    def _combine(self) -> LearnerConfig:
        if self.ratio == "rollout" and self.correct != "none":
            raise ValueError(
                f"ratio = 'rollout' already weighs by the engine's logprobs and correct = {self.correct!r} would do it twice: "
                "set correct = 'none', or ratio = 'old'"
            )
        share = self.filter in ("top_std", "top_p", "softmax_top_p", "min_p")
        if share and self.filter_value > 1:
            raise ValueError(f"filter = '{self.filter}' takes a share as filter_value, at most 1; it is {self.filter_value:g}")
        if self.filter == "top_k" and self.filter_value < 1:
            raise ValueError(
                f"filter = 'top_k' takes a number of groups as filter_value, 1 or more; it is {self.filter_value:g}"
            )
        if self.correct == "decoupled" and self.correct_level == "sequence":
            raise ValueError("correct = 'decoupled' is defined token by token: set correct_level = 'token'")
        if self.correct == "icepop" and self.icepop_low > self.icepop_high:
            raise ValueError("icepop_low is above icepop_high: no token would be left; swap them")
        if self.aggregate == "constant" and self.aggregate_length is None:
            raise ValueError(
                "aggregate = 'constant' divides by a length that is the same in every step: set aggregate_length to the most "
                "tokens that an episode may generate"
            )
        return self

    @field_validator("stages")
    @classmethod
    def _ascend(cls, stages: list[StageSettings]) -> list[StageSettings]:
        starts = [stage.from_step for stage in stages]
        if any(one >= other for one, other in itertools.pairwise(starts)):
            raise ValueError(f"the stages begin at {', '.join(map(str, starts))}: let each begin after the one before it")
        return stages

    def at(self, step: int) -> LearnerConfig:
        """As it is for training step `step` (from 1): with the weights of its stage, the last that has begun."""
        begun = [stage for stage in self.stages if stage.from_step <= step]
        return self.model_copy(update={"reward_parts": begun[-1].reward_parts}) if begun else self
