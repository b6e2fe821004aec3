"""Text that was streamed never has to be taken back."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from troupe.actors import rendering
from troupe.actors.rendering import Rendering, until
from troupe.learner.tiny import make_tiny
from troupe.serve.gateway import Speech


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> Rendering:
    return rendering.load(str(make_tiny(tmp_path_factory.mktemp("model"), ["hello ab abc"], hidden=32, layers=1, heads=2)))


TEXT = st.text(st.sampled_from("ab c\né漢🙂"), max_size=30)


@given(text=TEXT, stops=st.lists(st.text(st.sampled_from("abcé🙂 "), min_size=1, max_size=4), max_size=3), data=st.data())
def test_the_pieces_make_up_the_text_before_the_first_stop_string(
    renderer: Rendering, text: str, stops: list[str], data: st.DataObject
) -> None:
    ids = renderer.encode(text)
    expected, _ = until(text, stops)
    speech, shown, told, stopped, at = Speech(renderer, stops, with_logprobs=True), "", [], False, 0
    while not stopped and at < len(ids):
        n = data.draw(st.integers(1, len(ids) - at))
        new, tokens, stopped = speech.hear(ids[at : at + n], [-1.0] * n, last=at + n == len(ids))
        at += n
        shown += new
        told += tokens
        assert expected.startswith(shown)
    assert shown == expected
    assert stopped == any(stop in text for stop in stops)
    if not stopped:
        assert len(told) == len(ids)
    elif expected.isascii():
        assert "".join(token for token, _ in told).startswith(expected)


def test_the_end_of_the_turn_is_counted_and_not_said(renderer: Rendering) -> None:
    speech = Speech(renderer, [], with_logprobs=True)
    ids = [*renderer.encode("hello"), *renderer.stop_ids]
    text, told, stopped = speech.hear(ids, [-1.0] * len(ids), last=True)
    assert (text, len(told), stopped, speech.sampled) == ("hello", len(ids) - 1, False, len(ids))


def test_what_may_become_a_stop_string_is_held_back_until_it_did_not(renderer: Rendering) -> None:
    speech = Speech(renderer, ["abc"], with_logprobs=False)

    def hear(text: str, *, last: bool = False) -> str:
        ids = renderer.encode(text)
        return speech.hear(ids, [-1.0] * len(ids), last=last)[0]

    assert hear("hello ab") == "hello "
    assert hear("a") == "ab"
    assert hear("", last=True) == "a"
