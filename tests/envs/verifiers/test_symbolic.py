"""Mathematical equality, by a real child process that is killed if it hangs."""

import subprocess
import sys

import pytest

from troupe.envs.verifiers import Symbolic, math_child, symbolic
from troupe.protocol.errors import ConfigError, EnvironmentFailed, TaskFailed

pytest.importorskip("math_verify")


def test_answers_are_compared_by_what_they_mean():
    golden = [
        ("1/2", "It is 0.5", 1),
        (r"$\frac{1}{2}$", r"so \boxed{\frac{2}{4}}", 1),
        ("$x^2-1$", "$(x-1)(x+1)$", 1),
        (r"$\{1,2\}$", r"$\{2,1\}$", 1),
        ("3", "first 3, no: 4", 0),
        ("3", "4", 0),
        ("3", "I do not know", 0),
        ("3", "", 0),
        ("3", "\ud800 }{ \\frac{", 0),
    ]
    assert [(right, said, Symbolic(right, timeout_s=60)(said)) for right, said, _ in golden] == golden
    with pytest.raises(TaskFailed, match="nothing mathematical is in the right answer 'well'"):
        Symbolic("well", timeout_s=60)("3")


def verdicts(golden):
    return [(right, said, Symbolic(right, timeout_s=60)(said)) for right, said, _ in golden]


def test_latex_needs_no_marks():
    halves = (r"\frac12", "{1/2}", r"\dfrac{1}{2}", r"$\frac12$", r"so \frac12, I think", r"\(\frac12\)")
    golden = [
        *(("1/2", said, 1) for said in halves),
        ("-1/2", r"it is -\frac{1}{2}.", 1),
        (r"\sqrt{2}", r"\sqrt2", 1),
        (r"\sqrt{2}", "2", 0),
        ("24", "4!", 1),
        ("x^2-1", "(x-1)(x+1)", 1),
        ("2", "2x+1", 0),
        ("12", "$12 in all", 1),
        ("12", "12 (see a table)", 1),
        ("1234", "1,234", 1),
    ]
    assert verdicts(golden) == golden


def test_the_last_box_that_is_closed_is_the_answer():
    golden = [
        ("12", r"\boxed{13} \boxed{12}", 1),
        ("12", r"\boxed{12} \boxed{13}", 0),
        ("12", r"\boxed{12}, because 5 + 8 = 13", 1),
        ("12", r"\boxed{12} or \boxed{13", 1),
        ("1/2", r"$\boxed{\frac{1}{3}}$, no: \[\boxed{\frac{1}{2}}\]", 1),
        ("12", r"12, so \boxed{}", 0),
    ]
    assert verdicts(golden) == golden


def test_a_tuple_or_an_equation_is_not_its_member():
    golden = [
        *(("1/2", said, 0) for said in ("(0.5, 0.5)", "$(0.5, 0.5)$", "It is (0.5, 0.5).", "x = (0.5, 0.5)")),
        ("7", "(0.5, 7)", 0),
        ("(1/2, 7)", "(0.5, 7)", 1),
        ("(1, 2)", "so (2, 1)", 0),
        *(("1/2", said, 0) for said in ("1/3 = 1/2", "$1/3 = 1/2$", "so 1/3 = 2/3 = 1/2.", r"\boxed{1/3 = 1/2}")),
        ("13", "let $x$ be so; 12 = 13", 0),
        *(("1/2", said, 1) for said in ("2/4 = 1/2", "x = 1/2", r"\boxed{x = \frac12}", "1/4 + 1/4 = 1/2 in all")),
        (r"4\pi", r"A = \pi r^2 = 4\pi", 1),
        ("x = 3", "3", 1),
        ("x = 3", "x = 4", 0),
    ]
    assert verdicts(golden) == golden


@pytest.mark.parametrize(
    "hostile", ["(", "{", "1", "(1", "{x{y}", r"\boxed{", r"\[", "$", "1+", "((1)", "[(", "(1+1,", r"\frac", r"\{1", "- "]
)
def test_no_answer_takes_for_ever_to_be_marked(hostile):
    text = (hostile * 20_000)[:20_000]
    assert len(math_child.marked(text)) >= len(text) // 2


def test_what_does_not_end_or_dies_breaks_the_episode_and_not_the_next_question(monkeypatch, tmp_path):
    child = tmp_path / "child.py"
    child.write_text(
        "import json, sys, time\nprint('ready', flush=True)\n"
        "for line in sys.stdin:\n"
        "    said = json.loads(line)['answer']\n"
        "    if said == 'hang': time.sleep(60)\n"
        "    if said == 'die': sys.exit()\n"
        "    print(json.dumps('RuntimeError: no' if said == 'fail' else said == 'yes'), flush=True)\n"
    )
    symbolic._end()
    monkeypatch.setattr(symbolic, "_CHILD", child)
    try:
        assert Symbolic("1")("yes") == 1
        first = symbolic._child
        with pytest.raises(EnvironmentFailed, match=r"no verdict after 0\.2 s"):
            Symbolic("1", timeout_s=0.2)("hang")
        assert first._process.poll() is not None  # it does not go on
        with pytest.raises(EnvironmentFailed, match="has died"):
            Symbolic("1")("die")
        with pytest.raises(EnvironmentFailed, match="RuntimeError: no"):
            Symbolic("1")("fail")
        assert [Symbolic("1")("yes"), Symbolic("1")("no")] == [1, 0]
    finally:
        symbolic._end()


@pytest.mark.slow
def test_a_number_too_big_to_compute_is_ended_with_its_process():
    with pytest.raises(EnvironmentFailed, match="Symbolic: "):
        Symbolic("1", timeout_s=3)("$9^{9^{9^{9}}} + 1 - 9^{9^{9^{9}}}$")
    assert Symbolic("1", timeout_s=60)("1") == 1


@pytest.mark.slow
def test_a_process_that_ends_takes_its_child_with_it():
    program = "from troupe.envs.verifiers import Symbolic, symbolic as s; Symbolic('1')('1'); print(s._child._process.pid)"
    pid = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=120, check=True
    ).stdout.strip()
    assert pid not in subprocess.run(["ps", "-eo", "pid"], capture_output=True, text=True, check=True).stdout.split()


def test_the_package_that_is_missing_is_named(monkeypatch):
    monkeypatch.setattr(symbolic, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install 'troupe-rl\[math\]'"):
        Symbolic("1")
