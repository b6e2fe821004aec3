"""What a world keeps by task is found when several play that task, at the same time or one after the other."""

import pytest

from tests.envs.checked import BESIDE, ELSEWHERE, LEAKS, detail_of, of_status, status_of
from troupe.envs.check import check


@pytest.mark.parametrize("name", ["CountsByTask", "RemembersByTask", "FileByTask", "FolderByTask"])
def test_what_is_kept_by_task_is_found_by_several_that_play_one(strangers, name):
    report = check(getattr(strangers, name), episodes=3, others=0)
    assert of_status(report, "broken") == {BESIDE}, str(report)
    assert "only beside another episode of the same task" in detail_of(report, BESIDE), str(report)


def test_what_is_kept_by_class_is_not_blamed_on_the_task(strangers):
    report = check(strangers.SecretOfTheClass, episodes=4, others=0)
    assert status_of(report)[BESIDE] == "broken" and "same task" not in detail_of(report, BESIDE), str(report)


@pytest.mark.parametrize("name", ["VerdictByTask", "VerdictByQuestion", "HelpsWhoWasWrong"])
def test_what_an_earlier_answer_to_a_task_has_left_is_found_by_a_process_with_another_order(strangers, name):
    report = check(getattr(strangers, name), episodes=6, others=1)
    assert of_status(report, "broken") == {LEAKS} and status_of(report)[ELSEWHERE] == "ok", str(report)
    assert "played in another order" in detail_of(report, LEAKS)


@pytest.mark.parametrize("name", ["Player", "KeyedByWorld", "CachedByAnswer"])
def test_who_keeps_what_is_their_own_is_not_blamed(strangers, name):
    report = check(getattr(strangers, name), episodes=6, others=1)
    assert report.ok and not of_status(report, "warning"), str(report)
