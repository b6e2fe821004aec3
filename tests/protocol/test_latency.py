"""Histograms of latencies: exact counts, quantiles to half a bucket, and many of them are as good as one."""

from __future__ import annotations

import math
import random

import pytest
from hypothesis import given
from hypothesis import strategies as st

from troupe.protocol import codec
from troupe.protocol.latency import Histogram, add, of_call
from troupe.protocol.messages import Health

SECONDS = st.lists(st.floats(1e-5, 999.0), min_size=1, max_size=60)


def of(values: list[float]) -> Histogram:
    made = Histogram()
    for value in values:
        made.record(value)
    return made


@given(SECONDS, st.sampled_from([0.0, 0.5, 0.9, 0.99, 1.0]))
def test_a_quantile_is_within_half_a_bucket_of_the_exact_one(values: list[float], share: float) -> None:
    exact = sorted(values)[max(1, math.ceil(share * len(values))) - 1]
    assert of(values).quantile(share) == pytest.approx(exact, rel=0.062)


@given(SECONDS, SECONDS)
def test_merged_histograms_are_the_histogram_of_everything_and_can_be_taken_apart_again(a: list[float], b: list[float]) -> None:
    whole = of(a)
    whole.merge(of(b))
    assert whole.buckets == of(a + b).buckets and whole.longest == max(a + b)
    assert whole.seconds == pytest.approx(sum(a + b)) and whole.count == len(a) + len(b)
    assert whole.since(of(a)).buckets == of(b).buckets
    assert whole.since(of(a)).seconds == pytest.approx(sum(b), abs=1e-9)


def test_what_lies_beyond_the_range_is_counted_and_an_empty_one_has_no_quantiles() -> None:
    assert Histogram().quantile(0.5) is None
    beyond = of([0.0, 1e-9, 5_000.0, 1e9])
    assert (beyond.count, len(beyond.buckets), beyond.longest) == (4, 2, 1e9)
    assert (beyond.quantile(0.5), beyond.quantile(1.0)) == (1e-5, 1e9)


def test_it_travels_in_a_health_message_and_stays_small() -> None:
    dice = random.Random(0)
    many = of([dice.lognormvariate(-3, 1.5) for _ in range(10_000)])
    latencies = {"shop": {"step": many, "reset": of([0.1])}, "echo": {"step": of([2.0])}}
    data, _ = codec.encode(Health("env-0", 1, latency=latencies))
    assert codec.decode(data).latency == latencies and len(data) < 1_500
    total: dict[str, dict[str, Histogram]] = {}
    add(total, latencies)
    add(total, latencies)
    assert of_call(total, "step").count == 20_002 and of_call(total, "close").count == 0
