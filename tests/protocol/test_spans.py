"""What an actor keeps of what it did: told once, whatever is lost on the way; bounded; true to the moment."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from troupe.protocol import spans
from troupe.protocol.messages import GetSpans, Span
from troupe.protocol.spans import InFlight, SpanLog

STEPS = st.lists(st.tuples(st.sampled_from(["enter", "exit", "cut"]), st.floats(0.001, 2.0)), max_size=60)


class Clock:
    """Goes on when it is told to."""

    def __init__(self) -> None:
        self.moment = 1000.0

    def __call__(self) -> float:
        return self.moment


@given(st.lists(st.sampled_from(["work", "heard", "lost"]), max_size=80))
def test_whatever_answers_are_lost_each_span_is_heard_once_and_in_order(events: list[str]) -> None:
    clock = Clock()
    log = SpanLog(clock)
    heard: list[Span] = []
    since = made = 0
    for event in [*events, "heard"]:
        clock.moment += 1.0
        if event == "work":
            log.add(f"work {made}", clock.moment - 0.5)
            made += 1
            continue
        answer = log.told("it", GetSpans(since))
        if event == "heard":
            heard += answer.spans
            since = answer.count
    assert [span.name for span in heard] == [f"work {n}" for n in range(made)]


def test_the_oldest_spans_are_forgotten_and_the_totals_are_not() -> None:
    clock = Clock()
    log = SpanLog(clock)
    for _ in range(3 * spans._KEPT):
        begin = clock.moment
        clock.moment += 0.5
        log.add("work", begin)
    answer = log.told("it", GetSpans(0, limit=10**6))
    assert len(answer.spans) == spans._KEPT and answer.count == 3 * spans._KEPT
    assert answer.spans[-1].end == clock.moment and answer.totals == {"work": 1.5 * spans._KEPT}
    newest = log.told("it", GetSpans(0, limit=7)).spans
    assert newest == answer.spans[-7:]
    assert log.told("it", GetSpans(answer.count + 5)).spans == []


@pytest.mark.parametrize("limit", [0, 3])
def test_neither_numbers_nor_limits_push_out_when_an_actor_was_busy(limit: int) -> None:
    clock = Clock()
    log = SpanLog(clock, busy="busy")
    work = InFlight(log, "busy", "number")
    first = log.told("it", GetSpans())
    for number in range(3 * spans._KEPT):  # numbers that change all the time beside one piece of work, and other spans
        clock.moment += spans._SAMPLE_S
        log.sample("other", number)
    for _ in range(2 * spans._KEPT):
        with work:
            clock.moment += 1.0
        clock.moment += 1.0
        log.add("other work", clock.moment - 0.5)
    work.cut()
    told = log.told("it", GetSpans(first.count, limit))
    assert len(told.spans) == limit
    assert sum(end - begin for begin, end in told.busy) == pytest.approx(told.totals["busy"])
    assert log.told("it", GetSpans(told.count)).busy == []
    whole = log.told("it", GetSpans(0, 10**6))
    kept = [[span for span in whole.spans if (span.value is None) == is_span] for is_span in (True, False)]
    assert [len(some) for some in kept] == [spans._KEPT] * 2, "neither pushes out the other"
    newest = log.told("it", GetSpans(0, spans._KEPT + limit)).spans
    assert len(newest) == spans._KEPT + limit and all(span in newest for span in kept[0]), "numbers have what room is left"


@given(STEPS)
def test_work_in_flight_is_noted_as_long_as_there_is_some_and_its_number_is_true(steps: list[tuple[str, float]]) -> None:
    clock = Clock()
    log = SpanLog(clock)
    work = InFlight(log, "busy", "number")
    pieces, busy = 0, 0.0
    truth = [(clock.moment, 0)]
    for what, pause in steps:
        clock.moment += pause
        busy += pause * (pieces > 0)
        if what == "enter":
            work.__enter__()
            pieces += 1
        elif what == "exit" and pieces:
            work.__exit__()
            pieces -= 1
        elif what == "cut":
            work.cut()
        truth.append((clock.moment, pieces))
    work.cut()
    told = log.told("it", GetSpans())
    noted = sorted((span.begin, span.end) for span in told.spans if span.name == "busy")
    assert all(end <= begin for (_, end), (begin, _) in pairwise(noted))
    pauses = len(noted) + len(steps)  # shorter ones than _GAP_S are none
    assert busy - 1e-6 <= told.totals.get("busy", 0.0) <= busy + spans._GAP_S * pauses + 1e-6
    numbers = [(span.begin, span.value) for span in told.spans if span.value is not None]
    assert set(numbers) <= set(truth)
    for moment, value in truth:
        shown = [(at, number) for at, number in numbers if at <= moment]
        assert not shown or shown[-1][1] == value or moment - shown[-1][0] < spans._SAMPLE_S
    if numbers:
        assert numbers[-1][1] == pieces
