"""Messages to ids: which renderer a model gets, which are refused, and what is read out of sampled ids."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from troupe.actors import rendering
from troupe.actors.rendering import SMOLLM2_SYSTEM, Rendering
from troupe.actors.rendering.tokenizer import PlainTokenizer
from troupe.learner.tiny import make_tiny
from troupe.protocol.errors import ConfigError
from troupe.protocol.trajectory import ENVIRONMENT, TEMPLATE

SMOLLM2 = (
    "{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}{{ '<|im_start|>system\n"
    + SMOLLM2_SYSTEM
    + "<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + message['content'] + '<|im_end|>' + '\n'}}"
    "{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)
"""As the model ships it."""
STRIPPING = (
    "{% for m in messages %}[{{ m['role'] }}] {{ m['content'].split('</think>')[-1] if not loop.last else m['content'] }}"
    "<|im_end|>{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)
MERGING = (
    "{% for m in messages %}{% if m['role'] == 'tool' and not loop.first and messages[loop.index0 - 1]['role'] == 'tool' %}"
    " {{ m['content'] }}{% else %}[{{ m['role'] }}] {{ m['content'] }}{% endif %}"
    "{% if not (m['role'] == 'tool' and not loop.last and messages[loop.index0 + 1]['role'] == 'tool') %}<|im_end|>{% endif %}"
    "{% endfor %}{% if add_generation_prompt %}[assistant] {% endif %}"
)
CONVERSATION = [
    {"role": "system", "content": "Be kind."},
    {"role": "user", "content": "some words\n\n"},
    {"role": "assistant", "content": "that are"},
    {"role": "user", "content": "known 42"},
]


def model(folder: Path, template: str | None) -> str:
    make_tiny(folder, ["some words that are known"], hidden=16, layers=1, heads=2)
    file = folder / "tokenizer_config.json"
    settings = json.loads(file.read_text())
    settings["chat_template"] = template
    file.write_text(json.dumps(settings))
    return str(folder)


def ids(parts: list[Any]) -> list[int]:
    return [id_ for part in parts for id_ in part.ids]


def test_our_own_models_and_smollm2_are_chatml_token_for_token_as_their_templates_say(tmp_path):
    own = make_tiny(tmp_path / "own", ["some words that are known"], hidden=16, layers=1, heads=2)
    for folder in (str(own), model(tmp_path / "smol", SMOLLM2)):
        found, tokenizer = rendering.load(folder), PlainTokenizer(folder)
        assert found.name == "chatml"
        for conversation in (CONVERSATION, CONVERSATION[1:2], CONVERSATION[1:]):
            assert ids(found.opening(conversation)) == tokenizer.apply_chat_template(conversation, add_generation_prompt=True)
    assert SMOLLM2_SYSTEM in found.decode(ids(found.opening(CONVERSATION[1:])))


def test_a_template_of_no_family_that_only_appends_gets_the_generic_renderer(renderings):
    assert renderings["generic"].name == "generic"


@given(texts=st.lists(st.text("ab <>[]\n", max_size=8), min_size=2, max_size=4))
def test_the_generic_renderer_extends_as_the_template_would(renderings, texts):
    found: Rendering = renderings["generic"]
    asked = [{"role": "user", "content": texts[0]}]
    new = [{"role": "user", "content": text} for text in texts[1:]]
    said = "that are"
    prompt, sampled = ids(found.opening(asked)), [*found.encode(said), *found.stop_ids]
    parts = found.extension(prompt, sampled, new)
    assert parts is not None and [part.message for part in parts] == [*range(len(new)), -1]
    whole = ids(found.opening([*asked, {"role": "assistant", "content": said}, *new]))
    assert found.decode([*prompt, *sampled, *ids(parts)]) == found.decode(whole)


def test_a_template_that_writes_several_messages_together_makes_another_branch_not_a_false_prompt(tmp_path):
    """Consecutive tool results in one turn, as several families write them."""
    folder = model(tmp_path, MERGING)
    found = rendering.load(folder, "generic")
    asked = [{"role": "user", "content": "go"}]
    prompt, sampled = ids(found.opening(asked)), [*found.encode("words"), *found.stop_ids]
    one, two = {"role": "tool", "content": "a"}, {"role": "tool", "content": "b"}
    assert found.extension(prompt, sampled, [one]) is not None
    assert found.extension(prompt, sampled, [one, two]) is None
    whole = found.decode(ids(found.opening([*asked, {"role": "assistant", "content": "words"}, one, two])))
    assert whole == "[user] go<|im_end|>[assistant] words<|im_end|>[tool] a b<|im_end|>[assistant] "


def test_the_generic_renderer_says_whether_it_can_read_calls(renderings):
    assert not renderings["generic"].reads_calls and renderings["tiny"].reads_calls and renderings["qwen3"].reads_calls


def test_a_template_that_changes_the_past_is_refused_by_name(tmp_path):
    folder = model(tmp_path, STRIPPING)
    with pytest.raises(ConfigError, match=rf"chat template of '{folder}' cannot be trained with: a further .* turns '<think>"):
        rendering.load(folder)


@pytest.mark.parametrize(
    ("name", "problem"),
    [
        ("qwen", "no renderer 'qwen'. Did you mean 'qwen3'"),
        ("qwen3", "renderer 'qwen3' does not fit the tokenizer"),
        ("no_such_module:Renderer", "renderer 'no_such_module:Renderer' does not fit .* No module named"),
    ],
)
def test_a_renderer_that_does_not_exist_or_fit_is_refused_with_the_reason(tmp_path, name, problem):
    folder = str(make_tiny(tmp_path, ["x"], hidden=16, layers=1, heads=2))
    with pytest.raises(ConfigError, match=problem):
        rendering.load(folder, name)


def test_a_model_without_tokenizer_or_template_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no tokenizer\.json"):
        rendering.load(str(tmp_path / "empty"))
    with pytest.raises(ConfigError, match=r"no chat template: name one with model\.renderer"):
        rendering.load(model(tmp_path / "plain", None))
    assert rendering.load(str(tmp_path / "plain"), "chatml").name == "chatml"


def test_a_renderer_of_ones_own_is_named_by_module_and_class(tmp_path, monkeypatch):
    (tmp_path / "my_renderer.py").write_text(
        "from troupe.actors.rendering.chatml import ChatMLRenderer\nclass Mine(ChatMLRenderer):\n    pass\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "my_renderer", raising=False)
    folder = str(make_tiny(tmp_path / "model", ["x"], hidden=16, layers=1, heads=2))
    assert rendering.load(folder, "my_renderer:Mine").name == "my_renderer:Mine"


def test_every_id_of_a_message_is_its_text_or_scaffold(renderings):
    parts = renderings["tiny"].opening(CONVERSATION)
    assert [part.message for part in parts] == [0, 1, 2, 3, -1]
    said = [[i for i, p in zip(part.ids, part.provenance, strict=True) if p == ENVIRONMENT] for part in parts]
    assert [renderings["tiny"].decode(ids_) for ids_ in said[:2]] == ["Be kind.", "some words\n\n"]
    assert set(parts[-1].provenance) == {TEMPLATE}


@given(st.lists(st.integers(0, 264), max_size=30))
def test_whatever_was_sampled_is_read_without_an_error(renderings, sampled):
    for found in renderings.values():
        known = [id_ for id_ in sampled if id_ <= max(found.stop_ids)]
        said = found.parse(known)
        assert isinstance(said.text, str) and all(call.status in ("ok", "malformed", "truncated") for call in said.calls)


@pytest.mark.parametrize("name", ["tiny", "qwen3"])
def test_calls_are_typed_and_thoughts_are_kept_apart(renderings, name):
    found: Rendering = renderings[name]
    text = (
        '<think>\nhm <tool_call>no</tool_call>\n</think>\n\n<tool_call>\n{"name": "f", "arguments": {"x": [1]}}\n</tool_call>'
    )
    said = found.parse([*found.encode_marks(text), found.stop_ids[0]])
    assert (said.text, said.closed) == ("", True) and said.think.startswith("hm")
    (call,) = said.calls
    assert (call.name, call.arguments, call.status) == ("f", {"x": [1]}, "ok")


@pytest.mark.parametrize("name", ["tiny", "qwen3"])
def test_a_turn_that_ends_inside_its_thought_says_nothing_and_is_not_closed(renderings, name):
    said = renderings[name].parse(renderings[name].encode_marks("<think>\nhm"))
    assert (said.text, said.think, said.closed) == ("", "hm", False)


@given(text=st.text(max_size=30))
def test_guarded_text_decodes_to_itself_and_holds_no_mark(renderings, text):
    for found in renderings.values():
        for mark in ("<|im_end|>", "<think>", "</tool_call>"):
            encoded = found.encode(f"{mark}{text}{mark}{mark}")
            assert found.decode(encoded) == f"{mark}{text}{mark}{mark}".replace("\ufdd0", "\ufffd")
            assert not set(encoded) & set(found.stop_ids)


def test_a_teachers_turn_is_what_the_policy_would_sample(renderings):
    found: Rendering = renderings["tiny"]
    spoken = found.speech({"role": "assistant", "content": "<think>hm</think>words"})
    assert found.decode(spoken) == "<think>hm</think>words<|im_end|>"
    assert found.parse(spoken).think == "hm" and found.parse(spoken).text == "words"
