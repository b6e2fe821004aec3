"""Messages ↔ token ids, one direction at a time: a sampled token is never rendered again (law 1).

A renderer only ever *adds* to a sequence: the opening of a message, its text, its end. It gives every id it adds a
provenance. Special tokens inside an observation are plain text: a world cannot forge the end of a turn.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

from troupe.protocol.errors import ConfigError
from troupe.protocol.trajectory import ENVIRONMENT, TEMPLATE

THINK, END_THINK = "<think>", "</think>"


@dataclass(slots=True)
class Parsed:
    """What the agent said. `text`: without the think block. `closed`: False if it ended inside the think block."""

    text: str
    think: str
    closed: bool


class ChatML:
    """`<|im_start|>role\\ntext<|im_end|>\\n`, the template of SmolLM2, Qwen and our own tiny models."""

    def __init__(self, folder: str) -> None:
        """`folder` holds tokenizer.json. Raises ConfigError if its tokenizer does not speak ChatML."""
        file = Path(folder) / "tokenizer.json"
        if not file.is_file():
            raise ConfigError(f"'{folder}' has no tokenizer.json: name a complete Hugging Face model folder")
        self._tokenizer: Tokenizer = Tokenizer.from_file(str(file))
        self._tokenizer.encode_special_tokens = True
        start, end = (self._tokenizer.token_to_id(t) for t in ("<|im_start|>", "<|im_end|>"))
        if start is None or end is None:
            raise ConfigError(f"the tokenizer in '{folder}' has no <|im_start|> and <|im_end|>: it is not a ChatML model")
        self._start, self._end = start, end
        self._newline = self.encode("\n")
        ids = {tag: self._tokenizer.token_to_id(tag) for tag in (THINK, END_THINK)}
        self._think: dict[str, int] = {tag: id_ for tag, id_ in ids.items() if id_ is not None}

    @property
    def stop_ids(self) -> list[int]:
        """Ids that end the agent's turn."""
        return [self._end]

    def encode(self, text: str) -> list[int]:
        """Plain text to ids; special tokens in it stay text."""
        return list(self._tokenizer.encode(text, add_special_tokens=False).ids)

    def decode(self, ids: list[int]) -> str:
        """Ids to text, special tokens shown. Bytes that are no UTF-8 become U+FFFD."""
        return str(self._tokenizer.decode(ids, skip_special_tokens=False))

    def message(self, role: str, text: str) -> tuple[list[int], list[int]]:
        """A whole message of somebody else: (ids, provenance)."""
        head = [self._start, *self.encode(f"{role}\n")]
        body = self.encode(text)
        tail = [self._end, *self._newline]
        return head + body + tail, [TEMPLATE] * len(head) + [ENVIRONMENT] * len(body) + [TEMPLATE] * len(tail)

    def opening(self) -> list[int]:
        """Scaffold after which the agent speaks."""
        return [self._start, *self.encode("assistant\n")]

    def closing(self, sampled: list[int]) -> list[int]:
        """Scaffold after the agent's turn: an inserted end if it did not say it itself, then the newline."""
        return list(self._newline) if sampled and sampled[-1] == self._end else [self._end, *self._newline]

    def speech(self, text: str) -> list[int]:
        """A teacher's turn as ids, its end included; think tags are the model's own tokens where it has them."""
        ids: list[int] = []
        rest = text
        while rest:
            at, tag = min(((rest.find(t), t) for t, i in self._think.items() if i is not None and t in rest), default=(-1, ""))
            if at < 0:
                ids += self.encode(rest)
                break
            ids += self.encode(rest[:at]) if at else []
            ids.append(self._think[tag])
            rest = rest[at + len(tag) :]
        return [*ids, self._end]

    def parse(self, sampled: list[int]) -> Parsed:
        """What was said, from the sampled ids."""
        said = self.decode(sampled[:-1] if sampled and sampled[-1] == self._end else sampled)
        if THINK not in said:
            return Parsed(said.strip(), "", True)
        before, _, inside = said.partition(THINK)
        think, closed, after = inside.partition(END_THINK)
        return Parsed((before + after).strip(), think.strip(), bool(closed))
