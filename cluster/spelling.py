"""Token ids as text: the bytes that each stands for, and nothing that a terminal would take for a command.

Promises: what is spelled is exact for byte-level tokenizers; a character of several tokens is never torn; control characters
and the marks of `troupe trace` come out spelled, so no content can forge either.
"""

from __future__ import annotations

import codecs
import re
from collections.abc import Callable, Iterator
from pathlib import Path

from tokenizers import Tokenizer

from troupe.actors.learner import checkpoints
from troupe.cluster.run import Run
from troupe.protocol.errors import ConfigError

Spell = Callable[[int], bytes | None]
"""The bytes that a token id stands for, None if nobody knows."""


def speller(run: Run) -> tuple[Spell | None, str]:
    """How to spell the run's token ids; without its tokenizer None, and why."""
    folder, why = _model_folder(run)
    saved = [Path(path) / "model" for _, path in reversed(checkpoints(str(run.path / "checkpoints")))]
    for file in (path / "tokenizer.json" for path in (folder, *saved) if path):
        try:
            return spelling(Tokenizer.from_file(str(file))), ""
        except Exception as error:  # the library raises nothing narrower
            why = why or f"'{file}' cannot be read: {str(error).splitlines()[0]}"
    return None, f"no tokenizer, so token ids are shown instead of their text ({why or 'the run has no model folder'})"


def _model_folder(run: Run) -> tuple[Path | None, str]:
    """Where `launch.prepare_model` finds or makes the run's model."""
    model = run.config().get("model")
    named = model.get("path") if isinstance(model, dict) else ""
    if not named:
        return run.path / "model", ""
    from troupe.cluster.models import resolve

    try:
        return resolve(str(named)), ""
    except ConfigError as error:
        return None, str(error)


def spelling(tokenizer: Tokenizer) -> Spell:
    """The bytes of each id, exact for byte-level tokenizers; for others, of which a byte fallback is known, nearly so
    (SentencePiece drops the first space of a text). A token may be part of a character: only joined bytes are text."""
    byte_level = tokenizer.decoder is not None and tokenizer.decoder.decode(["Ġ"]) == " "
    known: dict[int, bytes | None] = {}

    def spell(id_: int) -> bytes | None:
        if id_ not in known:
            token = tokenizer.id_to_token(id_)
            known[id_] = None if token is None else _byte_level(token) if byte_level else _sentence_piece(token)
        return known[id_]

    return spell


def _byte_level(token: str) -> bytes:
    try:
        return bytes(_ALPHABET[char] for char in token)
    except KeyError:  # an added token, written as it is
        return token.encode()


def _sentence_piece(token: str) -> bytes:
    byte = re.fullmatch(r"<0x([0-9A-F]{2})>", token)
    return bytes.fromhex(byte[1]) if byte else token.replace("▁", " ").encode()


def _alphabet() -> dict[str, int]:
    """GPT-2's: printable bytes stand for themselves, the others for the characters from 256 on."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = (byte for byte in range(0x100) if byte not in plain)
    return {chr(byte): byte for byte in plain} | {chr(0x100 + n): byte for n, byte in enumerate(others)}


_ALPHABET = _alphabet()


def harmless(text: str, keep: str = "\n\t") -> str:
    """`text` with all that is not plainly printable, and our own marks, spelled out: an escape becomes `\\x1b`."""
    if text.isprintable() and not _FORGED.search(text):
        return text
    return "".join(
        char if char in keep or (char.isprintable() and not _FORGED.match(char)) else char.encode("unicode_escape").decode()
        for char in text
    )


_FORGED = re.compile("[⟦⟧⟨⟩]")


def piece(id_: int, spell: Spell | None) -> str:
    """One token on one line: spaces as ·, newlines as ⏎, bytes that are only part of a character as \\xNN."""
    spelled = spell(id_) if spell else None
    if spelled is None:
        return f"‹{id_}›"
    return harmless(spelled.decode("utf-8", "backslashreplace")).replace(" ", "·").replace("\n", "⏎").replace("\t", "⇥")


def decoded(ids: list[int], spell: Spell | None) -> Iterator[str]:
    """What each token adds to the text. A character of several tokens comes with its last; broken ones become U+FFFD."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    for place, id_ in enumerate(ids, 1):
        spelled = spell(id_) if spell else None
        if spelled is None:
            yield f"{decoder.decode(b'', True)}‹{id_}›"
        else:
            yield decoder.decode(spelled, place == len(ids))
