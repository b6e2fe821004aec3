"""Tasks that open alike are told apart by their states; what nothing tells apart is not called the same."""

import pytest

from tests.envs.checked import HELD_OUT, detail_of, of_status, status_of
from troupe.envs.check import check


def test_a_world_whose_state_tells_its_tasks_apart_is_believed(strangers):
    report = check(strangers.RiddleThatTells, episodes=3, others=0)
    assert report.ok and status_of(report)[HELD_OUT] == "ok" and "told apart by state()" in detail_of(report, HELD_OUT)


@pytest.mark.parametrize(
    ("name", "detail"),
    [
        ("Riddle", "go on alike as far as they were played"),
        ("RiddleThatTellsNothing", "go on alike as far as they were played"),
        ("Newcomer", "go on differently"),
        ("TellingOfHalf", "have the state"),
    ],
)
def test_a_sound_world_that_does_not_tell_is_not_judged(strangers, name, detail):
    report = check(getattr(strangers, name), episodes=3, others=0)
    assert report.ok and not of_status(report, "warning") and status_of(report)[HELD_OUT] == "unknown", str(report)
    assert detail in detail_of(report, HELD_OUT) and "define state()" in detail_of(report, HELD_OUT)


@pytest.mark.parametrize(
    ("name", "detail"),
    [
        ("SplitBySeed", "both splits open with 'task 0', and the same actions win"),
        ("SameQuestions", "and the same actions win"),
        ("TellingTheSame", "both splits have the state"),
    ],
)
def test_the_same_tasks_in_both_splits_are_found(strangers, name, detail):
    report = check(getattr(strangers, name), episodes=3, others=0)
    assert of_status(report, "broken") == {HELD_OUT} and detail in detail_of(report, HELD_OUT), str(report)
