"""What comes back from a world: as good as a Turn, or refused by name."""

import numpy as np
import pytest

from troupe.envs.base import Turn
from troupe.envs.returned import told, turn_from
from troupe.protocol.errors import EnvironmentFailed


def where():
    return "World.step"


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (None, "returned NoneType"),
        (Turn(b"bytes"), "Turn.text is bytes"),
        (Turn("x", reward=float("nan")), "Turn.reward is nan"),
        (Turn("x", reward=float("inf")), "Turn.reward is inf"),
        (Turn("x", reward="1"), "Turn.reward is '1'"),
        (Turn("x", reward=None), "Turn.reward is None"),
        (Turn("x", parts={"a": float("nan")}), "Turn.parts\\['a'\\] is nan"),
        (Turn("x", parts=[1]), "Turn.parts is list"),
        (Turn("x", done="False"), "Turn.done is 'False'"),
        (Turn("x", done=None), "Turn.done is None"),
        (Turn("x", truncated=2), "Turn.truncated is 2"),
        (Turn("x", done=np.ones(2)), "Turn.done is array"),
        (Turn("x", success="yes"), "Turn.success is 'yes'"),
    ],
)
def test_nonsense_is_a_failed_environment_and_never_a_reward(answer, reason):
    with pytest.raises(EnvironmentFailed, match=f"^World.step:? {reason}"):
        turn_from(answer, where)


def test_what_is_as_good_as_a_turn_becomes_one_of_plain_values():
    found = turn_from(Turn("x", np.float32(1), np.True_, np.False_, {"a": np.int64(2)}, 0), where)
    assert found == Turn("x", 1.0, True, False, {"a": 2.0}, False)
    values = (found.reward, found.done, found.success, found.parts["a"], found.truncated)
    assert [type(value) for value in values] == [float, bool, bool, float, bool]
    assert turn_from("only a text", where) == Turn("only a text")


def test_no_text_of_a_turn_has_half_a_surrogate_pair():
    assert turn_from("é \ud800", where).text == turn_from(Turn("é \ud800"), where).text == "é ?"
    assert turn_from(Turn("x", parts={"\ud800": 1}), where).parts == {"?": 1.0}


def test_an_error_says_what_it_can_and_not_more_than_a_few_lines():
    class Mute(Exception):
        def __str__(self):
            raise KeyError("mute")

    assert told(Mute()) == "(and cannot say what: KeyError)"
    assert told(ValueError("é \ud800")) == "é ?" and len(told(ValueError("x" * 10_000))) == 4_000
