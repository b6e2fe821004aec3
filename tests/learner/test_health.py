"""Detectors on histories that are healthy, sick, short and broken."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.learner.histories import CLIFF, ECHOING, HACKED, OVERLONG, SICK, SPIKE, Row, change, first, flat, history, ramp
from troupe.learner.health import DETECTORS, Alarm, HealthConfig, Kind, alarms, fresh


@pytest.mark.parametrize(("kind", "rows"), SICK)
def test_each_sickness_raises_its_own_alarm_and_no_other(kind: Kind, rows: list[Row]) -> None:
    (alarm,) = alarms(rows)
    assert alarm.kind == kind
    assert alarm.since_step < 60
    assert alarm.advice


def test_the_alarm_says_in_numbers_what_was_seen() -> None:
    (alarm,) = alarms(CLIFF)
    assert alarm.seen == "reward σ fell from .40 to .03 in 17 steps while success is still .55 — the Echo Trap's early sign"
    assert alarm.since_step == 43
    assert str(alarm).startswith(alarm.seen + ". See docs/health.md; train only on the groups that still differ")
    (spike,) = alarms(SPIKE)
    assert spike.seen == "the gradient norm jumped to 8 at step 58, 20 times its usual .40"
    assert spike.since_step == 57
    (grown,) = alarms(change(flat(), "grad_norm", [8.0, 0.4, 50.0, 0.4]))
    assert grown.seen.startswith("the gradient norm jumped to 50 at step 59") and grown.since_step == 56
    (overlong,) = alarms(OVERLONG)
    assert overlong.seen == "turns cut by a token limit rose from .05 to .60 of all in 17 steps while success is still .55"
    assert str(overlong).endswith("punish overlong episodes (learner.overlong) or allow more tokens (rollout.max_tokens).")


def test_a_cliff_is_seen_ten_steps_before_success_is_lost() -> None:
    rows = [{**row, "step": k + 1} for k, row in enumerate([*CLIFF, *flat(40)])]
    for k, row in enumerate(rows[60:]):  # success falls from step 61 on and is halved at step 70
        row |= {"group_reward_std": 0.02, "success": max(0.0, 0.55 - 0.03 * k), "reward_mean": max(0.0, 0.55 - 0.03 * k)}
    seen = first(rows, "reward_variance_cliff")
    assert seen is not None and seen <= 60
    told = alarms(rows[:74])[0]
    assert "success with it" in told.seen


def test_a_step_change_is_seen_within_a_window() -> None:
    rows = change(flat(), "group_reward_std", [0.02] * 20)
    seen = first(rows, "reward_variance_cliff")
    assert seen is not None and 40 < seen <= 40 + HealthConfig().window


def test_a_policy_that_masters_its_tasks_has_no_cliff_no_collapse_and_no_echo() -> None:
    rise = ramp(0.3, 1.0, 40, hold=20)
    rows = [
        {
            "step": k + 1,
            "reward_mean": p,
            "success": p,
            "reward_min": 0.0,
            "reward_max": 1.0,
            "group_reward_std": 0.9 * math.sqrt(p * (1 - p)),
            "entropy": 1.5 * (1.02 - p),
            "self_similarity": 0.2 + 0.75 * p,
        }
        for k, p in enumerate(rise)
    ]
    assert all(alarms(rows[:n]) == [] for n in range(len(rows) + 1))


def test_who_does_right_each_time_is_well_even_where_luck_pays_seldom() -> None:
    def rows(best: float) -> list[Row]:
        """Success rises to `best`; then what it is paid, one time in four, no longer differs within groups."""
        share = [*ramp(1.0, 1.0, 20), *ramp(1.0, 0.02, 20, hold=20)]
        return [
            {
                "step": k + 1,
                "success": p,
                "reward_mean": 0.25 * p,
                "reward_min": 0.0,
                "reward_max": 1.0,
                "group_reward_std": 0.4 * s,
                "entropy": s,
            }
            for k, (p, s) in enumerate(zip(ramp(0.5, best, 20, hold=40), share, strict=True))
        ]

    assert all(alarms(rows(0.98)[:n]) == [] for n in range(61))
    assert {a.kind for a in alarms(rows(0.7))} == {"reward_variance_cliff", "entropy_collapse"}


def stuck() -> list[Row]:
    """Rewards from 0 to 1; from step 41 on groups no longer differ, answers are sure and alike."""
    well = {"reward_mean": 0.4, "reward_min": 0.0, "reward_max": 1.0}
    before = {"group_reward_std": 0.45, "entropy": 1.0, "self_similarity": 0.3}
    after = {"group_reward_std": 0.02, "entropy": 0.05, "self_similarity": 0.95}
    return [{"step": k + 1, **well, **(before if k < 40 else after)} for k in range(60)]


@pytest.mark.parametrize("odd", [{}, {"reward_min": -10.0}, {"reward_max": 1e6}, {"success": 0.2}])
def test_one_or_two_outliers_silence_no_alarm(odd: Row) -> None:
    rows = [{**row, "success": 1.0} for row in stuck()] if "success" in odd else stuck()
    rows[20] |= odd
    rows[30] |= odd
    assert {a.kind for a in alarms(rows)} == {"reward_variance_cliff", "entropy_collapse", "echo"}


def test_a_reward_beyond_the_usual_ones_is_no_cliff_after_it() -> None:
    """Once in a while much is won: with it the mean comes near the usual best, so that σ is large for what is usual."""
    lucky = {"reward_mean": 0.099, "reward_max": 1.1, "group_reward_std": 0.1}
    usual = {"reward_mean": 0.07, "reward_max": 0.1, "group_reward_std": 0.02}
    rows = [{"step": k + 1, "reward_min": 0.0, **(lucky if k < 30 and k % 6 == 0 else usual)} for k in range(90)]
    assert all(alarms(rows[:n]) == [] for n in range(len(rows) + 1))


def test_answers_that_always_were_cut_raise_no_alarm_and_success_excuses_no_cut() -> None:
    always = [{**row, "cut_turns": 1.0} for row in flat()]
    assert alarms(always) == []
    assert alarms(change([{**row, "cut_turns": 0.9} for row in flat()], "cut_turns", ramp(0.9, 0.0, 10, hold=10))) == []
    assert [a.kind for a in alarms(change(OVERLONG, "success", ramp(0.55, 1.0, 20)))] == ["overlong_turns"]


@pytest.mark.parametrize("extremes", [{"reward_min": 0.0, "reward_max": 1.0}, {}])
def test_what_success_explains_of_a_falling_deviation_is_no_cliff(extremes: Row) -> None:
    share, rise = ramp(0.9, 0.28, 40, hold=20), ramp(0.5, 0.88, 40, hold=20)
    sigma = [s * math.sqrt(p * (1 - p)) for s, p in zip(share, rise, strict=True)]
    assert sigma[-1] < 0.25 * sigma[0]
    both = zip(sigma, rise, strict=True)
    rows = [{"step": k, "success": p, "reward_mean": p, "group_reward_std": s, **extremes} for k, (s, p) in enumerate(both)]
    assert all(alarms(rows[:n]) == [] for n in range(len(rows) + 1))


def test_a_world_in_which_every_reward_is_positive_has_a_cliff_too() -> None:
    rows = [{**row, "success": 1.0, "reward_mean": 1.5, "reward_min": 1.0, "reward_max": 3.0} for row in CLIFF]
    assert [a.kind for a in alarms(rows)] == ["reward_variance_cliff"]


def test_an_echo_that_pays_is_none() -> None:
    assert alarms(change(ECHOING, "success", ramp(0.3, 0.85, 20))) == []


def test_hacking_is_told_of_the_part_that_rises_and_measured_on_the_outcome_part() -> None:
    rows = [{**row, "reward_part_outcome": row["success"], "reward_part_brief": 0.5, "success": 1.0} for row in HACKED]
    (alarm,) = alarms(rows)
    assert "'polite' rose from .31 to .79" in alarm.seen and "outcome fell from .50 to .25" in alarm.seen
    gone_together = [{**row, "reward_part_polite": -row["reward_part_polite"]} for row in HACKED]
    assert alarms(gone_together) == []


# One healthy run of recipes/frozen_lake.toml on 8 × 8 episodes a step: 1000 × (success, σ, entropy, gradient norm).
FROZEN_LAKE = """
125 225 216 100  172 357 204  75  328 282 204  76  438 492 190 319  438 349 185 145  484 405 154 232  656 342 119 156
438 303 120 209  719 234 108 113  891 211 122 258  656 125  99 189  547 199 109 326  875  88  83 122  594 167 118 363
938 177 101 138  734 133 119 283  969  88  99 171  844  58 106 109  844 146 106 284  828 190 116 291  750 183 116 273
656  58 111 184  578 262 101 503  797 111  88 446  984  44 127 199  625 146  91 250  719 280  80 572  422 240  92 463
484 266  97 423  688 238  89 405  859 133 126 232  797 160  93 342  859 160 107 441  859 133 118 455  594 313 168 524
859  44 119 407  609 153 137 400  797 111  94 185  719 146 112 209  797 180 187 861
"""


def test_a_real_healthy_run_is_healthy() -> None:
    names = ("success", "group_reward_std", "entropy", "grad_norm")
    table = np.array(FROZEN_LAKE.split(), np.float64).reshape(-1, 4) / 1000
    rows = [{"step": k + 1, **dict(zip(names, row.tolist(), strict=True))} for k, row in enumerate(table)]
    rows = [{**row, "reward_mean": row["success"], "reward_min": 0.0, "reward_max": 1.0} for row in rows]
    assert all(alarms(rows[:n]) == [] for n in range(len(rows) + 1))


@pytest.mark.parametrize(("groups", "size", "top"), [(8, 8, 0.8), (8, 4, 0.4), (8, 8, 0.97)])
def test_healthy_noise_raises_next_to_no_alarms(groups: int, size: int, top: float) -> None:
    found = []
    for seed in range(20):
        rows = history(seed, groups=groups, size=size, top=top)
        found += [(seed, n, a) for n in range(20, len(rows) + 1, 10) for a in alarms(rows[:n])]
    assert len({seed for seed, _, _ in found}) <= 1, found


@pytest.mark.parametrize("seed", range(5))
def test_a_noisy_run_that_collapses_is_told_of(seed: int) -> None:
    rng = np.random.default_rng(seed)
    rows = history(seed, 60)
    for k in range(30):
        stuck = (rng.random((8, 1)) < 0.6) * np.ones((8, 8))
        stuck[0, 0] = 1.0
        rows.append(
            {
                **rows[-1],
                "step": 61 + k,
                "reward_mean": stuck.mean(),
                "success": stuck.mean(),
                "group_reward_std": stuck.std(1, ddof=1).mean(),
                "entropy": 0.5 * math.exp(-k / 3 + rng.normal(0, 0.1)),
            }
        )
    for kind in ("reward_variance_cliff", "entropy_collapse"):
        seen = first(rows, kind)  # type: ignore[arg-type]
        assert seen is not None and 60 < seen <= 75, kind


@pytest.mark.parametrize(("kind", "rows"), SICK)
def test_a_resumed_run_sees_what_an_undisturbed_one_sees(kind: Kind, rows: list[Row]) -> None:
    lost = [{**row, "entropy": 9.0, "group_reward_std": 0.9, "grad_norm": 50.0} for row in rows[30:45]]
    assert alarms([*rows[:45], *lost, *rows[30:]]) == alarms(rows)  # steps 31 to 45 three times


@pytest.mark.parametrize(("kind", "rows"), SICK)
def test_a_run_that_resumed_far_back_still_sees_as_much(kind: Kind, rows: list[Row]) -> None:
    lost = [{**flat(1)[0], "step": k} for k in range(46, 301)]
    assert alarms([*rows[:45], *lost, *rows[45:]]) == alarms(rows)


def test_a_run_that_resumes_without_its_history_starts_to_learn_what_is_usual() -> None:
    late = [{**row, "step": row["step"] + 1000} for row in CLIFF[45:]]
    assert alarms(late) == []


@pytest.mark.parametrize(("kind", "rows"), SICK)
def test_gaps_in_a_column_do_not_hide_what_the_others_say(kind: Kind, rows: list[Row]) -> None:
    broken: list[Any] = [None, 7, {}, {"step": None}, {"step": float("nan")}, {"step": "7"}, {"step": True}]
    odd = [{**row, "entropy": float("nan"), "grad_norm": None, "group_reward_std": "?"} for row in rows[5:8]]
    assert [a.kind for a in alarms([*broken, *rows[:5], *odd, *rows[8:]])] == [kind]


def test_rows_older_than_the_memory_change_nothing() -> None:
    old = [{**row, "step": -1000 + k, "entropy": 40.0, "group_reward_std": 3.0} for k, row in enumerate(flat(300))]
    config = HealthConfig(memory=60)
    for _, rows in SICK:
        assert alarms([*old, *rows], config) == alarms(rows, config)


def test_an_alarm_is_fresh_once() -> None:
    told = [(n, a.kind) for n in range(1, len(CLIFF) + 1) for a in fresh(CLIFF[:n])]
    assert [kind for _, kind in told] == ["reward_variance_cliff"]
    assert told[0][0] == first(CLIFF, "reward_variance_cliff")


COLUMNS = (
    "step",
    "success",
    "reward_mean",
    "reward_min",
    "reward_max",
    "group_reward_std",
    "entropy",
    "grad_norm",
    "self_similarity",
    "cut_turns",
    "reward_part_outcome",
    "reward_part_a",
)
value = st.one_of(st.floats(), st.integers(), st.just(10**400), st.none(), st.text(max_size=2), st.booleans(), st.floats(0, 1))
SMALL = HealthConfig(memory=12, min_rows=4, window=2, hacking_rows=6)


def test_what_is_no_row_is_passed_over() -> None:
    nothing: list[Any] = [None, 7, "step", [1]]
    assert alarms(nothing * 5) == fresh(nothing * 5) == []


def test_absurd_numbers_do_not_overflow() -> None:
    for low, high in ((5e-324, 9e99), (-9e99, 9e99), (5e-324, 1e-320)):
        rows = [{"step": k, **dict.fromkeys(COLUMNS[1:], low if k < 30 else high)} for k in range(60)]
        for n in range(61):
            alarms(rows[:n])
            alarms([{**row, "step": k} for k, row in enumerate(rows[::-1][:n])])


@given(st.lists(st.dictionaries(st.sampled_from(COLUMNS), value), max_size=30))
@settings(max_examples=150)
def test_detectors_never_raise(rows: list[Row]) -> None:
    steps = [{"step": k, **{name: v for name, v in row.items() if name != "step"}} for k, row in enumerate(rows)]
    for given_rows in (rows, steps):
        for alarm in alarms(given_rows, SMALL):
            assert isinstance(alarm, Alarm) and "nan" not in alarm.seen
        assert alarms(given_rows, SMALL) == alarms(given_rows, SMALL)


@given(
    st.dictionaries(st.sampled_from(COLUMNS[1:]), st.one_of(st.floats(-1e12, 1e12), st.floats(0, 1))),
    st.lists(st.sets(st.sampled_from(COLUMNS[1:]), max_size=3), min_size=30, max_size=40),
)
@settings(max_examples=100)
def test_constant_metrics_never_raise_an_alarm(row: Row, missing: list[set[str]]) -> None:
    rows = [{"step": k, **{name: v for name, v in row.items() if name not in gone}} for k, gone in enumerate(missing)]
    assert alarms(rows, SMALL) == alarms(rows) == []


@pytest.mark.parametrize("detect", DETECTORS)
def test_nothing_is_said_of_a_short_history(detect: Callable[[list[Row], HealthConfig], Alarm | None]) -> None:
    config = HealthConfig()
    for _, rows in SICK:
        assert all(detect(rows[-n:] if n else [], config) is None for n in range(config.min_rows))
