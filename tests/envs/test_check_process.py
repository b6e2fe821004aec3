"""What a world changes for all that share its process is named, put back, and does not break the check."""

import gc
import json
import os
import signal
import socket
import sys

import pytest

from tests.envs.checked import BESIDE, ELSEWHERE, LEAVES, PROCESS, STRANGERS, detail_of, of_status, status_of
from troupe.envs.check import check, examine

CHANGED = {
    "ClosesFilesToAll": "the umask",
    "IgnoresSignals": "the handler of SIGTERM",
    "Mutes": "sys.stderr, sys.stdout",
    "ShortOfTime": "the time limit of all sockets",
    "KeepsGarbage": "the garbage collector (now off)",
    "ReplacesJson": "json.loads",
    "ReplacesOpen": "os.getpid",
}
ODD = {"AddsToThePath": "sys.path", "RaisesTheLimit": "the recursion limit"}


def shared():
    umask = os.umask(0)
    os.umask(umask)
    streams, functions = (sys.stdout, sys.stderr), (json.loads, os.getpid)
    limits = (socket.getdefaulttimeout(), sys.getrecursionlimit())
    return umask, signal.getsignal(signal.SIGTERM), streams, functions, limits, gc.isenabled(), list(sys.path)


@pytest.mark.parametrize("name", CHANGED)
def test_what_breaks_others_is_named_and_put_back(strangers, name):
    before = shared()
    report = check(getattr(strangers, name), episodes=2, others=0)
    assert of_status(report, "broken") == {PROCESS} and CHANGED[name] in detail_of(report, PROCESS), str(report)
    assert shared() == before


@pytest.mark.parametrize("name", ODD)
def test_what_is_odd_is_a_warning_and_put_back(strangers, name):
    before = shared()
    report = check(getattr(strangers, name), episodes=2, others=0)
    assert report.ok and of_status(report, "warning") == {PROCESS} and ODD[name] in detail_of(report, PROCESS), str(report)
    assert shared() == before


def test_what_is_put_back_by_the_world_is_not_blamed(strangers):
    report = check(strangers.Borrows, episodes=2, others=0)
    assert report.ok and not of_status(report, "warning"), str(report)


def test_a_world_that_breaks_the_check_itself_is_a_finding_with_the_reason_and_the_rest_is_looked_at(capfd):
    report = examine(f"{STRANGERS}/shared.py:BreaksTheCheck", episodes=2, others=0)
    assert of_status(report, "broken") == {BESIDE} and status_of(report)[LEAVES] == "ok", str(report)
    assert "the check itself failed: TypeError: 'NoneType' object is not callable (beside.py" in detail_of(report, BESIDE)
    assert "Traceback" not in capfd.readouterr().err


def test_a_world_that_replaces_what_answers_are_read_with_is_named_for_that_alone(strangers):
    report = check(strangers.ReplacesJson, episodes=2, others=1)
    assert of_status(report, "broken") == {PROCESS} and status_of(report)[ELSEWHERE] == "ok", str(report)
