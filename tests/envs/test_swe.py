"""Repositories to mend: visible tests fail for the bug alone, hidden ones decide on the files as they were left."""

import random
from ast import literal_eval

import pytest

from troupe.envs import bugs
from troupe.envs.base import Task, belongs
from troupe.envs.check import player_score
from troupe.envs.drive import Driver
from troupe.envs.swe import Swe, _drawn
from troupe.protocol.errors import ConfigError, InvalidAction

TRUSTED = {"sandbox": "subprocess", "trusted": True}  # nothing is run where it is used


async def opened(options, seed=0, **more):
    driver = Driver(Swe(**options, **more), timeout_s=60)
    return driver, await driver.reset(Task("x", "swe", "train", seed))


async def ended(driver):
    turn = await driver.step("Done.")
    await driver.close()
    return turn


def test_hidden_tests_tell_every_function_from_all_its_bugs_and_hold_for_the_right_one():
    seen = set()
    for seed in range(300):
        wrong, files, tests = _drawn(random.Random(seed), "train", 1, 2)
        passed = {}
        for name, text in (("wrong", wrong.before), ("right", wrong.after)):
            scope = {}
            exec(text, scope)
            passed[name] = []
            for case in tests:
                call = case.call.removeprefix(wrong.path[:-3].replace("/", ".") + ".")
                try:
                    passed[name].append(eval(call, scope) == case.expected)
                except Exception:
                    passed[name].append(False)
        assert all(passed["right"]) and not all(passed["wrong"]) and len(tests) == 9
        assert files[wrong.path] == wrong.before != wrong.after
        seen.add((wrong.bug[0][wrong.bug[1]].strip()[:12], wrong.seen))
    kinds = sum(len(kind.bugs) for kind in bugs._FUNCTIONS)
    assert len(seen) > 0.7 * kinds


def test_hidden_cases_alone_show_each_bug():
    for kind in bugs._FUNCTIONS:
        names = {"f": "f", "a": "a", "x": "x"}
        for bug in kind.bugs:
            told = []
            for lines in (kind.lines, [*kind.lines[: bug.line], bug.wrong, *kind.lines[bug.line + 1 :]]):
                scope = {}
                exec("\n".join(lines).format(**names), scope)
                told.append([])
                for case in kind.cases:
                    try:
                        told[-1].append(eval(f"f({case})", scope))
                    except Exception as error:
                        told[-1].append(type(error))
            assert told[0] != told[1] and not any(isinstance(value, type) for value in told[0]), bug


def test_no_issue_is_in_both_splits():
    for split in ("train", "heldout"):
        assert all(belongs(_drawn(random.Random(seed), split, 1, 2)[0].issue, split) for seed in range(100))


async def test_the_visible_tests_fail_for_the_bug_and_pass_when_it_is_mended(bubblewrap):
    driver, observation = await opened(bubblewrap)
    world = driver.world
    assert observation == f"Issue: {world.module.issue}\nA test of the repository fails for it."
    said = (await driver.call("shell", {"command": "ls; python3 -m unittest"})).text
    assert "README.md\n" in said and "FAILED (failures=1)" in said and said.count("FAIL:") == 1
    assert f"AssertionError: {world.module.seen} != {world.module.right}" in said
    viewed = (await driver.call("view", {"path": world.module.path, "first": 2, "last": 3})).text
    assert viewed == "\n".join(f"{n:4} {line}" for n, line in enumerate(world.module.before.splitlines(), 1) if 2 <= n <= 3)
    old, new = world.module.chosen(random.Random(0), 0.0)
    await driver.call("edit", {"path": world.module.path, "old": "\n".join(old), "new": "\n".join(new)})
    assert (await driver.call("shell", {"command": "python3 -m unittest; echo mine > new.txt"})).text.endswith("\nOK")
    turn = await ended(driver)
    assert (turn.success, turn.parts) == (True, {"outcome": 1.0})
    assert world.tree[world.module.path] == world.module.after and world.tree["new.txt"] == "mine\n"


CHEATS = {
    "nothing": "true",
    "deletes the tests": "rm -r tests",
    "skips the tests": "echo 'import sys; sys.exit(0)' > tests/__init__.py; for t in tests/test_*.py; do echo > $t; done",
    "patches unittest": "printf 'class TestCase: pass\\ndef main(): pass\\n' > unittest.py",
    "exits when it is loaded": "for m in */*.py; do echo 'import os; os._exit(0)' > $m; done",
    "says passed when it is loaded": 'for m in */*.py; do echo \'print("ready"); print("OK")\' >> $m; done',
    "puts a runner into the folder": "for n in json os ast sitecustomize; do echo 'import os; os._exit(0)' > $n.py; done",
    "takes everything away": "rm -rf ./* ; chmod 000 . ; true",
    "fills the disk": "head -c 200000000 /dev/zero > big; for i in 1 2 3 4 5 6; do echo x > $i; done",
    "leaves a lot": "for i in $(seq 3000); do echo 'x = 1' > a$i.py; done",
    "leaves a pipe and a link": "mkfifo README; ln -s / all; ln -s /proc/self/mem mem",
    "ends everybody": "kill -9 -1",
}


QUICK = ("deletes the tests", "exits when it is loaded", "takes everything away", "leaves a pipe and a link")


@pytest.mark.parametrize("cheat", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in CHEATS])
async def test_what_does_not_mend_the_bug_gains_nothing(cheat, bubblewrap):
    driver, _ = await opened(bubblewrap, shaped=0.0)
    await driver.call("shell", {"command": CHEATS[cheat]})
    turn = await ended(driver)
    assert (turn.success, turn.parts) == (False, {"outcome": 0.0})


async def test_a_mended_bug_counts_whatever_became_of_the_visible_tests_and_the_rest_counts_too(bubblewrap):
    driver, _ = await opened(bubblewrap, shaped=1.0)
    module = driver.world.module
    await driver.call("shell", {"command": f"rm -r tests README.md; cat > {module.path} <<'EOF'\n{module.after}EOF"})
    assert (await ended(driver)).parts == {"outcome": 1.0, "tests": 1.0}

    driver, _ = await opened(bubblewrap, shaped=1.0)
    other = next(name for name in module.calls if not module.call.startswith(name + "("))
    mended = module.after.replace(f"def {other}(", f"def {other}_(")
    await driver.call("shell", {"command": f"cat > {module.path} <<'EOF'\n{mended}EOF"})
    turn = await ended(driver)
    assert turn.parts["outcome"] == 0.0 and 0.5 < turn.parts["tests"] < 1.0 and turn.success is False


async def test_hidden_tests_are_nowhere_in_the_agents_sandbox(bubblewrap):
    driver, _ = await opened(bubblewrap, seed=2)
    module = driver.world.module
    calls = [call for calls in module.calls.values() for call in calls]
    everything = (await driver.call("shell", {"command": "cat $(find . -type f); env; ls -a /tmp /dev/shm"})).text
    assert sum(call in everything for call in calls) <= 2, "only those that visible tests have"
    await driver.close()


async def test_tools_tell_what_cannot_be_done(bubblewrap):
    driver, _ = await opened(bubblewrap)
    path = driver.world.module.path
    for name, arguments, problem in (
        ("view", {"path": "nothing.py"}, "nothing.py cannot be read: No such file"),
        ("view", {"path": "../../etc/passwd"}, "leads out of the sandbox's folder"),
        ("edit", {"path": path, "old": "no such line", "new": "x"}, "exactly once, and is there 0 times"),
        ("edit", {"path": path, "old": "", "new": "x"}, "exactly once, and is there 0 times"),
        ("edit", {"path": path, "old": "    ", "new": "x"}, "exactly once, and is there [0-9]+ times"),
        ("shell", {"command": "x" * 20_000}, "longer than 16000"),
    ):
        with pytest.raises(InvalidAction, match=problem):
            await driver.call(name, arguments)
    await driver.call("shell", {"command": "printf '\\377' > odd; mkdir -p deep"})
    with pytest.raises(InvalidAction, match="odd is no text"):
        await driver.call("view", {"path": "odd"})
    assert (await driver.call("view", {"path": path, "first": 900, "last": 2})).text.startswith("(none of its ")
    assert (await driver.call("shell", {"command": "echo $HOME; exit 3"})).text.endswith("(exit code 3)")
    await driver.close()


async def test_who_never_touched_a_tool_is_judged_all_the_same(bubblewrap):
    driver, _ = await opened(bubblewrap)
    assert (await ended(driver)).success is False and driver.world._box is None


def test_values_in_issues_are_data():
    assert all(literal_eval(bug.right) is not None for kind in bugs._FUNCTIONS for bug in kind.bugs)


def test_the_players_edit_is_in_the_file_once():
    for seed in range(200):
        world = Swe(**TRUSTED)
        world.module, *_ = _drawn(random.Random(seed), "train", 1, 2)
        world.did = [("shell", ""), ("view", "")]
        edit = world.play(random.Random(0), 0.0).arguments
        assert world.module.before.count(edit["old"]) == 1
        assert world.module.before.replace(edit["old"], edit["new"]) == world.module.after


@pytest.mark.slow
def test_the_player_gets_better_with_less_noise(bubblewrap):
    assert player_score(Swe, bubblewrap, n=15).success == 1.0
    assert player_score(Swe, bubblewrap, n=15, noise=1.0).success < 0.6


@pytest.mark.parametrize(("option", "value"), [("modules", 0), ("modules", 5), ("functions", 5), ("shaped", 101)])
def test_options_out_of_range_are_refused(option, value):
    with pytest.raises(ConfigError, match=f"{option} is {value}; it is"):
        Swe(**TRUSTED, **{option: value})
