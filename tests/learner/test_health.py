"""Health: signals against numbers worked out by hand, detectors on histories that are healthy, sick, short and broken."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from typing import Any, get_args

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from pydantic import ValidationError

from troupe.learner.config import LearnerConfig
from troupe.learner.health import DETECTORS, REMEDIES, Action, Alarm, HealthConfig, Kind, alarms, choose, fresh, signals
from troupe.learner.health.detectors import (
    echo,
    entropy_collapse,
    gradient_spike,
    overlong_turns,
    reward_hacking,
    reward_variance_cliff,
)
from troupe.protocol.trajectory import ENVIRONMENT, POLICY, TEMPLATE, Call, Fork, Node, Step, Task, Trajectory

Row = dict[str, Any]


def make(
    name: str,
    group: int,
    turns: Sequence[Sequence[int]],
    *,
    reward: float = 0.0,
    steps: list[Step] | None = None,
    **more: Any,
) -> Trajectory:
    """A trajectory that says `turns`, with an observation before each and a closing template token after it."""
    nodes = []
    for step, said in enumerate(turns):
        ids = [900 + group, *said, 999]
        nodes.append(
            Node(
                parent=step - 1,
                role="assistant",
                step=step,
                tokens=np.array(ids, np.int32),
                provenance=np.array([ENVIRONMENT, *[POLICY] * len(said), TEMPLATE], np.uint8),
                logprobs=np.zeros(len(said), np.float32),
                versions=np.zeros(len(said), np.int32),
            )
        )
    defaults: dict[str, Any] = {"status": "completed", "stop": "terminated", "kind": "train"}
    return Trajectory(
        id=name,
        attempt=0,
        group=group,
        member=0,
        step=1,
        task=Task("t", "world", "train", group),
        nodes=nodes,
        steps=steps if steps is not None else [Step() for _ in turns],
        reward=reward,
        **{**defaults, **more},
    )


# -- signals ---------------------------------------------------------------------------------------------------------


def test_rewards_are_those_of_the_groups() -> None:
    told = signals([make(f"e{i}", i // 2, [[1]], reward=r) for i, r in enumerate([1.0, 0.0, 0.35, 0.35])])
    assert told["reward_mean"] == pytest.approx(0.425)
    assert told["reward_std"] == pytest.approx(np.std([1, 0, 0.35, 0.35], ddof=1))
    assert told["group_reward_std"] == pytest.approx(math.sqrt(0.5) / 2)
    assert (told["equal_groups"], told["reward_min"], told["reward_max"]) == (0.5, 0.0, 1.0)


def test_a_group_of_one_or_of_equals_deviates_by_exactly_nothing() -> None:
    lone = [make("a", 0, [[1]], reward=0.35)]
    assert signals(lone)["group_reward_std"] == 0.0
    assert signals([make(f"e{i}", 0, [[1]], reward=0.1) for i in range(7)])["group_reward_std"] == 0.0


def test_lengths_count_sampled_tokens_only() -> None:
    told = signals([make("a", 0, [[1, 2, 3], [4]]), make("b", 0, [[5, 6]])])
    assert (told["response_tokens_mean"], told["response_tokens_max"]) == (3.0, 4.0)
    assert (told["turn_tokens_mean"], told["turn_tokens_max"]) == (2.0, 3.0)


def test_distinct_n_counts_grams_within_turns_over_all_trajectories() -> None:
    told = signals([make("a", 0, [[1, 2, 1, 2], [1, 2]]), make("b", 1, [[1, 2, 3]])])
    assert told["distinct_1"] == pytest.approx(3 / 9)
    assert told["distinct_2"] == pytest.approx(3 / 6)  # 12 21 12 | 12 | 12 23
    assert told["distinct_3"] == pytest.approx(3 / 3)  # 121 212 | - | 123


def test_similarity_compares_trajectories_of_different_groups() -> None:
    same = [make("a", 0, [[1, 2, 3, 4]]), make("b", 0, [[1, 2, 3, 4]]), make("c", 1, [[1, 2, 3, 5]])]
    assert signals(same)["self_similarity"] == pytest.approx(1 / 3)  # {123, 234} against {123, 235}, twice
    assert signals(same[:2])["self_similarity"] == 1.0
    assert signals([make("a", 0, [[1, 2, 3]]), make("b", 1, [[4, 5, 6]])])["self_similarity"] == 0.0
    assert "self_similarity" not in signals([make("a", 0, [[1, 2, 3]]), make("b", 1, [[4, 5]])])


def test_what_was_sampled_for_a_sibling_is_told_and_repeats_nothing() -> None:
    told = signals([make("a", 0, [[1, 2], [3, 4]]), make("b", 0, [[1, 2], [3, 5]], fork=Fork("a", 0, 3))])
    assert told["reused_tokens"] == pytest.approx(3 / 8) and told["response_tokens_mean"] == 4.0
    assert told["distinct_1"] == 1.0 and told["distinct_2"] == 1.0  # 1 2 3 4 and 5; 12 34 and none
    assert "reused_tokens" not in signals([make("a", 0, [[1, 2]])])


def test_a_turn_said_before_in_the_same_trajectory_is_a_repeated_one() -> None:
    told = signals([make("a", 0, [[1, 2], [1, 2], [1, 2]]), make("b", 0, [[1, 2]])])
    assert told["repeated_turns"] == pytest.approx(2 / 4)


def test_a_tool_that_failed_is_told_apart_from_a_call_that_was_none() -> None:
    statuses = ["ok", "failed", "malformed", "malformed", "refused", "unknown_tool", "bad_arguments", "truncated"]
    calls = [Call(str(i), "f", "{}", status) for i, status in enumerate(statuses)]  # type: ignore[arg-type]
    told = signals([make("a", 0, [[1], [2]], steps=[Step(calls=calls), Step(invalid=True)]), make("b", 0, [[1]])])
    assert (told["tool_calls"], told["tool_failed"], told["tool_misuse"]) == (4.0, 1 / 8, 6 / 8)
    assert (told["tool_malformed"], told["tool_refused"]) == (2 / 8, 1 / 8)
    assert told["invalid_actions"] == pytest.approx(1 / 3)
    without = signals([make("b", 0, [[1]])])
    assert without["tool_calls"] == 0.0 and "tool_failed" not in without


def test_turns_that_were_cut_and_episodes_that_ran_into_a_limit_are_counted() -> None:
    cut = [Step(finish="length"), Step(finish="stop")]
    told = signals([make("a", 0, [[1], [2]], steps=cut, stop="max_turns"), make("b", 0, [[1]]), make("c", 0, [[1]])])
    assert told["cut_turns"] == pytest.approx(1 / 4)
    assert (told["limited"], told["limited_max_turns"], told["limited_wall_clock"]) == (1 / 3, 1 / 3, 0.0)


def test_a_part_correlates_with_the_outcome_within_groups() -> None:
    def parts(outcome: float, polite: float) -> list[Step]:
        return [Step(parts={"polite": polite}), Step(parts={"outcome": outcome})]

    easy = [make(f"a{i}", 0, [[1], [1]], steps=parts(o, p)) for i, (o, p) in enumerate([(1, 5.0), (0, 6.0)])]
    hard = [make(f"b{i}", 1, [[1], [1]], steps=parts(o, p)) for i, (o, p) in enumerate([(0, 1.0), (0, 1.0)])]
    told = signals([*easy, *hard])
    assert told["reward_part_polite"] == pytest.approx(13 / 4)
    assert told["reward_part_outcome"] == pytest.approx(1 / 4)
    assert told["reward_corr_polite"] == pytest.approx(-1.0)  # over all it would be +.3: easy tasks pay both
    assert "reward_corr_outcome" not in told
    assert "reward_corr_polite" not in signals(hard)


def test_only_completed_trajectories_count_and_none_is_no_signal() -> None:
    broken = make("x", 0, [[1]], reward=9.0, status="failed", stop="failed")
    assert signals([]) == signals([broken]) == {}
    good = [make("a", 0, [[1, 2, 3]], reward=1.0), make("b", 1, [[1, 2, 4]])]
    assert signals([*good, broken]) == signals(good)


def test_the_order_of_trajectories_changes_nothing(batch: list[Trajectory]) -> None:
    assert signals(batch) == signals(batch[::-1])


def test_a_large_batch_is_measured_on_a_bounded_sample_of_all_groups() -> None:
    many = [make(f"e{i:03}", i % 64, [[7] * 3000]) for i in range(128)]
    told = signals(many)
    assert told["distinct_1"] == pytest.approx(1 / (32 * 1024))
    assert told["self_similarity"] == 1.0


numbers = st.one_of(st.floats(), st.integers(-3, 3).map(float), st.just(1e308))
turn = st.lists(st.integers(0, 2**31 - 1), max_size=5)


@st.composite
def odd_trajectories(draw: Any) -> list[Trajectory]:
    made = []
    for i in range(draw(st.integers(0, 5))):
        turns = draw(st.lists(turn, max_size=3))
        parts = st.dictionaries(st.sampled_from(["outcome", "a", ""]), numbers, max_size=2)
        steps = [Step(parts=draw(parts), invalid=draw(st.booleans())) for _ in range(draw(st.integers(0, 3)))]
        success = draw(st.sampled_from([None, True, False]))
        made.append(make(f"e{i}", draw(st.integers(0, 2)), turns, reward=draw(numbers), steps=steps, success=success))
    return made


@given(odd_trajectories())
@settings(max_examples=60)
def test_signals_never_raise_and_are_always_finite(trajectories: list[Trajectory]) -> None:
    told = signals(trajectories)
    assert all(type(value) is float and math.isfinite(value) for value in told.values())
    json.dumps(told, allow_nan=False)


# -- histories -------------------------------------------------------------------------------------------------------


def history(seed: int, n: int = 120, *, groups: int = 8, size: int = 8, top: float = 0.8) -> list[Row]:
    """A healthy run: tasks of different difficulty, success that rises from .15 to `top`, entropy that falls as it does."""
    rng = np.random.default_rng(seed)
    rows = []
    for k in range(n):
        p = 0.15 + (top - 0.15) * min(1.0, k / 60)
        chance = rng.beta(2 * p, 2 * (1 - p), (groups, 1))
        won = (rng.random((groups, size)) < chance).astype(float)
        rows.append(
            {
                "step": k + 1,
                "reward_mean": won.mean(),
                "success": won.mean(),
                "reward_min": won.min(),
                "reward_max": won.max(),
                "group_reward_std": won.std(1, ddof=1).mean(),
                "entropy": math.exp(-k / 100 + rng.normal(0, 0.1)),
                "grad_norm": math.exp(rng.normal(-1, 0.4)),
                "self_similarity": 0.3 + 0.2 * k / n + rng.normal(0, 0.05),
                "reward_part_format": min(1.0, 0.3 + k / 100) + rng.normal(0, 0.05),
            }
        )
    return rows


def flat(n: int = 60, **more: Any) -> list[Row]:
    """A run on which nothing happens: success .55, σ .42, with a little noise from the row number."""
    wave = [0.01 * math.sin(k) for k in range(n)]
    quiet = {"reward_mean": 0.55, "success": 0.55, "group_reward_std": 0.42, "entropy": 1.0, "grad_norm": 0.4, **more}
    return [{"step": k + 1, **{name: value * (1 + wave[k]) for name, value in quiet.items()}} for k in range(n)]


def change(rows: list[Row], name: str, values: Sequence[float]) -> list[Row]:
    """The last rows with other values of `name`."""
    tail = [{**row, name: value} for row, value in zip(rows[-len(values) :], values, strict=True)]
    return [*rows[: -len(values)], *tail]


def ramp(low: float, high: float, n: int, hold: int = 0) -> list[float]:
    return [*np.linspace(low, high, n).tolist(), *[high] * hold]


def first(rows: list[Row], kind: Kind, config: HealthConfig | None = None) -> int | None:
    """Number of rows at which an alarm of `kind` is first raised."""
    seen = (n for n in range(1, len(rows) + 1) if any(a.kind == kind for a in alarms(rows[:n], config)))
    return next(seen, None)


CLIFF = change(change(flat(), "group_reward_std", ramp(0.42, 0.03, 10, hold=10)), "success", [0.55] * 20)
COLLAPSE = change(flat(), "entropy", ramp(1.0, 0.05, 10, hold=10))
SPIKE = change(flat(), "grad_norm", [8.0, 0.4, 0.4])
HACKED = change(change(flat(reward_part_polite=0.2), "reward_part_polite", ramp(0.2, 0.9, 30)), "success", ramp(0.55, 0.2, 30))
ECHOING = change(flat(self_similarity=0.3), "self_similarity", ramp(0.3, 0.9, 10, hold=10))
OVERLONG = change(flat(cut_turns=0.05), "cut_turns", ramp(0.05, 0.6, 10, hold=10))
SICK: list[tuple[Kind, list[Row]]] = [
    ("reward_variance_cliff", CLIFF),
    ("entropy_collapse", COLLAPSE),
    ("gradient_spike", SPIKE),
    ("reward_hacking", HACKED),
    ("echo", ECHOING),
    ("overlong_turns", OVERLONG),
]


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


# -- properties ------------------------------------------------------------------------------------------------------

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


# -- settings and remedies -------------------------------------------------------------------------------------------


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
