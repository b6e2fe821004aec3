"""When the detectors speak. Every default is reasoned for in docs/health.md; a unit is said where a number has one."""

from __future__ import annotations

from typing import Literal

from pydantic import ConfigDict, Field, model_validator

from troupe.learner.settings import Settings

Action = Literal[
    "filter",  # train on fewer, more varied groups
    "clip_higher",  # let unlikely tokens rise further
    "entropy_bonus",  # pay for staying unsure
    "slower",  # smaller steps
    "roll_back",  # go on from the newest checkpoint at or before the alarm's `since_step`
    "stop",  # end the run; a person looks at it
]


class HealthConfig(Settings):
    """[health]: when the run warns of a collapse, and what it may do by itself. A row is the metrics of one step."""

    model_config = ConfigDict(allow_inf_nan=False, frozen=True)

    on_collapse: tuple[Action, ...] = Field(
        (),
        description="what the run may do by itself on an alarm, the mildest that helps first: filter, clip_higher, "
        "entropy_bonus, slower, roll_back, stop (see docs/health.md); empty: it only tells",
    )

    memory: int = Field(200, ge=4, le=1000, description="rows that are looked at; a change slower than this is not seen")
    min_rows: int = Field(15, ge=4, description="rows that a detector needs before it says anything")
    window: int = Field(5, ge=1, description="newest rows that are compared, as one mean, with those before")
    margin: float = Field(
        0.1, ge=0, lt=0.5, description="within this share of the best or worst reward nothing is left to vary: no alarm"
    )

    variance_ratio: float = Field(
        0.25, gt=0, lt=1, description="reward-variance cliff: the deviation within groups fell to this share of what it was"
    )
    variance_peak: float = Field(0.5, gt=0, description="and none of the newest rows is above this share of it")
    variance_floor: float = Field(
        0.1, gt=0, lt=1, description="a deviation that never was this share of its most possible has no cliff to fall from"
    )
    entropy_ratio: float = Field(0.2, gt=0, lt=1, description="entropy collapse: entropy fell to this share of what it was")
    entropy_floor: float = Field(0.02, gt=0, description="nats; a policy that was this sure from the start cannot collapse")

    gradient_z: float = Field(
        6.0, gt=0, description="gradient spike: robust deviations (1.48 MAD) of ln grad_norm above its median"
    )
    gradient_factor: float = Field(3.0, gt=1, description="and at least this many times the median")

    hacking_rows: int = Field(30, ge=6, description="reward hacking: rows over which a part rises while the outcome falls")
    hacking_z: float = Field(3.0, gt=0, description="how clear both trends are (Mann-Kendall, deviations)")
    hacking_share: float = Field(0.1, gt=0, description="and how large: the change as a share of the largest value")

    echo_rise: float = Field(0.15, gt=0, le=1, description="echo: how much self_similarity has risen")
    echo_ratio: float = Field(0.5, gt=0, lt=1, description="and what is left of the distance to 1, as a share of what it was")
    echo_gain: float = Field(0.05, ge=0, description="no alarm if success rose by this much meanwhile: it found what works")

    cut_rise: float = Field(
        0.3, gt=0, le=1, description="overlong turns: how much the share of turns cut by a token limit has risen"
    )

    @model_validator(mode="after")
    def _fits(self) -> HealthConfig:
        if self.memory < self.min_rows or self.memory < self.hacking_rows:
            raise ValueError(
                f"memory = {self.memory} is shorter than min_rows = {self.min_rows} or hacking_rows = {self.hacking_rows}: "
                "a detector would never have enough rows; raise memory"
            )
        if self.min_rows < 2 * self.window:
            raise ValueError(
                f"min_rows = {self.min_rows} leaves nothing to compare {self.window} new rows with: set at least 2 * window"
            )
        return self
