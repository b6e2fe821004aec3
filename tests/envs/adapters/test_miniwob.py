"""MiniWoB++ in a real browser: its own rewards, episodes that can be played again, and a Chromium that dies with its owner."""

import os
import random
import signal
import subprocess
import sys
import time
from importlib.util import find_spec
from pathlib import Path

import pytest

from troupe.envs import registry
from troupe.envs.adapters import chromium
from troupe.envs.adapters.miniwob import MiniWob, _line
from troupe.envs.check import check, player_score
from troupe.protocol.errors import ConfigError, InvalidAction

needs_package = pytest.mark.skipif(
    find_spec("miniwob") is None, reason="the package miniwob is missing: pip install 'troupe-rl[miniwob]'"
)
needs_chromium = pytest.mark.skipif(bool(chromium.needs()), reason=f"a browser needs {chromium.needs()}")
pytestmark = [needs_package, needs_chromium, pytest.mark.slow, pytest.mark.xdist_group("browser")]


@pytest.fixture(scope="module", autouse=True)
def browser_ends_with_these_tests():
    yield
    chromium.shutdown()


def opened(task, index=0, split="train"):
    world = registry.make(MiniWob, {"task": task})
    one = MiniWob.task(split, index)
    world._begin(one)
    return world, world.reset(one)


def test_it_conforms():
    report = check(MiniWob, episodes=4)
    assert report.ok, str(report)


@pytest.mark.parametrize("task", ["click-test", "click-button", "click-link", "enter-text", "click-checkboxes"])
def test_the_player_does_the_simple_tasks(task):
    assert player_score(MiniWob, {"task": task}, n=4).reward == 1.0


def test_what_is_wrong_is_paid_as_the_page_pays_it():
    world, opening = opened("click-button")
    right = world.play(random.Random(0), 0.0)
    buttons = [f"click({e['ref']})" for e in world.elements if e["tag"] == "BUTTON"]
    wanted = next(e["text"] for e in world.elements if f"click({e['ref']})" == right)
    wrong = [
        b for b, e in zip(buttons, (e for e in world.elements if e["tag"] == "BUTTON"), strict=True) if e["text"] != wanted
    ]
    assert f'"{wanted}"' in opening
    if wrong:
        turn = world.step(wrong[0])
        assert (turn.reward, turn.done, turn.success) == (-1.0, True, False)
    world.close()


def test_an_action_on_nothing_is_told():
    world, _ = opened("enter-text")
    button = next(e["ref"] for e in world.elements if e["tag"] == "BUTTON")
    for said, reason in [
        ("", "say click"),
        ("click it", "say click"),
        ("click(999)", "no element 999"),
        (f"type({button}, hello)", f"element {button} takes no text"),
        ("type(5, )", "1 to 200 characters"),
        ("type(5, \ud800)", "1 to 200 characters"),
    ]:
        with pytest.raises(InvalidAction, match=reason):
            world.step(said)
    told = world.step("I write: type(5, 'a, b')").text
    assert "5 text = a, b" in told
    world.close()


def test_several_tasks_take_turns():
    asked = [opened(["click-test", "enter-text"], index)[1].partition(" ")[0] for index in range(4)]
    assert asked == ["Click", "Enter"] * 2


def test_the_browser_reaches_no_network_and_listens_on_this_machine_alone():
    browser = chromium.shared()
    tab = browser.open("about:blank")
    said = browser.run(tab, "return fetch('http://example.org/').then(() => 'reached', error => String(error))")
    assert "Failed to fetch" in said
    browser.release(tab)
    ours = below(browser._warden.pid)
    inodes = {os.readlink(f) for pid in ours for f in Path(f"/proc/{pid}/fd").iterdir() if f.is_symlink() and readable(f)}
    for table in ("tcp", "tcp6"):
        rows = [line.split() for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]]
        mine = [row[1] for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in inodes]
        loopback = ("0100007F:", "00000000000000000000000001000000:")
        assert all(address.startswith(loopback) for address in mine), mine


def readable(link):
    try:
        os.readlink(link)
    except OSError:
        return False
    return True


def below(pid):
    found = [pid]
    for one in found:
        try:
            for tasks in Path(f"/proc/{one}/task").iterdir():
                found += map(int, (tasks / "children").read_text().split())
        except OSError:
            pass
    return found


OWNER = """
import time
from troupe.envs.adapters import chromium
browser = chromium.Browser()
print(browser._warden.pid, browser._warden.args[5], flush=True)
time.sleep(600)
"""


def test_chromium_dies_when_its_owner_is_killed():
    owner = subprocess.Popen([sys.executable, "-c", OWNER], stdout=subprocess.PIPE, text=True)
    try:
        warden, folder = owner.stdout.readline().split(maxsplit=1)
        everyone = below(int(warden))
        assert len(everyone) > 3 and Path(folder.strip()).is_dir()
    finally:
        owner.send_signal(signal.SIGKILL)
        owner.wait()
        owner.stdout.close()
    until = time.monotonic() + 60
    while time.monotonic() < until and any(alive(pid) for pid in everyone):
        time.sleep(0.1)
    assert not [pid for pid in everyone if alive(pid)] and not Path(folder.strip()).exists()


def alive(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


@pytest.mark.parametrize(
    ("options", "reason"),
    [
        ({"task": "click-buton"}, "no task 'click-buton'. Did you mean 'click-button'?"),
        ({"task": []}, "empty list"),
        ({"settle": 60.0}, "it is 0 to 5 seconds"),
    ],
)
def test_what_cannot_be_played_is_one_clear_line(options, reason):
    with pytest.raises(ConfigError) as error:
        registry.make(MiniWob, options)
    assert reason in str(error.value) and "\n" not in str(error.value)


def test_where_chromium_is_missing_it_says_what_to_install(monkeypatch):
    monkeypatch.setenv("PATH", "")
    with pytest.raises(ConfigError, match="apt-get install chromium chromium-driver"):
        registry.make(MiniWob, {})


def test_an_element_is_one_short_line():
    box = {"ref": 6, "tag": "INPUT_checkbox", "text": "", "value": True}
    assert _line(box) == "6 checkbox checked"
    assert _line({"ref": 2, "tag": "BUTTON", "text": " a  b ", "value": None}) == "2 button a b"
