"""What can be set about learning. Unknown keys and wrong types are refused; every field says what it does."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field


class _Settings(BaseModel):
    model_config = ConfigDict(extra="forbid", allow_inf_nan=False)


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


class LearnerConfig(_Settings):
    """How the policy's weights change."""

    lr: float = Field(3e-4, gt=0, description="peak learning rate of reinforcement learning")
    warmup_steps: int = Field(0, ge=0, description="training steps over which the learning rate rises linearly to lr")
    decay_steps: int = Field(
        0, ge=0, description="training steps over which the learning rate then falls linearly to a twentieth of lr; 0: it stays"
    )
    weight_decay: float = Field(0.0, ge=0, description="AdamW's decoupled weight decay")
    betas: tuple[float, float] = Field((0.9, 0.95), description="AdamW's moment decay rates")
    max_grad_norm: float = Field(1.0, gt=0, description="gradients longer than this are scaled down to it")

    advantage: str = Field("grpo", description="advantage estimator: a name, module:function or file.py:function")
    loss: str = Field("ppo_clip", description="policy loss: a name, module:function or file.py:function")
    clip_low: float = Field(0.2, gt=0, lt=1, description="the probability ratio is clipped below at 1 - clip_low")
    clip_high: float = Field(0.28, gt=0, description="the probability ratio is clipped above at 1 + clip_high")
    dual_clip: float = Field(3.0, gt=1, description="a token of negative advantage A loses at most dual_clip * |A|")
    importance: Literal["tis", "none"] = Field(
        "tis", description="tis: weigh tokens by min(p_old / p_rollout, tis_cap), against staleness and engine mismatch"
    )
    tis_cap: float = Field(2.0, gt=0, description="cap of the truncated importance weight")
    entropy_coef: float = Field(0.0, ge=0, description="weight of an entropy bonus in the loss")
    passes: int = Field(1, ge=1, description="epochs over one batch")
    minibatches: int = Field(1, ge=1, description="optimiser steps in a pass; the seed deals trajectories to them")

    cold_start_lr: float = Field(1e-3, gt=0, description="peak learning rate of the cold start; it decays as a cosine")
    cold_start_warmup: int = Field(10, ge=0, description="cold-start steps over which the rate rises linearly")

    tokens_per_micro_batch: int = Field(
        2048, ge=1, description="tokens of one forward and backward pass; bounds memory, never changes gradients"
    )
    threads: int = Field(1, ge=1, description="CPU threads")
    device: str = Field("auto", description="torch device; auto: the GPU that this process sees, else the CPU")
