"""A policy small enough to learn on a laptop: its own tokenizer and the architecture of a small Llama, without weights.

Promises:
- the same corpus and sizes write the same bytes, on any machine; neither torch nor transformers is imported;
- any text encodes, and decodes to itself: what the corpus does not cover falls back to bytes;
- each word of the corpus, with and without a space before it, is one token (as far as `max_vocab` reaches); no token
  crosses a word's border; each digit is a token of its own;
- the folder loads with AutoTokenizer and AutoConfig; `learner.model.load` draws the weights from its seed.
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

SPECIAL_TOKENS = ("<|pad|>", "<|im_start|>", "<|im_end|>", "<think>", "</think>")
"""Their ids are 0 to 4."""

CHAT_TEMPLATE = (
    "{% for message in messages %}"
    "{{ '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}"
    "{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)
"""ChatML. Turns only append, so a rendered conversation is a prefix of its continuation."""

_SPACE = "Ġ"  # what a space is in the byte alphabet
_ROLES = ("system", "user", "assistant", "tool")


def make_tiny(
    folder: str | Path,
    corpus: Iterable[str],
    *,
    hidden: int = 128,
    layers: int = 4,
    heads: int = 4,
    mlp: int = 352,
    context: int = 2048,
    max_vocab: int = 2048,
) -> Path:
    """Writes tokenizer and config into `folder` (made if missing) and returns it.

    The defaults make 0.8 M parameters, and `hidden` more for each token of the vocabulary.
    corpus: texts with the words that deserve a token of their own. Raises ValueError if `hidden` is not a multiple of
    2 * `heads` (rotary embeddings need an even head size).
    """
    if hidden % (2 * heads):
        raise ValueError(f"hidden={hidden} must be a multiple of 2 * heads = {2 * heads}")
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    tokenizer = _tokenizer(corpus, max_vocab)
    tokenizer.save(str(target / "tokenizer.json"))
    ids = {token: tokenizer.token_to_id(token) for token in SPECIAL_TOKENS}
    _write(
        target / "tokenizer_config.json",
        {
            "tokenizer_class": "PreTrainedTokenizerFast",
            "eos_token": "<|im_end|>",
            "pad_token": "<|pad|>",
            "additional_special_tokens": ["<|im_start|>"],
            "clean_up_tokenization_spaces": False,
            "model_max_length": context,
            "chat_template": CHAT_TEMPLATE,
        },
    )
    _write(
        target / "config.json",
        {
            "architectures": ["LlamaForCausalLM"],
            "model_type": "llama",
            "vocab_size": tokenizer.get_vocab_size(),
            "hidden_size": hidden,
            "intermediate_size": mlp,
            "num_hidden_layers": layers,
            "num_attention_heads": heads,
            "num_key_value_heads": heads,
            "head_dim": hidden // heads,
            "hidden_act": "silu",
            "max_position_embeddings": context,
            "rms_norm_eps": 1e-5,
            "rope_theta": 10000.0,
            "initializer_range": 0.02,
            "attention_dropout": 0.0,
            "attention_bias": False,
            "mlp_bias": False,
            "tie_word_embeddings": True,
            "bos_token_id": None,
            "eos_token_id": ids["<|im_end|>"],
            "pad_token_id": ids["<|pad|>"],
            "dtype": "float32",
        },
    )
    _write(
        target / "generation_config.json",
        {"do_sample": True, "eos_token_id": ids["<|im_end|>"], "pad_token_id": ids["<|pad|>"]},
    )
    return target


def _tokenizer(corpus: Iterable[str], max_vocab: int) -> Tokenizer:
    # Each word is counted once however often it occurs: merges then depend on the set of words alone, in a fixed order.
    splitter = pre_tokenizers.Sequence(
        [pre_tokenizers.Digits(individual_digits=True), pre_tokenizers.ByteLevel(add_prefix_space=False)]
    )
    words = {word for text in (*corpus, *_ROLES, "\n") for word, _ in splitter.pre_tokenize_str(text)}
    words = {word.removeprefix(_SPACE) for word in words}
    words |= {_SPACE + word for word in words}
    tokenizer = Tokenizer(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=max_vocab,
        min_frequency=1,
        special_tokens=[AddedToken(token, special=True, normalized=False) for token in SPECIAL_TOKENS],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()  # the words are in the byte alphabet already, one a line
    tokenizer.train_from_iterator(sorted(words - {"", _SPACE}), trainer)
    tokenizer.pre_tokenizer = splitter
    tokenizer.decoder = decoders.ByteLevel()
    # the trainer makes all of them special; but thinking is part of what is said: decoding must not strip its marks
    content = json.loads(tokenizer.to_str())
    for token in content["added_tokens"]:
        token["special"] = token["content"].startswith("<|")
    return Tokenizer.from_str(json.dumps(content))


def _write(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
