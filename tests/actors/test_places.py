"""Beginnings of conversations have the same number exactly if they say the same, whatever was asked in between."""

from __future__ import annotations

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from troupe.actors.places import Places
from troupe.actors.rendering import text_of

TOOLS = [None, [{"name": "add"}], [{"name": "add", "description": "Adds."}]]


def call(arguments: Any) -> dict[str, Any]:
    return {"id": "c", "type": "function", "function": {"name": "f", "arguments": arguments}}


MESSAGES: list[tuple[str, dict[str, Any]]] = [
    ("a", {"role": "user", "content": "a"}),
    ("a", {"role": "user", "content": " a\n"}),
    ("a", {"role": "user", "content": [{"type": "text", "text": "a"}]}),
    ("b", {"role": "user", "content": "b"}),
    ("said a", {"role": "assistant", "content": "a"}),
    ("said a", {"role": "assistant", "content": "a", "reasoning_content": "hm"}),
    ("called 1", {"role": "assistant", "content": "", "tool_calls": [call('{"x": 1, "y": 2}')]}),
    ("called 1", {"role": "assistant", "content": None, "tool_calls": [call('{"y":2,"x":1}')]}),
    ("called 1", {"role": "assistant", "content": "", "tool_calls": [call({"x": 1, "y": 2})]}),
    ("called true", {"role": "assistant", "content": "", "tool_calls": [call('{"x": true, "y": 2}')]}),
    ("called broken", {"role": "assistant", "content": "", "tool_calls": [call('{"x": 1')]}),
    ("answered", {"role": "tool", "content": "a", "tool_call_id": "c"}),
    ("answered another", {"role": "tool", "content": "a", "tool_call_id": "d"}),
]
"""What each means, and a message that says it."""


@given(
    asked=st.lists(
        st.tuples(
            st.sampled_from(["main", "other"]), st.sampled_from(range(3)), st.lists(st.sampled_from(MESSAGES), max_size=4)
        ),
        max_size=8,
    )
)
def test_beginnings_have_the_same_number_exactly_if_they_say_the_same(asked):
    places = Places()
    numbers: dict[str, int] = {}
    for agent, tools, said in asked:
        messages = [copy.deepcopy(message) for _, message in said]
        found, characters = places.of(agent, TOOLS[tools], messages)
        assert len(found) == len(said) + 1 and characters == sum(len(text_of(message)) for message in messages)
        for count, number in enumerate(found):
            meaning = json.dumps([agent, tools, [means for means, _ in said[:count]]])
            assert numbers.setdefault(meaning, number) == number
    assert len(set(numbers.values())) == len(numbers)


@given(moves=st.lists(st.tuples(st.sampled_from(["append", "pop", "change"]), st.sampled_from(MESSAGES)), max_size=12))
def test_a_conversation_that_is_changed_in_place_is_where_a_new_one_of_the_same_words_is(moves):
    places, messages = Places(), []
    for move, (_, message) in moves:
        if move == "append" or not messages:
            messages.append(copy.deepcopy(message))
        elif move == "pop":
            messages.pop()
        else:
            messages[len(messages) // 2].clear()
            messages[len(messages) // 2].update(copy.deepcopy(message))
        found, characters = places.of("main", None, messages)
        found = list(found)
        assert (found, characters) == places.of("main", None, copy.deepcopy(messages))
        places.of("main", None, [])  # forgets what it has seen
        assert (found, characters) == places.of("main", None, messages)


@pytest.mark.parametrize("change", [True, 1.0])
def test_what_python_calls_equal_and_json_does_not_is_noticed(change):
    messages = [{"role": "assistant", "content": "", "tool_calls": [call({"x": 1})]}]
    places = Places()
    (_, before), _ = places.of("main", None, messages)
    messages[0]["tool_calls"][0]["function"]["arguments"]["x"] = change
    (_, after), _ = places.of("main", None, messages)
    assert before != after


def test_a_turn_looks_into_no_message_that_was_seen_at_its_place(monkeypatch):
    looked = []
    real = Places.after
    monkeypatch.setattr(Places, "after", lambda self, place, message: looked.append(message) or real(self, place, message))
    places, messages = Places(), []
    for turn in range(20):
        messages += [{"role": "user", "content": f"{turn}"}, {"role": "tool", "content": [{"type": "text", "text": "x"}]}]
        looked.clear()
        places.of("main", None, messages)
        assert looked == messages[-2:]


def test_the_end_of_a_turn_is_where_the_conversation_that_goes_on_begins():
    places = Places()
    messages = [{"role": "user", "content": "a"}]
    found, _ = places.of("main", None, messages)
    end = places.after(found[-1], {"role": "assistant", "content": "b ", "reasoning_content": "thought"})
    messages += [{"role": "assistant", "content": "b"}, {"role": "user", "content": "c"}]
    assert places.of("main", None, messages)[0][2] == end
