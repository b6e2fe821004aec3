"""What of a configuration fits together: found before a model is loaded, refused with what to do instead, or told."""

from __future__ import annotations

from troupe.learner import advantages, filters, losses
from troupe.learner.config import LearnerConfig, ModelConfig
from troupe.protocol.errors import ConfigError

_READ_BY = {
    "gigpo_weight": ("advantage", {"gigpo"}),
    "gigpo_norm": ("advantage", {"gigpo"}),
    "pass_k": ("advantage", {"pass_at_k"}),
    "aspo_delta": ("advantage", {"aspo"}),
    "aspo_cap": ("advantage", {"aspo"}),
    "teacher": ("advantage", {"distill"}),
    "gamma": ("advantage", {"gae", "bi_level_gae", "reinforce_pp", "reinforce_pp_baseline"}),
    "gae_lambda": ("advantage", {"gae", "bi_level_gae"}),
    "turn_gamma": ("advantage", {"bi_level_gae", "gigpo", "reinforce", "turn_level"}),
    "turn_lambda": ("advantage", {"bi_level_gae"}),
    "dual_clip": ("loss", {"ppo_clip"}),
    "cispo_cap": ("loss", {"cispo"}),
    "sapo_positive": ("loss", {"sapo"}),
    "sapo_negative": ("loss", {"sapo"}),
    "aggregate_length": ("aggregate", {"constant"}),
    "tis_cap": ("correct", {"tis"}),
    "icepop_low": ("correct", {"icepop"}),
    "icepop_high": ("correct", {"icepop"}),
    "decoupled_cap": ("correct", {"decoupled"}),
    "filter_value": ("filter", {"top_std", "top_k", "top_p", "softmax_top_p", "min_p"}),
    "dpo_beta": ("objective", {"preference"}),
}
"""Settings that only some choices of another setting read. A user's own function may read any."""
_POLICY_GRADIENT = ("advantage", "loss", "correct", "filter", "entropy_coef", "whiten")
"""Not read where the objective is "preference"."""


def unused(config: LearnerConfig) -> list[str]:
    """Settings that differ from their default and change nothing, each with the choice that leaves it unread."""
    plain = LearnerConfig()
    told = []
    for name, (choice, readers) in _READ_BY.items():
        chosen = getattr(config, choice)
        if getattr(config, name) != getattr(plain, name) and chosen not in readers and ":" not in chosen:
            told.append(f"learner.{name} is set, but {choice} = '{chosen}' does not read it")
    if config.objective == "preference":
        odd = [name for name in _POLICY_GRADIENT if getattr(config, name) != getattr(plain, name)]
        told += [f"learner.{name} is set, but objective = 'preference' does not read it" for name in odd]
    return told


def check(config: LearnerConfig, model: ModelConfig) -> None:
    """Raises ConfigError for names that do not exist and for parts that contradict each other.

    What the fields alone can tell is refused by `LearnerConfig` itself.
    """
    advantages.find(config.advantage)
    filters.find(config.filter)
    _check_loss(config)
    if config.kl is not None and config.kl.reset_every and model.lora is not None:
        raise ConfigError(
            "learner.kl.reset_every needs a copy of the policy, but with model.lora the base model is the reference: set it "
            "to 0, or train all weights"
        )
    if config.ranks > 1 and config.device.startswith("cuda:"):
        raise ConfigError(
            f"learner.device = '{config.device}' is one GPU, but learner.ranks = {config.ranks} need one each: set it to 'cuda'"
        )
    if config.critic.path and config.critic.kind == "head":
        raise ConfigError(
            "learner.critic.path names a model, but critic.kind = 'head' uses the policy's: set kind = 'separate'"
        )


def _check_loss(config: LearnerConfig) -> None:
    """Of the policy gradient; preferences have a loss of their own."""
    loss = losses.traits(losses.find(config.loss))
    if config.objective == "preference":
        return
    several = config.passes * config.minibatches > 1
    if not loss.ratio and several:
        raise ConfigError(
            f"loss '{config.loss}' has no probability ratio, but passes = {config.passes} and minibatches = "
            f"{config.minibatches} train on samples of older weights: set both to 1, or use ppo_clip or cispo"
        )
    if not loss.ratio and config.ratio == "rollout":
        raise ConfigError(f"loss '{config.loss}' has no probability ratio: set ratio = 'old'")
    if not loss.ratio and config.correct == "decoupled":
        raise ConfigError(f"correct = 'decoupled' splits a probability ratio, and loss '{config.loss}' has none: use tis")
    if config.loss == "gspo" and config.correct == "decoupled":
        raise ConfigError("correct = 'decoupled' is defined token by token, gspo by sequences: use tis or icepop")
