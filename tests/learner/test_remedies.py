"""What can be set of the health monitor, and what is done about an alarm."""

from __future__ import annotations

from typing import Any, get_args

import pytest
from pydantic import ValidationError

from tests.learner.histories import CLIFF, COLLAPSE, ECHOING, HACKED, OVERLONG, SPIKE, Row
from troupe.learner.config import LearnerConfig
from troupe.learner.health import REMEDIES, Action, HealthConfig, Kind, choose
from troupe.learner.health.detectors import (
    echo,
    entropy_collapse,
    gradient_spike,
    overlong_turns,
    reward_hacking,
    reward_variance_cliff,
)


def test_thresholds_decide() -> None:
    assert reward_variance_cliff(CLIFF, HealthConfig(variance_ratio=0.01)) is None
    assert reward_variance_cliff(CLIFF, HealthConfig(variance_peak=0.01)) is None
    assert reward_variance_cliff(CLIFF, HealthConfig(variance_floor=0.95)) is None
    assert reward_variance_cliff(CLIFF, HealthConfig(margin=0.46)) is None
    assert entropy_collapse(COLLAPSE, HealthConfig(entropy_ratio=0.01)) is None
    assert entropy_collapse(COLLAPSE, HealthConfig(entropy_floor=2.0)) is None
    assert gradient_spike(SPIKE, HealthConfig(gradient_factor=25.0)) is None
    assert gradient_spike(SPIKE, HealthConfig(gradient_z=1000.0)) is None
    assert reward_hacking(HACKED, HealthConfig(hacking_z=9.0)) is None
    assert reward_hacking(HACKED, HealthConfig(hacking_share=0.6)) is None
    assert echo(ECHOING, HealthConfig(echo_rise=0.7)) is None
    assert echo(ECHOING, HealthConfig(echo_ratio=0.1)) is None
    assert overlong_turns(OVERLONG, HealthConfig(cut_rise=0.6)) is None


@pytest.mark.parametrize(
    ("wrong", "why"),
    [
        ({"varience_ratio": 0.1}, "Extra inputs"),
        ({"memory": 10}, "raise memory"),
        ({"window": 9}, "at least 2 \\* window"),
        ({"echo_rise": float("nan")}, "finite"),
    ],
)
def test_settings_that_cannot_work_are_refused(wrong: Row, why: str) -> None:
    with pytest.raises(ValidationError, match=why):
        HealthConfig(**wrong)


def test_every_alarm_has_remedies_that_make_a_valid_configuration() -> None:
    assert set(REMEDIES) == set(get_args(Kind))
    for remedies in REMEDIES.values():
        for remedy in remedies:
            changed = LearnerConfig().model_dump() | remedy.changes(LearnerConfig())
            LearnerConfig.model_validate(changed)
            assert bool(remedy.put or remedy.at_least or remedy.times) == (remedy.action not in ("stop", "roll_back"))


FILTER, CLIP, ENTROPY = (REMEDIES[kind][n] for kind, n in (("echo", 0), ("entropy_collapse", 0), ("entropy_collapse", 1)))
SLOWER = REMEDIES["gradient_spike"][1]


def test_a_remedy_that_was_taken_changes_nothing_and_none_weakens_what_is_set() -> None:
    assert FILTER.changes(LearnerConfig()) == FILTER.changes(LearnerConfig(filter="informative")) == {"filter": "top_std"}
    assert FILTER.changes(LearnerConfig(filter="top_std", filter_value=0.5)) == {"filter_value": 0.25}
    assert FILTER.changes(LearnerConfig(filter="top_std")) == {}
    assert FILTER.changes(LearnerConfig(filter="top_std", filter_value=0.1)) == {}
    assert FILTER.changes(LearnerConfig(filter="top_p", filter_value=0.9)) == FILTER.changes(LearnerConfig(filter="a:b")) == {}
    assert CLIP.changes(LearnerConfig(clip_high=0.2, passes=2)) == {"clip_high": 0.28}
    assert CLIP.changes(LearnerConfig(clip_high=0.4, passes=2)) == {}
    assert SLOWER.changes(LearnerConfig(lr=2e-4)) == {"lr": pytest.approx(1e-4)}


def test_a_remedy_that_is_of_no_effect_changes_nothing_and_the_next_is_chosen() -> None:
    def clip(**more: Any) -> dict[str, Any]:
        return CLIP.changes(LearnerConfig(clip_high=0.2, **more))

    assert clip() == {}  # one optimiser step from the learner's own logprobs: the ratio is 1
    assert clip(minibatches=2) == clip(ratio="rollout", correct="none") == {"clip_high": 0.28}
    assert clip(loss="gspo", passes=2) == {}
    preference = LearnerConfig(objective="preference", clip_high=0.2, passes=2)
    assert [remedy.changes(preference) for remedy in (FILTER, CLIP, ENTROPY)] == [{}, {}, {}]
    assert SLOWER.changes(preference) == {"lr": preference.lr / 2}

    def chosen(config: LearnerConfig) -> str:
        remedy = choose("entropy_collapse", config, get_args(Action), [])
        assert remedy is not None
        return remedy.action

    assert chosen(LearnerConfig(clip_high=0.2, passes=2)) == "clip_higher"
    assert chosen(LearnerConfig(clip_high=0.2)) == "entropy_bonus"
    assert chosen(preference) == "roll_back"
