"""The conformance suite passes good worlds and catches each kind of bad one."""

import itertools
import random
import sys
import threading
from pathlib import Path

import pytest

from troupe.envs.base import TextWorld, Turn, action_of
from troupe.envs.check import check, player_score
from troupe.envs.registry import BUILT_IN, find
from troupe.envs.tools import ToolWorld, tool
from troupe.protocol.errors import ConfigError, EnvironmentFailed

SANDBOXED = ("code", "math_python", "swe")


class Good(TextWorld):
    """The ten-line world of a newcomer: synchronous, in a thread, without a player."""

    def reset(self, task):
        self.secret = self.rng.randint(1, 100)
        return "I am thinking of a number between 1 and 100. Guess."

    def step(self, text):
        guess = int(text)
        if guess == self.secret:
            return Turn("Yes!", reward=1.0, done=True)
        return Turn("higher" if guess < self.secret else "lower")


class Unseeded(Good):
    def reset(self, task):
        super().reset(task)
        return f"{random.random()}"


class Leaky(Good):
    """Counts on over episodes."""

    def __init__(self):
        self.count = itertools.count()

    def step(self, text):
        return Turn(f"step {next(self.count)}")


class Fragile(Good):
    def step(self, text):
        return Turn(str({"a": 1}[text] if "\x00" in text else 1))


class Careless(Good):
    def step(self, text):
        return "ok", 1.0


class SameTasks(Good):
    def reset(self, task):
        super().reset(task)
        return f"task {task.seed}"


class Untidy(Good):
    stop = threading.Event()

    def reset(self, task):
        threading.Thread(target=self.stop.wait, name="left-behind", daemon=True).start()
        return super().reset(task)


class NeverCloses(Good):
    def close(self):
        raise OSError("device busy")


class Desk(ToolWorld):
    """A newcomer's first tools."""

    def reset(self, task):
        self.stock = {"lamp": self.rng.randint(1, 9)}
        return f"How many lamps? {task.split}"

    @tool
    def count(self, name: str, most: int = 9) -> int:
        """Count something."""
        if name not in self.stock:
            raise ValueError("no such thing")
        return min(most, self.stock[name])

    def verify(self):
        return self.answer == str(self.stock["lamp"])


class FragileTool(Desk):
    @tool
    def count(self, name: str) -> int:
        """Count something."""
        return {}[name] if "\x00" in name else 1


class HiddenTool(Desk):
    def tools(self):
        return [*super().tools(), {"name": "find", "description": "Find.", "parameters": {"type": "object"}}]


class Unreadable(Desk):
    def verify(self):
        return int(self.answer) == self.stock["lamp"]


class RestlessTool(Desk):
    @tool
    def count(self) -> float:
        """Count something."""
        return random.random()


class Hangs(Good):
    calls = 0

    def step(self, text):
        type(self).calls += 1
        while True:
            pass


@pytest.mark.parametrize("name", sorted(set(BUILT_IN) - set(SANDBOXED)))
def test_the_built_in_worlds_conform(name):
    report = check(find(name), episodes=10)
    assert report.ok, str(report)


@pytest.mark.slow
@pytest.mark.parametrize("name", SANDBOXED)
def test_the_built_in_worlds_that_run_programs_conform(name, bubblewrap):
    report = check(find(name), {**bubblewrap, "sandboxes": 8}, episodes=4, timeout_s=60.0)  # fewer than garbage
    assert report.ok, str(report)


def test_a_newcomers_world_conforms_and_what_cannot_be_judged_is_not_passed():
    report = check(Good, episodes=5)
    assert report.ok, str(report)
    unknown = [finding.name for finding in report.findings if finding.ok is None]
    assert unknown == ["no held-out task is in training"]
    assert report.step_s[0] > 0.0


@pytest.mark.parametrize(
    ("world", "promise", "detail"),
    [
        (Unseeded, "same task and actions give the same episode", "task train/0, seed 0"),
        (Leaky, "nothing leaks into the next episode", "step"),
        (
            Fragile,
            "garbage actions are invalid or harmless",
            "null bytes: Fragile.step (task train/0, seed 0) raised Key",
        ),
        (Careless, "episodes run and give what they should", "returned tuple, not a Turn or a str"),
        (SameTasks, "no held-out task is in training", "both splits open with 'task 0'"),
        (Untidy, "it closes and leaves no thread behind", "left-behind"),
        (NeverCloses, "it closes and leaves no thread behind", "OSError: device busy"),
        (FragileTool, "garbage actions are invalid or harmless", "count with null bytes: FragileTool.count (task train/0"),
        (HiddenTool, "garbage actions are invalid or harmless", "a tool that is offered cannot be called: no tool 'find'"),
        (
            Unreadable,
            "an episode that a limit ends can be judged",
            "Unreadable.verify (task train/0, seed 0) raised Value",
        ),
        (RestlessTool, "same task and actions give the same episode", "task train/"),
    ],
)
def test_each_broken_promise_is_caught_and_named(world, promise, detail):
    Untidy.stop.clear()
    try:
        report = check(world, episodes=4)
    finally:
        Untidy.stop.set()
    broken = {finding.name: finding.detail for finding in report.findings if finding.ok is False}
    assert not report.ok and promise in broken, str(report)
    assert detail in broken[promise]


def test_a_world_that_hangs_is_reported_and_not_waited_for():
    report = check(find("echo"), {"hang": True}, episodes=1, timeout_s=0.05)
    assert not report.ok and "Echo.step (task train/0, seed 0) has not returned for 0.05 s" in str(report)


def test_a_world_with_tools_conforms_and_its_tools_were_called():
    report = check(Desk, episodes=5)
    assert report.ok and "an episode that a limit ends can be judged" in str(report), str(report)


def test_the_world_in_the_documentation_conforms(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    page = Path(__file__).parents[2] / "docs" / "worlds.md"
    file = tmp_path / "desk.py"
    file.write_text(page.read_text().split("```python\n")[1].split("```")[0])
    report = check(find(f"{file}:Desk"), episodes=5)
    assert report.ok, str(report)


def test_the_suite_stops_at_the_first_hang():
    Hangs.calls = 0
    report = check(Hangs, episodes=5, timeout_s=1)
    findings = {finding.name: finding.ok for finding in report.findings}
    assert Hangs.calls == 1 and "Hangs.step (task train/0, seed 0) has not returned for 1 s" in str(report)
    assert list(findings.values()) == [False, None, None, None, None, None, True]
    assert "garbage actions are invalid or harmless: not looked at: the world hangs" in str(report)


def test_the_players_score_is_reproducible():
    world = find("frozen_lake")
    assert player_score(world, n=50, noise=0.3) == player_score(world, n=50, noise=0.3)
    assert player_score(world, n=50, noise=0.3) != player_score(world, n=50, noise=0.3, split="heldout")


def test_a_score_without_a_player_or_of_a_broken_world_is_an_error_and_not_zero():
    with pytest.raises(ConfigError, match="Good has no scripted player"):
        player_score(Good, n=1)
    with pytest.raises(EnvironmentFailed):
        player_score(find("echo"), {"fail": 1.0}, n=1)


@pytest.mark.parametrize(
    ("message", "action"),
    [("<think>a</think> down", " down"), ("down", "down"), ("<think>never closed", ""), ("a</think>b</think>c", "c")],
)
def test_the_action_is_the_message_without_its_thought(message, action):
    assert action_of(message) == action
