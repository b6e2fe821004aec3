"""What may be done about an alarm, as data: which settings of [learner] change, or what the run does.

The first remedy of a kind is the mildest; one whose `changes` are empty has been taken already or is of no effect with the
run's settings, so the next applies.
What was done to a run is data too: rows with step (after which it was done), action, changes of [learner], and restart
(of a roll back: the step of the checkpoint). The same rows give the same settings for a step, so it can be replayed.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from troupe.learner.config import LearnerConfig
from troupe.learner.health.settings import Action

Kind = Literal["reward_variance_cliff", "entropy_collapse", "gradient_spike", "reward_hacking", "echo", "overlong_turns"]


def _always(config: LearnerConfig) -> bool:
    return True


@dataclass(frozen=True, slots=True)
class Remedy:
    """One thing to do. `say`: in words, for people.

    Keys of [learner]: put are replaced; at_least are raised to the number given; times are multiplied by it. None of
    them: the run itself does it. helps: whether they are of effect for a run with these settings, and none is loosened.
    """

    action: Action
    say: str
    put: Mapping[str, Any] = field(default_factory=dict)
    at_least: Mapping[str, float] = field(default_factory=dict)
    times: Mapping[str, float] = field(default_factory=dict)
    helps: Callable[[LearnerConfig], bool] = _always

    def changes(self, config: LearnerConfig) -> dict[str, Any]:
        """Keys of [learner] that would change, with their new values; empty if it would change nothing."""
        if not self.helps(config):
            return {}
        wanted = {
            **self.put,
            **{name: max(getattr(config, name), low) for name, low in self.at_least.items()},
            **{name: getattr(config, name) * factor for name, factor in self.times.items()},
        }
        return {name: value for name, value in wanted.items() if getattr(config, name) != value}


def _filters_less(config: LearnerConfig) -> bool:
    """Whether more groups train than with StarPO-S; a filter that works another way was somebody's choice."""
    looser = config.filter == "top_std" and config.filter_value > 0.25
    return config.objective == "policy_gradient" and (looser or config.filter in ("all", "informative"))


def _clips(config: LearnerConfig) -> bool:
    """Whether PPO's clip can bind. The ratio is 1 where the only optimiser step of a batch starts from the learner's own
    logprobs; with other losses clip_high is another quantity: GSPO's is 0.0004."""
    moves = config.ratio == "rollout" or config.passes > 1 or config.minibatches > 1
    return config.objective == "policy_gradient" and config.loss == "ppo_clip" and moves


def _has_bonus(config: LearnerConfig) -> bool:
    return config.objective == "policy_gradient"


_FILTER = Remedy(
    "filter",
    "train only on the groups that still differ (learner.filter = 'top_std', learner.filter_value = 0.25)",
    put={"filter": "top_std", "filter_value": 0.25},
    helps=_filters_less,
)
_CLIP_HIGHER = Remedy(
    "clip_higher",
    "let unlikely tokens rise (learner.clip_high = 0.28 or more)",
    at_least={"clip_high": 0.28},
    helps=_clips,
)
_ENTROPY = Remedy(
    "entropy_bonus",
    "pay for entropy (learner.entropy_coef = 0.001)",
    at_least={"entropy_coef": 0.001},
    helps=_has_bonus,
)
_SLOWER = Remedy("slower", "halve learner.lr", times={"lr": 0.5})
_ROLL_BACK = Remedy("roll_back", "go back to a checkpoint from before")
_STOP = Remedy("stop", "stop and read some trajectories")

REMEDIES: dict[Kind, tuple[Remedy, ...]] = {
    # StarPO-S, arXiv:2504.20073, section 4: filter by deviation, clip-higher
    "reward_variance_cliff": (_FILTER, _CLIP_HIGHER, _ROLL_BACK, _STOP),
    # clip-higher is DAPO's answer to it (arXiv:2503.14476, section 3.1)
    "entropy_collapse": (_CLIP_HIGHER, _ENTROPY, _FILTER, _ROLL_BACK, _STOP),
    # in RAGEN the spike marks the point of no return: no setting repairs what it did
    "gradient_spike": (_ROLL_BACK, _SLOWER, _STOP),
    # weights do not unlearn a hack while the part still pays: which part to weigh less is a person's choice
    "reward_hacking": (_STOP, _ROLL_BACK),
    "echo": (_FILTER, _ENTROPY, _ROLL_BACK, _STOP),
    # neither a price nor a limit is set by itself: both change what the task asks for
    "overlong_turns": (_SLOWER, _ROLL_BACK, _STOP),
}


def advice(kind: Kind) -> str:
    """The two mildest remedies of `kind`, in words."""
    return " or ".join(remedy.say for remedy in REMEDIES[kind][:2])


def choose(kind: Kind, config: LearnerConfig, allowed: Collection[Action], taken: Collection[Action]) -> Remedy | None:
    """The mildest remedy that is allowed and changes something. taken: what the run itself has done already."""
    for remedy in REMEDIES[kind]:
        by_run = not (remedy.put or remedy.at_least or remedy.times)
        if remedy.action in allowed and (remedy.action not in taken if by_run else remedy.changes(config)):
            return remedy
    return None


def in_force(done: Iterable[Mapping[str, Any]], step: int) -> tuple[dict[str, Any], int | None]:
    """What the rows in `done` mean for training step `step`: changed keys of [learner], and the checkpoint it starts from."""
    changes: dict[str, Any] = {}
    restart: int | None = None
    for row in done:
        if row["step"] < step:
            changes |= row["changes"]
        if row["step"] == step - 1 and row["restart"] is not None:
            restart = row["restart"]
    return changes, restart
