"""Answers and forms of messages, scored by hand."""

import pytest

from troupe.envs.verifiers import F1, Exact, Format
from troupe.envs.verifiers.text import inside
from troupe.protocol.errors import ConfigError


def test_exact_is_one_for_any_accepted_answer_as_question_answering_compares():
    exact = Exact("The Inn at Ost", "Ost Inn")
    assert [exact("inn at  ost."), exact("OST INN"), exact("Ost"), exact("")] == [1, 1, 0, 0]
    assert [Exact("A b", normalise=False)(said) for said in ("A b", "a b")] == [1, 0]


def test_f1_is_the_best_over_the_accepted_answers():
    # said 3 words, right 2, shared 2: precision 2/3, recall 1, F1 0.8
    assert F1("red lamp", "vase")("a big red lamp") == pytest.approx(0.8)
    assert [F1("red lamp")("red lamp"), F1("red lamp")("vase"), F1("red lamp")("")] == [1, 0, 0]


@pytest.mark.parametrize(
    ("message", "score"),
    [
        ("<think>2 + 2</think> <answer>4</answer>", 1),
        (" <think>\n2 < 3\n</think>\n<answer>4</answer>\n", 1),
        ("<answer>4</answer><think>2 + 2</think>", 0),  # the other way round
        ("<think>2 + 2</think><answer>4", 0),  # not closed
        ("<think>2 + 2</think> so <answer>4</answer>", 0),  # something between
        ("<think>2 + 2</think><answer>4</answer> done", 0),
        ("<think> </think><answer>4</answer>", 0),  # nothing in it
        ("<think>a</think><answer>4</answer><answer>5</answer>", 0),
        ("<think><answer>5</answer></think><answer>4</answer>", 0),
        ("4", 0),
        ("", 0),
    ],
)
def test_a_message_has_the_form_if_it_is_these_tags_and_nothing_else(message, score):
    assert Format("think", "answer")(message) == score


def test_a_form_may_be_a_pattern_that_the_whole_message_matches():
    form = Format(pattern=r"-?\d+")
    assert [form("12"), form(" -3\n"), form("12 lamps")] == [1, 1, 0]
    for wrong in (
        lambda: Format(),
        lambda: Format("a", pattern="b"),
        lambda: Format(pattern="("),
        lambda: Exact(),
        lambda: F1(1),
    ):
        with pytest.raises(ConfigError):
            wrong()


def test_what_stands_in_the_last_tag_can_be_picked():
    assert inside("answer", "<answer>3</answer> no: <answer> 4 </answer>") == "4"
    assert inside("answer", "<answer>3") == inside("answer", "3</answer>") == ""
