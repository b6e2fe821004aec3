"""The conformance suite passes good worlds and names the defect of each kind of bad one."""

import sys
from pathlib import Path

import pytest

from tests.envs.checked import (
    BESIDE,
    BLOCKS,
    CLOSES,
    ELSEWHERE,
    FITS,
    GARBAGE,
    HELD_OUT,
    JUDGED,
    LEAKS,
    LEAVES,
    LOOKING,
    MADE,
    PROCESS,
    RUNS,
    SAME,
    STRANGERS,
    TASKS,
    detail_of,
    status_of,
)
from troupe.envs.base import action_of
from troupe.envs.check import PROMISES, check, examine, player_score
from troupe.envs.registry import BUILT_IN, find
from troupe.protocol.errors import ConfigError, EnvironmentFailed

GOOD, ENDS = STRANGERS / "good.py", STRANGERS / "ends.py"


# -- good worlds -----------------------------------------------------------------------------------------------------


SANDBOXED = ("code", "math_python", "swe")
OTHERS = ("miniwob", "textworld")  # what they need is not everywhere; their own tests check them


@pytest.mark.parametrize("name", sorted({*BUILT_IN} - {*SANDBOXED, *OTHERS}))
def test_the_built_in_worlds_conform(name):
    report = check(find(name), episodes=5, others=0)
    assert report.ok and "warning" not in status_of(report).values(), str(report)


@pytest.mark.slow
@pytest.mark.parametrize("name", SANDBOXED)
def test_the_built_in_worlds_that_run_programs_conform(name, bubblewrap):
    report = check(find(name), {**bubblewrap, "sandboxes": 8}, episodes=4, timeout_s=60.0, others=0)
    assert report.ok, str(report)


@pytest.mark.parametrize("name", ["Newcomer", "Telling", "Desk", "Threaded", "Tidy", "Halting"])
def test_no_good_world_of_a_stranger_is_blamed_or_warned_of(strangers, name):
    report = check(getattr(strangers, name), episodes=3, others=0)
    assert report.ok and "warning" not in status_of(report).values(), str(report)


def test_what_cannot_be_judged_is_not_passed_until_the_world_tells_more(strangers):
    report = check(strangers.Newcomer, episodes=2, others=0)
    unknown = {name for name, status in status_of(report).items() if status == "unknown"}
    assert unknown == {ELSEWHERE, HELD_OUT} and "define state()" in detail_of(report, HELD_OUT)
    assert status_of(check(strangers.Telling, episodes=2, others=0))[HELD_OUT] == "ok"


def test_the_time_of_each_kind_of_call_is_reported(strangers):
    report = check(strangers.Tidy, episodes=2, others=0)
    assert set(report.seconds) == {"make", "reset", "step", "close"}
    assert all(0.0 < middle <= longest for middle, longest in report.seconds.values())
    assert report.as_json()["seconds"]["step"]["max"] == report.seconds["step"][1]


def test_a_world_with_tools_conforms_and_its_tools_were_called(strangers):
    report = check(strangers.Desk, episodes=3, others=0)
    assert status_of(report)[JUDGED] == "ok" and report.steps > report.episodes, str(report)


def test_the_world_in_the_documentation_conforms(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    page = Path(__file__).parents[2] / "docs" / "worlds.md"
    file = tmp_path / "desk.py"
    file.write_text(page.read_text().split("```python\n")[1].split("```")[0])
    report = check(find(f"{file}:Desk"), episodes=5, others=1)
    assert report.ok and status_of(report)[ELSEWHERE] == "ok", str(report)


# -- bad worlds ------------------------------------------------------------------------------------------------------

CHANCE = {SAME, LEAKS, BESIDE, LOOKING}
OUTLIVES = {SAME, LEAKS, BESIDE, LOOKING}

BAD = [  # world, the promise that fails first, what it says, what else may fail for the same reason
    ("Unseeded", SAME, "task train/0, seed 0", {LEAKS, BESIDE, LOOKING, PROCESS, HELD_OUT}),
    ("Clocked", SAME, "('at ", CHANCE),
    ("ReseedsTheGlobal", BESIDE, "you rolled", {PROCESS}),
    ("CountsOn", LEAKS, "step 0", {BESIDE}),
    ("CountsOnForAll", SAME, "step 0", OUTLIVES),
    ("MutableDefault", SAME, "you said 1 words", OUTLIVES),
    ("SecretOfTheClass", BESIDE, "it was", set()),
    ("ClearsAtTheEndOnly", LEAKS, "guess 1", {BESIDE}),
    ("ChangesFolder", PROCESS, "the working folder (now ", set()),
    ("Gym", RUNS, "returned tuple, not a Turn or a str", {GARBAGE}),
    ("Dict", RUNS, "returned dict, not a str to observe", {GARBAGE, HELD_OUT, CLOSES}),
    ("Bytes", RUNS, "Turn.text is bytes, not str", {GARBAGE}),
    ("Nothing", RUNS, "returned NoneType, not a Turn or a str", {GARBAGE}),
    ("NotANumber", RUNS, "Turn.reward is nan, not a finite number", {GARBAGE}),
    ("Infinite", RUNS, "Turn.reward is inf, not a finite number", {GARBAGE}),
    ("RewardInWords", RUNS, "Turn.reward is '1.0', not a finite number", {GARBAGE}),
    ("BadPart", RUNS, "Turn.parts['style'] is None", {GARBAGE}),
    ("DoneInWords", RUNS, "Turn.done is 'False', not True or False", {GARBAGE}),
    ("SuccessInWords", RUNS, "Turn.success is 'no', not True or False", {GARBAGE}),
    ("Endless", MADE, "max_turns is 0", set()),
    ("SystemAsList", MADE, "system is list, not str", set()),
    ("KeyThatDraws", LOOKING, "state_key() says", set()),
    ("StateThatActs", LOOKING, "guess 1", set()),
    ("StateOfObjects", LOOKING, "StateOfObjects.state (task train/0, seed 0) raised PydanticSerializationError", {HELD_OUT}),
    ("Fragile", GARBAGE, "null bytes: Fragile.step (task train/0, seed 0) raised KeyError", set()),
    ("Evaluates", GARBAGE, "raised SyntaxError", set()),
    ("Formats", GARBAGE, "format: Formats.step (task train/0, seed 0) raised IndexError", set()),
    ("FragileTool", GARBAGE, "count with null bytes: FragileTool.count (task train/0", set()),
    ("HiddenTool", GARBAGE, "a tool that is offered cannot be called: no tool 'find'", set()),
    ("Unreadable", JUDGED, "Unreadable.verify (task train/0, seed 0) raised ValueError", {RUNS, GARBAGE}),
    ("RestlessTool", SAME, "task train/", {LEAKS, BESIDE, LOOKING, PROCESS}),
    ("SplitBySeed", HELD_OUT, "both splits open with 'task 0', and the same actions win", set()),
    ("SameQuestions", HELD_OUT, "both splits open with 'Say the word ", set()),
    ("TellingTheSame", HELD_OUT, "both splits have the state", set()),
    ("OneId", TASKS, "task 1 of train has the id 'task', and so has 0 of train", set()),
    ("NoTask", TASKS, "returned dict, not a Task", {RUNS, GARBAGE, HELD_OUT, JUDGED, CLOSES}),
    ("FewTasks", TASKS, "raised IndexError", {RUNS, HELD_OUT}),
    ("LeavesThread", LEAVES, "4 more after 4 closed episodes", set()),
    ("LeavesProcess", LEAVES, "in all: process", set()),
    ("LeavesFile", LEAVES, "in all: open file", set()),
    ("LeavesFolder", LEAVES, "in all: temporary file scratch-", set()),
    ("ClosesNeverWell", CLOSES, "OSError: device busy", set()),
    ("ClosesOnce", CLOSES, "the second time: ClosesOnce.close", set()),
    ("ClosesWhatItHasNot", CLOSES, "before any reset: ClosesWhatItHasNot.close raised AttributeError", set()),
    ("ClosesAtTheEndOnly", CLOSES, "ClosesAtTheEndOnly.close", set()),
    ("SlowInline", BLOCKS, "inline = True, but step takes", set()),
    ("BlocksTheLoop", BLOCKS, "without awaiting", set()),
]


@pytest.mark.parametrize(("name", "promise", "detail", "also"), BAD, ids=[row[0] for row in BAD])
def test_the_defect_of_a_bad_world_is_named_and_nothing_else(strangers, name, promise, detail, also):
    report = check(getattr(strangers, name), episodes=4, others=0)
    broken = {finding.name for finding in report.broken}
    assert promise in broken and detail in detail_of(report, promise), str(report)
    assert broken <= {promise, *also}, str(report)


@pytest.mark.parametrize("name", ["SetOrder", "HashOfText", "OfTheProcess", "TaskByHash", "MadeByHash"])
def test_what_depends_on_the_process_is_found_by_another_one(strangers, name):
    report = check(getattr(strangers, name), episodes=2, others=1)
    assert {finding.name for finding in report.broken} == {ELSEWHERE}, str(report)
    assert " here, " in detail_of(report, ELSEWHERE)


def test_a_class_that_only_its_name_leads_to_is_looked_at_in_another_process():
    report = examine(f"{STRANGERS}/chance.py:Box.Inside", episodes=2, others=1)
    assert {finding.name for finding in report.broken} == {ELSEWHERE}, str(report)


def test_a_sound_class_that_a_function_made_is_not_blamed(strangers):
    report = check(strangers.MadeSound, episodes=2, others=1)
    assert report.ok and status_of(report)[ELSEWHERE] == "ok", str(report)


@pytest.mark.parametrize(("name", "status"), [("AwaitsInline", "ok"), ("BlocksInline", "broken")])
def test_an_inline_world_may_take_its_time_if_others_go_on_meanwhile(strangers, name, status):
    report = check(getattr(strangers, name), episodes=1, others=0)
    assert status_of(report)[BLOCKS] == status and {f.name for f in report.broken} <= {BLOCKS}, str(report)


@pytest.mark.parametrize("name", ["ByTheMinute", "ByTheSecond"])
def test_a_world_that_reads_the_clock_is_found_by_a_process_on_another_day(strangers, name):
    report = check(getattr(strangers, name), episodes=1, others=1)
    if status_of(report)[SAME] == "ok":  # else its minute or second was over before it was played once more here
        assert status_of(report)[ELSEWHERE] == "broken" and "the clock" in detail_of(report, ELSEWHERE), str(report)


@pytest.mark.parametrize(
    ("name", "status", "detail"),
    [
        ("DiesElsewhere", "unknown", "not judged: the other process died with exit code 3"),
        ("FailsElsewhere", "broken", "in another process it breaks: FailsElsewhere.step"),
    ],
)
def test_another_process_that_says_nothing_is_not_taken_for_one_that_says_otherwise(strangers, name, status, detail):
    report = check(getattr(strangers, name), episodes=2, others=1)
    assert status_of(report)[ELSEWHERE] == status and detail in detail_of(report, ELSEWHERE), str(report)
    assert "hash()" not in detail_of(report, ELSEWHERE)


def test_a_world_whose_close_hangs_elsewhere_too_is_blamed_for_that_alone(strangers):
    report = check(strangers.HangsInClose, episodes=2, timeout_s=0.5, others=1)
    assert [finding.name for finding in report.broken] == [CLOSES] and status_of(report)[ELSEWHERE] == "ok", str(report)


@pytest.mark.parametrize(("name", "outlives"), [("MutableDefault", True), ("Clocked", False)])
def test_what_outlives_an_episode_is_told_from_chance_by_another_process(strangers, name, outlives):
    report = check(getattr(strangers, name), episodes=2, others=1)
    assert ("something outlives an episode" in detail_of(report, SAME)) is outlives, str(report)


@pytest.mark.parametrize(
    ("name", "promise", "detail"),
    [
        ("TakesAnyOption", MADE, "takes any option without a word"),
        ("ReseedsAndIgnores", PROCESS, "Python's global random"),
        ("ChangesEnvironment", PROCESS, "STRANGERS_SEED"),
        ("OneTask", HELD_OUT, "all tasks look and go on alike"),
        ("Long", FITS, "longest observation 400,000 characters"),
        ("OneThreadForAll", LEAVES, "once, perhaps for all episodes together: thread for-all"),
    ],
)
def test_what_is_odd_is_a_warning_and_breaks_nothing(strangers, name, promise, detail):
    report = check(getattr(strangers, name), episodes=2, others=0)
    assert report.ok and [n for n, status in status_of(report).items() if status == "warning"] == [promise], str(report)
    assert detail in detail_of(report, promise)


def test_a_world_that_changes_the_options_it_is_given_is_named(strangers):
    report = check(strangers.EatsItsOptions, {"words": ["a"] * 500}, episodes=2, others=0)
    assert [finding.name for finding in report.broken] == [PROCESS] and "options" in detail_of(report, PROCESS)


# -- worlds that hang ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("name", "method"), [("HangsInReset", "reset"), ("HangsInStep", "step")])
def test_the_suite_stops_at_the_first_hang(strangers, name, method):
    report = check(getattr(strangers, name), episodes=5, timeout_s=0.5, others=0)
    assert f"{name}.{method} (task train/0, seed 0) has not returned for 0.5 s" in detail_of(report, RUNS)
    assert [finding.name for finding in report.broken] == [RUNS]
    later = report.findings[PROMISES.index(RUNS) + 1 :]
    assert all((f.status, f.detail) == ("unknown", "not looked at: the world hangs") for f in later)


def test_a_hang_is_waited_for_once(strangers):
    strangers.HangsInStep.calls = strangers.HangsInClose.calls = 0
    check(strangers.HangsInStep, episodes=5, timeout_s=0.5, others=0)
    report = check(strangers.HangsInClose, episodes=5, timeout_s=0.5, others=0)
    assert (strangers.HangsInStep.calls, strangers.HangsInClose.calls) == (1, 2)  # the killed world is closed, once more
    assert [finding.name for finding in report.broken] == [CLOSES] and status_of(report)[HELD_OUT] == "ok"


def test_a_slow_world_plays_fewer_episodes_so_that_the_check_has_an_end():
    report = check(find("echo"), {"sleep": 0.02, "turns": 50}, episodes=50, others=0, limit_s=1.0)
    assert report.ok and report.episodes < 50 and "because it is slow" in detail_of(report, RUNS), str(report)


@pytest.mark.parametrize(
    ("name", "promise", "detail"),
    [
        ("HangsInline", RUNS, "in step"),
        pytest.param("HangsWhenMade", MADE, "in __init__", marks=pytest.mark.slow),
        pytest.param("HangsInARegularExpression", GARBAGE, "in step", marks=pytest.mark.slow),
    ],
)
def test_a_world_that_blocks_its_process_is_named_with_the_line_where_it_stands(name, promise, detail):
    report = examine(f"{ENDS}:{name}", episodes=2, timeout_s=1.0, others=0)
    assert [finding.name for finding in report.broken] == [promise], str(report)
    assert f"{ENDS}, line " in detail_of(report, promise) and detail in detail_of(report, promise)


def test_a_world_that_hangs_at_its_import_is_named_with_the_line(tmp_path):
    (tmp_path / "waits.py").write_text("import threading\nthreading.Event().wait()\n")
    report = examine(f"{tmp_path}/waits.py:World", import_s=1.0)
    assert [finding.name for finding in report.broken] == [MADE]
    assert detail_of(report, MADE) == f"has not returned for 1 s: {tmp_path}/waits.py, line 2, in <module>"


def test_a_world_that_ends_its_process_is_a_finding():
    report = examine(f"{ENDS}:EndsTheProcess", episodes=2, others=0)
    assert detail_of(report, RUNS).startswith("its process has ended with exit code 3")


def test_a_world_in_a_process_of_its_own_is_found_as_good_as_here_and_told_as_it_goes():
    shown = []
    report = examine(f"{GOOD}:Desk", episodes=2, others=1, show=shown.append)
    assert report.ok and status_of(report)[ELSEWHERE] == "ok" and tuple(shown) == PROMISES, str(report)


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("frozen_lak", {}, "Did you mean 'frozen_lake'"),
        ("guess", {"hihg": 3}, "no option 'hihg'"),
        ("guess", {"high": 1}, "high"),
    ],
)
def test_a_world_that_is_not_there_is_one_line_and_no_finding(name, options, reason):
    with pytest.raises(ConfigError, match=reason):
        examine(name, options)


# -- the player ------------------------------------------------------------------------------------------------------


def test_the_players_score_is_reproducible():
    world = find("frozen_lake")
    assert player_score(world, n=50, noise=0.3) == player_score(world, n=50, noise=0.3)
    assert player_score(world, n=50, noise=0.3) != player_score(world, n=50, noise=0.3, split="heldout")


def test_a_score_without_a_player_or_of_a_broken_world_is_an_error_and_not_zero(strangers):
    with pytest.raises(ConfigError, match="Newcomer has no scripted player"):
        player_score(strangers.Newcomer, n=1)
    with pytest.raises(EnvironmentFailed):
        player_score(find("echo"), {"fail": 1.0}, n=1)


@pytest.mark.parametrize(
    ("message", "action"),
    [("<think>a</think> down", " down"), ("down", "down"), ("<think>never closed", ""), ("a</think>b</think>c", "c")],
)
def test_the_action_is_the_message_without_its_thought(message, action):
    assert action_of(message) == action
