"""States are compared as JSON means them, and what differs is named by its path."""

import dataclasses
import math

import pytest

from troupe.envs.verifiers import StateMatch, differences
from troupe.protocol.errors import ConfigError, EnvironmentFailed


@dataclasses.dataclass
class Order:
    item: str
    done: bool = False


WANTED = {"orders": {"4711": {"item": "lamp", "done": True}}, "log": ["ask", "refund"]}


def test_a_state_matches_if_it_is_equal_as_json():
    match = StateMatch(WANTED)
    assert match({"log": ("ask", "refund"), "orders": {"4711": Order("lamp", True)}}) == 1
    assert match({"log": ["refund", "ask"], "orders": {"4711": Order("lamp", True)}}) == 0  # lists are in order
    assert StateMatch({"n": 1, "s": {"b", "a"}})({"n": 1.0, "s": {"a", "b"}}) == 1
    assert StateMatch({"n": 1})({"n": True}) == 0 and StateMatch(1)(1) == 1


def test_each_difference_is_named_by_its_path():
    found = {"orders": {"4711": {"item": "lamp", "done": False}, "4712": {"item": "vase"}}, "log": ["ask"]}
    assert differences(WANTED, found) == [
        "orders.4711.done: expected True, found False",
        "log[1]: missing, expected 'refund'",
        "orders.4712.item: not expected, found 'vase'",
    ]
    assert differences(WANTED, WANTED) == []
    assert differences(1, 2) == ["the state: expected 1, found 2"]


def test_empty_things_keys_with_dots_and_lists_are_not_taken_for_each_other():
    assert differences({"a": {}}, {"a": []}) == ["a: expected {}, found []"]
    assert differences({"a": {}}, {"a": {"b": 1}}) == ["a.b: not expected, found 1"]
    assert differences({"a": {"b": 1}}, {}) == ["a.b: missing, expected 1"]
    for one, other in (
        ({"a.b": 1}, {"a": {"b": 1}}),
        ({"a[0]": 1}, {"a": [1]}),
        ({"0": 1}, [1]),
        ({"a": 1, "b": None}, {"a": 1}),
    ):
        assert StateMatch(one)(other) == StateMatch(other)(one) == 0
        assert differences(one, other)


def test_partial_credit_is_the_share_of_right_leaves_and_none_where_there_is_too_much():
    match = StateMatch({"a": 1, "b": 2, "c": {"d": 3, "e": 4}}, partial=True)
    assert match({"a": 1, "b": 2, "c": {"d": 3, "e": 4}}) == 1
    assert match({"a": 1, "b": 0, "c": {"d": 3}}) == 0.5  # two of four
    assert match({"a": 1, "b": 2, "c": {"d": 3, "e": 4}, "f": 5}) == 0


def test_ignored_paths_do_not_count_in_either():
    match = StateMatch({"a": 1, "at": 5, "log": [1]}, ignore=("at", "log"))
    assert match({"a": 1}) == match({"a": 1, "at": 7, "log": [1, 2]}) == 1
    assert match({"a": 1, "atom": 7}) == 0


def test_what_is_no_json_is_an_error_of_whoever_gave_it():
    with pytest.raises(ConfigError, match="the expected state is no JSON"):
        StateMatch({"a": object()})
    with pytest.raises(EnvironmentFailed, match="the state is no JSON"):
        StateMatch({"a": 1})({"a": object()})
    assert StateMatch({"a": math.inf})({"a": math.inf}) == 1
