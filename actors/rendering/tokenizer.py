"""A fast tokenizer behind the small interface that `renderers` asks for, without importing transformers to encode.

Promises:
- marks of the tokenizer (special and other added tokens) in *guarded* text are encoded as plain text: the ids decode to
  the very same characters, and none of them is a mark's id, so a world cannot forge the end of a turn;
- in text that is not guarded (scaffold) marks are their own tokens, as in the chat template.

How: `guard` puts a character that means nothing (a Unicode noncharacter) inside each mark; `encode` cuts the text at
these characters and drops them. So the guarded text may pass through any renderer or Jinja template unharmed.
"""

from __future__ import annotations

import functools
import json
import re
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from troupe.protocol.errors import ConfigError

_CUT = "\ufdd0"
_SHORT = 16


class PlainTokenizer:
    """The tokenizer of a model folder. Satisfies `renderers.Tokenizer`, `OffsetTokenizer` and `ChatTemplateTokenizer`."""

    def __init__(self, folder: str) -> None:
        """Raises ConfigError if `folder` has no tokenizer.json."""
        file = Path(folder) / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(f"'{folder}' has no tokenizer.json: name a complete Hugging Face model folder")
        self.name_or_path = folder
        self._tokenizer: Tokenizer = Tokenizer.from_file(str(file))
        self._scaffold = functools.lru_cache(4096)(self._encode)  # the same few short texts hold every message together
        self._short = functools.lru_cache(4096)(self._decode)  # so are the moves of a game
        settings = _read(Path(folder) / "tokenizer_config.json")
        added = self._tokenizer.get_added_tokens_decoder().values()
        marks = sorted((token.content for token in added if len(token.content) > 1), key=len, reverse=True)
        special = sorted((t.content for t in added if t.special and len(t.content) > 1), key=len, reverse=True)
        self._marks, self._special = _any_of(marks), _any_of(special)
        self.all_special_tokens = special
        self.eos_token_id = self._id(settings.get("eos_token"))
        self.unk_token_id = self._id(settings.get("unk_token"))
        self.chat_template = settings.get("chat_template")
        self._texts = {key: _content(settings.get(key)) for key in ("bos_token", "eos_token", "pad_token", "unk_token")}
        template = Path(folder) / "chat_template.jinja"
        if template.is_file():
            self.chat_template = template.read_text(encoding="utf-8")

    def guard(self, text: str, *, special_only: bool = False) -> str:
        """`text` whose marks will be encoded as plain text. special_only: leave other added tokens (think tags) alone."""
        marks = self._special if special_only else self._marks
        text = text.replace(_CUT, "\ufffd")
        while marks is not None and marks.search(text):
            text = marks.sub(lambda found: found[0][0] + _CUT + found[0][1:], text)
        return text

    def encode(self, text: str, add_special_tokens: bool = False, **_: Any) -> list[int]:
        """Text to ids."""
        return [id_ for piece in text.split(_CUT) if piece for id_ in self._encoded(piece)[0]]

    def __call__(self, text: str, add_special_tokens: bool = False, **_: Any) -> dict[str, Any]:
        """`input_ids` and `offset_mapping`: the half-open span of characters in `text` that each id came from."""
        ids: list[int] = []
        offsets: list[tuple[int, int]] = []
        start = 0
        for piece in text.split(_CUT):
            found, spans = self._encoded(piece)
            ids += found
            offsets += [(start + a, start + b) for a, b in spans] if start else spans
            start += len(piece) + 1
        return {"input_ids": ids, "offset_mapping": offsets}

    def decode(self, token_ids: Any, skip_special_tokens: bool = False, **_: Any) -> str:
        """Ids to text, special tokens shown. Bytes that are no UTF-8 become U+FFFD."""
        ids = (token_ids,) if isinstance(token_ids, int) else tuple(token_ids)
        return (self._short if len(ids) <= _SHORT else self._decode)(ids, skip_special_tokens)

    def convert_tokens_to_ids(self, tokens: Any) -> Any:
        """The id of a token, or of each of several; the unknown token's (or None) for one that does not exist."""
        return self._id(tokens) if isinstance(tokens, str) else [self._id(token) for token in tokens]

    def render_template(self, messages: list[Any], tools: list[Any] | None, opening: bool, **options: Any) -> str:
        """What the model's own Jinja template makes of `messages`. Raises ConfigError if there is none or it refuses."""
        from jinja2.exceptions import TemplateError
        from transformers.utils.chat_template_utils import render_jinja_template

        if not isinstance(self.chat_template, str):
            raise ConfigError(f"the tokenizer in '{self.name_or_path}' has no chat template")
        try:
            values: dict[str, Any] = {**self._texts, **options, "tools": tools, "add_generation_prompt": opening}
            texts: Any = render_jinja_template([messages], chat_template=self.chat_template, **values)[0]
        except (TemplateError, TypeError, ValueError, KeyError) as error:
            raise ConfigError(f"the chat template of '{self.name_or_path}' refuses a conversation: {error}") from error
        return str(texts[0])

    def apply_chat_template(
        self, messages: list[Any], tools: list[Any] | None = None, add_generation_prompt: bool = False, **options: Any
    ) -> list[int]:
        """`render_template`, encoded."""
        options = {key: value for key, value in options.items() if key not in ("tokenize", "return_dict")}
        return self.encode(self.render_template(messages, tools, add_generation_prompt, **options))

    def _encoded(self, piece: str) -> tuple[list[int], list[tuple[int, int]]]:
        return self._scaffold(piece) if len(piece) <= _SHORT else self._encode(piece)

    def _encode(self, piece: str) -> tuple[list[int], list[tuple[int, int]]]:
        made = self._tokenizer.encode(piece, add_special_tokens=False)
        return made.ids, made.offsets

    def _decode(self, ids: tuple[int, ...], skip_special_tokens: bool) -> str:
        return str(self._tokenizer.decode(ids, skip_special_tokens=skip_special_tokens))

    def _id(self, token: Any) -> int | None:
        content = _content(token)
        found = self._tokenizer.token_to_id(content) if content else None
        return found if found is not None else getattr(self, "unk_token_id", None)


def _content(token: Any) -> str:
    """A token of tokenizer_config.json as text: it is a string, or an object with its content."""
    return str(token.get("content", "") if isinstance(token, dict) else token or "")


def _any_of(marks: list[str]) -> re.Pattern[str] | None:
    return re.compile("|".join(map(re.escape, marks))) if marks else None


def _read(file: Path) -> dict[str, Any]:
    try:
        found = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else {}
    except ValueError as error:
        raise ConfigError(f"'{file}' is not JSON: {error}") from error
    return found if isinstance(found, dict) else {}
