"""What a rendering remembers changes nothing: ids are the same as of one that has never been asked, and it has an end."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from troupe.actors import rendering
from troupe.actors.rendering import Rendering

TOOL = {"name": "add", "description": "Adds.", "parameters": {"type": "object", "properties": {}}}
TEXTS = st.text(max_size=20) | st.sampled_from(["", "\n", "\n\nx", "<|im_end|>", "a" * 1_001, "é 😀", " x "])
MESSAGES = st.lists(
    st.fixed_dictionaries({"role": st.sampled_from(["system", "user", "tool"]), "content": TEXTS}), min_size=1, max_size=4
)


def fresh(renderings: dict[str, Rendering], name: str = "tiny") -> Rendering:
    """One that remembers nothing."""
    found = renderings[name]
    return rendering.load.__wrapped__(found._tokenizer.name_or_path, found.name)


def told(parts: list[Any] | None) -> list[Any] | None:
    return None if parts is None else [(part.message, list(part.ids), list(part.provenance)) for part in parts]


@given(messages=MESSAGES)
def test_a_message_that_is_remembered_is_written_as_the_first_time(renderings, messages):
    used, new = renderings["tiny"], fresh(renderings)
    prompt, sampled = used.encode("some words"), used.encode("that are")
    for ends in (sampled, [*sampled, used.stop_ids[0]]):
        first, again = (told(used.extension(prompt, ends, messages)) for _ in range(2))
        assert first == again == told(new.extension(prompt, ends, messages))


@given(messages=MESSAGES)
def test_what_is_remembered_is_what_the_renderer_itself_would_add(renderings, messages):
    used = renderings["tiny"]
    prompt, sampled = used.encode("some words"), used.encode("that are")
    made = used._renderer.bridge_to_next_turn(prompt, sampled, used._guarded(messages), tools=None)
    added = [id_ for part in used.extension(prompt, sampled, messages) for id_ in part.ids]
    assert [*prompt, *sampled, *added] == made.token_ids


@pytest.mark.parametrize("name", ["tiny", "qwen3", "generic"])
def test_an_opening_is_remembered_with_its_tools_and_with_every_message(renderings, name):
    used = fresh(renderings, name)
    opening = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "some words"}]
    variants: list[tuple[list[Any], list[Any] | None]] = [
        (opening, None),
        (opening, [TOOL]),
        (opening[1:], None),
        ([opening[0], {"role": "user", "content": "other words"}], None),
        ([{"role": "user", "content": "Be kind."}, opening[1]], None),
    ]
    first = [told(used.opening(messages, tools)) for messages, tools in variants]
    assert first == [told(used.opening(messages, tools)) for messages, tools in variants]
    assert first == [told(fresh(renderings, name).opening(messages, tools)) for messages, tools in variants]
    assert len({str(one) for one in first}) == (len(variants) if used.reads_calls else len(variants) - 1)


def test_who_is_told_an_opening_may_add_to_it_without_changing_what_others_are_told(renderings):
    used = fresh(renderings)
    messages = [{"role": "user", "content": "some words"}]
    before = told(used.opening(messages))
    used.opening(messages).clear()
    assert told(used.opening(messages)) == before


def test_openings_that_never_come_again_are_forgotten_and_long_ones_never_kept(renderings):
    used = fresh(renderings)
    first = told(used.opening([{"role": "user", "content": "0"}]))
    for number in range(2 * rendering._OPENINGS):
        used.opening([{"role": "user", "content": f"{number}"}])
    assert len(used._opened) == rendering._OPENINGS
    assert told(used.opening([{"role": "user", "content": "0"}])) == first
    kept = list(used._opened)
    used.opening([{"role": "user", "content": "x " * rendering._LONGEST_OPENING}])
    used.opening([{"role": "user", "content": "0"}] * (rendering._OPENING + 1))
    assert list(used._opened) == kept


def test_messages_that_never_come_again_are_forgotten_and_long_ones_never_kept(renderings, monkeypatch):
    used = fresh(renderings)
    room = used._written.cache_info().maxsize
    sampled = [used.stop_ids[0]]
    for number in range(room + 10):
        used.extension([1], sampled, [{"role": "user", "content": f"{number}"}])
    assert used._written.cache_info().currsize == room
    missed = used._written.cache_info().misses
    used.extension([1], sampled, [{"role": "user", "content": "x" * (rendering._REPEATED + 1)}])
    assert used._written.cache_info().misses == missed


@given(text=TEXTS, ids=st.lists(st.integers(0, 250), max_size=20))
def test_a_tokenizer_that_remembers_says_what_it_said_first(renderings, text, ids):
    used, new = renderings["tiny"]._tokenizer, fresh(renderings)._tokenizer
    for _ in range(2):
        assert used.encode(text) == new.encode(text) and used(text) == new(text)
        for skip in (False, True):
            assert used.decode(ids, skip) == new._decode(tuple(ids), skip)
