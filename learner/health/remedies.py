"""What may be done about an alarm, as data: which settings of [learner] change, or what the run does.

The first remedy of a kind is the mildest; one whose `changes` are empty has been taken already, so the next applies.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from troupe.learner.config import LearnerConfig

Kind = Literal["reward_variance_cliff", "entropy_collapse", "gradient_spike", "reward_hacking", "echo"]
Action = Literal[
    "filter",  # train on fewer, more varied groups
    "clip_higher",  # let unlikely tokens rise further
    "entropy_bonus",  # pay for staying unsure
    "slower",  # smaller steps
    "roll_back",  # go on from the newest checkpoint at or before the alarm's `since_step`
    "stop",  # end the run; a person looks at it
]


@dataclass(frozen=True, slots=True)
class Remedy:
    """One thing to do. `say`: in words, for people.

    Keys of [learner]: put are replaced; at_least are raised to the number given; times are multiplied by it. None of
    them: the run itself does it.
    """

    action: Action
    say: str
    put: Mapping[str, Any] = field(default_factory=dict)
    at_least: Mapping[str, float] = field(default_factory=dict)
    times: Mapping[str, float] = field(default_factory=dict)

    def changes(self, config: LearnerConfig) -> dict[str, Any]:
        """Keys of [learner] that would change, with their new values; empty if it would change nothing."""
        wanted = {
            **self.put,
            **{name: max(getattr(config, name), low) for name, low in self.at_least.items()},
            **{name: getattr(config, name) * factor for name, factor in self.times.items()},
        }
        return {name: value for name, value in wanted.items() if getattr(config, name) != value}


_FILTER = Remedy(
    "filter",
    "train only on the groups that still differ (learner.filter = 'top_std', learner.filter_value = 0.25)",
    put={"filter": "top_std", "filter_value": 0.25},
)
_CLIP_HIGHER = Remedy(
    "clip_higher", "let unlikely tokens rise (learner.clip_high = 0.28 or more)", at_least={"clip_high": 0.28}
)
_ENTROPY = Remedy("entropy_bonus", "pay for entropy (learner.entropy_coef = 0.001)", at_least={"entropy_coef": 0.001})
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
}


def advice(kind: Kind) -> str:
    """The two mildest remedies of `kind`, in words."""
    return " or ".join(remedy.say for remedy in REMEDIES[kind][:2])
