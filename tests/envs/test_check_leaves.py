"""What an episode leaves behind is found wherever in the episode it is made."""

import pytest

from tests.envs.checked import LEAVES, detail_of, of_status, status_of
from troupe.envs.check import check


@pytest.mark.parametrize(
    ("name", "detail"),
    [
        ("SocketOnTheSecondStep", "open file socket:"),
        ("FileAtTheEnd", "open file "),
        ("ProcessAtTheEnd", "process "),
        ("FolderAtTheEnd", "temporary file scratch-"),
        ("ThreadOnTheSecondStep", "thread left-behind"),
        ("TaskOnTheSecondStep", "asyncio task waits"),
        ("OfOneTaskInMany", "open file socket:"),
    ],
)
def test_what_is_left_late_in_an_episode_is_found(strangers, name, detail):
    report = check(getattr(strangers, name), episodes=3, others=0)
    assert of_status(report, "broken") == {LEAVES} and detail in detail_of(report, LEAVES), str(report)


@pytest.mark.parametrize(
    ("name", "detail"),
    [
        ("Grows", "MB of memory with each of"),
        ("FileOfEachTask", "open file"),
        ("SharesAHelper", "once, perhaps for all episodes together: process "),
    ],
)
def test_what_grows_or_stays_once_is_a_warning(strangers, name, detail):
    report = check(getattr(strangers, name), episodes=3, others=0)
    assert report.ok and of_status(report, "warning") == {LEAVES} and detail in detail_of(report, LEAVES), str(report)


def test_much_that_is_let_go_of_is_not_blamed(strangers):
    report = check(strangers.Frees, episodes=3, others=0)
    assert status_of(report)[LEAVES] == "ok" and report.ok and not of_status(report, "warning"), str(report)
