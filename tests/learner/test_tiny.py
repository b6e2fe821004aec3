"""The recipe's own tokenizer and model folder."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from troupe.learner.tiny import SPECIAL_TOKENS, make_tiny

CORPUS = ["You slipped on the ice, moved 12 cells.", "The goal is below: go down\n<think> why </think> down"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny(tmp_path_factory.mktemp("tiny"), CORPUS)


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_file(str(folder / "tokenizer.json"))


@settings(deadline=None)
@given(text=st.text())
def test_any_text_comes_back(tokenizer: Tokenizer, text: str) -> None:
    assert tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False) == text


@pytest.mark.parametrize("word", ["slipped", " slipped", "ice", " ice", "The", "the", " goal", "goal", "down", "assistant"])
def test_a_word_of_the_corpus_is_one_token(tokenizer: Tokenizer, word: str) -> None:
    assert len(tokenizer.encode(word).ids) == 1


def test_tokens_do_not_cross_words_and_digits_stand_alone(tokenizer: Tokenizer) -> None:
    assert [tokenizer.decode([i]) for i in tokenizer.encode("go down 12").ids] == ["go", " down", " ", "1", "2"]


def test_special_tokens_are_single_and_first(tokenizer: Tokenizer) -> None:
    assert [tokenizer.encode(t).ids for t in SPECIAL_TOKENS] == [[0], [1], [2], [3], [4]]
    assert tokenizer.decode(tokenizer.encode("<think> x </think>").ids) == "<think> x </think>"


def test_the_same_corpus_writes_the_same_bytes_without_torch(folder: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from troupe.learner.tiny import make_tiny; make_tiny(sys.argv[1], sys.argv[2:]);"
        "assert not {'torch', 'transformers'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code, str(tmp_path / "again"), *CORPUS], check=True)
    mine, other = ({f.name: f.read_bytes() for f in p.iterdir()} for p in (folder, tmp_path / "again"))
    assert mine == other


def test_transformers_reads_the_folder(folder: Path, tokenizer: Tokenizer) -> None:
    from transformers import AutoConfig, AutoTokenizer

    config, loaded = AutoConfig.from_pretrained(folder), AutoTokenizer.from_pretrained(folder)
    assert config.vocab_size == len(loaded) == tokenizer.get_vocab_size()
    assert (loaded.eos_token, loaded.pad_token) == ("<|im_end|>", "<|pad|>")
    messages = [{"role": "user", "content": "go 12 é"}]
    text = loaded.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert text == "<|im_start|>user\ngo 12 é<|im_end|>\n<|im_start|>assistant\n"
    assert loaded(text)["input_ids"] == tokenizer.encode(text).ids


def test_the_default_model_has_about_a_million_parameters(folder: Path) -> None:
    from troupe.learner.config import ModelConfig
    from troupe.learner.model import load

    assert 0.8e6 < sum(p.numel() for p in load(ModelConfig(path=str(folder)), seed=0).parameters()) < 1.0e6
