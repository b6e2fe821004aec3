"""When pools come and go: within the bounds, not for a moment's load, and not back and forth."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from troupe.actors.scaling import Sample, Scaling

LOOK_S, SLOTS = 2.0, 8


def followed(
    scaling: Scaling,
    demand: Callable[[float], int],
    seconds: float,
    pools: int = 2,
    step_s: Callable[[float], float] = lambda episodes_a_pool: 0.01,
) -> list[tuple[float, int, str]]:
    """The changes (when, to how many, why) of a run whose pools are those that were asked for, and there at once."""
    changes, at = [], 0.0
    while at <= seconds:
        used = min(wanted := demand(at), pools * SLOTS)
        decision = scaling.decide(Sample(at, pools, SLOTS, used, wanted - used, step_s(used / pools)))
        if decision is not None:
            pools = decision.pools
            changes.append((at, pools, decision.why))
        at += LOOK_S
    return changes


def test_episodes_that_wait_bring_the_pools_that_they_fill_after_a_while_and_not_before() -> None:
    assert followed(Scaling(1, 9), lambda at: 16 + 41, 60.0) == [
        (10.0, 4, "41 episodes wait"),
        (22.0, 8, "25 episodes wait"),  # at most doubled each time
    ]
    assert followed(Scaling(1, 3), lambda at: 57, 60.0) == [(10.0, 3, "41 episodes wait")]
    assert followed(Scaling(1, 9), lambda at: 57 if at % 10 < 8 else 0, 300.0) == [], "none waited for ten seconds on end"


def test_idle_pools_go_but_not_in_a_pause() -> None:
    idle = followed(Scaling(1, 4), lambda at: 0, 200.0, pools=4)
    assert idle == [(60.0, 1, "at most 0 of 32 slots were used for 60 s")]
    assert followed(Scaling(1, 4), lambda at: 32 if at % 50 < 4 else 0, 600.0, pools=4) == []
    half = followed(Scaling(1, 4), lambda at: 12, 600.0, pools=4)
    assert [pools for _, pools, _ in half] == [2], "twelve episodes fit into two pools of eight with room to spare"


def test_slow_worlds_and_late_event_loops_bring_pools_too_and_those_stay_while_the_load_does() -> None:
    slow = followed(Scaling(1, 6, slow_step_s=1.0), lambda at: 16, 2_000.0, step_s=lambda held: 2.0 if held > 4 else 0.2)
    assert [(pools, why) for _, pools, why in slow] == [
        (3, "90 % of the world steps take up to 2 s"),
        (4, "90 % of the world steps take up to 2 s"),
    ]
    late = Scaling(1, 6)
    found = [late.decide(Sample(at, 2, SLOTS, 10, 0, None, lag=0.9)) for at in (0.0, 9.0, 10.0)]
    assert (
        found[:2] == [None, None]
        and found[2] is not None
        and (found[2].pools, found[2].why)
        == (
            3,
            "event loops are 0.9 s late",
        )
    )
    assert [late.decide(Sample(at, 3, SLOTS, 0, 0, None, lag=0.9)) for at in (12.0, 22.0, 32.0)] == [None] * 3, "nothing runs"
    assert followed(Scaling(1, 6), lambda at: 16, 500.0, step_s=lambda held: 9.0) == [], "no limit was set"


def test_what_is_outside_of_the_bounds_is_brought_inside_at_once_and_a_change_by_hand_starts_the_clocks_anew() -> None:
    assert followed(Scaling(3, 4), lambda at: 0, 0.0)[0][1] == 3
    assert followed(Scaling(1, 2), lambda at: 99, 0.0, pools=5)[0][1] == 2
    scaling = Scaling(1, 9)
    assert scaling.decide(Sample(0.0, 4, SLOTS, 0, 0)) is None
    scaling.rest()
    assert [scaling.decide(Sample(at, 4, SLOTS, 0, 0)) is not None for at in (60.0, 110.0, 120.0)] == [False, False, True]


def test_looks_that_failed_for_a_while_are_no_sign_of_idleness() -> None:
    scaling = Scaling(1, 9)
    busy = [scaling.decide(Sample(at, 4, SLOTS, 30, 0)) for at in range(0, 62, 2)]
    assert busy == [None] * 31 and scaling.decide(Sample(500.0, 4, SLOTS, 0, 0)) is None


LOADS = st.lists(st.tuples(st.integers(1, 40), st.integers(0, 200)), min_size=1, max_size=30)


@given(LOADS, st.integers(1, 5), st.integers(0, 10), st.integers(1, 20), st.floats(0.0, 5.0))
def test_it_is_never_outside_of_the_bounds(
    loads: list[tuple[int, int]], least: int, room: int, start: int, limit: float
) -> None:
    held = [load for looks, load in loads for _ in range(looks)]
    scaling = Scaling(least, least + room, out_s=4.0, in_s=8.0, slow_step_s=limit)
    seconds = LOOK_S * (len(held) - 1)
    changes = followed(scaling, lambda at: held[int(at / LOOK_S)], seconds, start, lambda density: density / 4)
    assert all(least <= pools <= least + room for _, pools, _ in changes)
    assert changes or least <= start <= least + room


@given(st.integers(0, 300), st.integers(1, 4), st.integers(0, 12), st.integers(1, 16), st.floats(1.0, 9.0))
def test_constant_load_is_settled_after_few_changes_in_one_direction(
    load: int, least: int, room: int, start: int, breaking: float
) -> None:
    """Whether worlds grow slow when a pool holds more than `breaking` episodes, or never do."""
    scaling = Scaling(least, least + room, out_s=4.0, in_s=20.0, slow_step_s=1.0)
    changes = followed(scaling, lambda at: load, 3_000.0, start, lambda held: 2.0 if held > breaking else 0.1)
    numbers = [start if least <= start <= least + room else changes[0][1], *(pools for _, pools, _ in changes)]
    steps = [after - before for before, after in pairwise(numbers) if after != before]
    turns = sum((a > 0) != (b > 0) for a, b in pairwise(steps))
    assert turns <= 1, numbers
    assert not changes or changes[-1][0] < 1_000.0, "it goes on for ever"


@pytest.mark.parametrize("load", [0, 5, 40, 64, 100])
def test_it_ends_with_enough_pools_and_no_more(load: int) -> None:
    changes = followed(Scaling(1, 50), lambda at: load if at < 2_000 else 0, 4_000.0, pools=3)
    assert [pools for _, pools, _ in changes][-1] == 1
    before = [pools for at, pools, _ in changes if at < 2_000]
    assert (before[-1] if before else 3) * SLOTS >= load
