"""What of a configuration fits together: found before a model is loaded, refused with what to do instead."""

from __future__ import annotations

from troupe.learner import advantages, filters, losses
from troupe.learner.config import LearnerConfig, ModelConfig
from troupe.protocol.errors import ConfigError


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
