"""Messages ↔ token ids, one direction at a time: a sampled token is never rendered again (law 1).

The work of each model family is done by the `renderers` package (and by `chatml.py` and `generic.py`, registered with
it); here its answers become what the recorder needs: which ids a message adds, and where each of them came from.
Promises:
- `extension` begins after the very ids that were fed and sampled, or is None: then the conversation is rendered anew
  and becomes another branch;
- what a message says is `ENVIRONMENT`, what holds it together is `TEMPLATE`; special tokens in it are plain text;
- tool calls are read from the sampled ids into typed calls, however broken they are; thoughts are kept apart.
"""

from __future__ import annotations

import functools
import json
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np

from troupe.actors.rendering.tokenizer import PlainTokenizer
from troupe.learner.reach import reach
from troupe.protocol.errors import ConfigError, nearest
from troupe.protocol.trajectory import ENVIRONMENT, TEMPLATE, CallStatus, Int32, UInt8

Message = dict[str, Any]
"""A message as OpenAI's clients write it: role, content, and where they apply tool_calls, tool_call_id, reasoning_content."""
Tool = dict[str, Any]
"""A tool as JSON schema: name, description, parameters."""
Ids = list[int] | Int32

SMOLLM2_SYSTEM = "You are a helpful AI assistant named SmolLM, trained by Hugging Face"


@dataclass(slots=True)
class Part:
    """What one message adds. message: its index, -1 for the scaffold after which the agent speaks. ids, provenance: shape [n],
    read-only, since they are remembered and given to all who are told the same."""

    message: int
    ids: Int32
    provenance: UInt8


@dataclass(slots=True)
class SaidCall:
    """A tool call as the agent wrote it. arguments: parsed JSON if it could be; raw: the text of the call."""

    name: str
    arguments: Any
    raw: str
    status: CallStatus
    problem: str = ""
    id: str = ""


@dataclass(slots=True)
class Said:
    """The agent's turn. text: without thoughts and calls. closed: False if it ended inside a thought."""

    text: str
    think: str
    calls: list[SaidCall]
    closed: bool


@runtime_checkable
class Appends(Protocol):
    """A renderer that writes a message in the same way wherever it stands, so that it need be written only once. May be
    offered beside what `renderers.Renderer` asks for, whose `bridge_to_next_turn` must then add the same ids."""

    def closing(self, last: int) -> list[int]:
        """What follows the agent's turn, whose last id that is."""

    def written(self, role: str, text: str) -> tuple[list[int], list[bool]]:
        """A whole message, not an agent's: its ids, and which of them say something."""

    def opens(self) -> list[int]:
        """What precedes the agent's turn."""


_REPEATED = 1_000
"""Characters of the longest text that is remembered as it was written: worlds repeat themselves."""
_OPENINGS, _OPENING, _LONGEST_OPENING = 256, 2, 50_000
"""Openings of that many messages and characters, tools included, are remembered: the members of a group open alike."""


class Rendering:
    """One model's way of writing conversations down."""

    def __init__(self, tokenizer: PlainTokenizer, renderer: Any, name: str, stop_ids: list[int]) -> None:
        self.name = name
        self.stop_ids = stop_ids
        """Ids that end the agent's turn."""
        self._tokenizer, self._renderer = tokenizer, renderer
        self._appends: Appends | None = renderer if isinstance(renderer, Appends) else None
        self._written = functools.lru_cache(4096)(self._write)
        self._opens = _scaffold(self._appends.opens() if self._appends else [])
        self._opened: dict[str, list[Part]] = {}

    def opening(self, messages: list[Message], tools: list[Tool] | None = None) -> list[Part]:
        """A whole conversation up to where the agent speaks: a part a message, then the opening."""
        key = repr((messages, tools)) if len(messages) <= _OPENING else ""
        parts = self._opened.get(key)
        if parts is None:
            made = self._renderer.render(self._guarded(messages), tools=self._described(tools), add_generation_prompt=True)
            parts = _parts(made, 0, len(messages))
            if 0 < len(key) <= _LONGEST_OPENING:
                if len(self._opened) >= _OPENINGS:
                    self._opened.pop(next(iter(self._opened)), None)
                self._opened[key] = parts
        return list(parts)

    def extension(self, prompt: Ids, sampled: Ids, new: list[Message], tools: list[Tool] | None = None) -> list[Part] | None:
        """What `new` messages add after a turn that was sampled; None if this renderer would change what came before."""
        if self._appends is not None:
            return self._appended(self._appends, int((sampled if len(sampled) else prompt)[-1]), new)
        fed, said = _listed(prompt), _listed(sampled)
        made = self._renderer.bridge_to_next_turn(fed, said, self._guarded(new), tools=self._described(tools))
        before = [*fed, *said]
        if made is None or made.token_ids[: len(before)] != before:
            return None
        return _parts(made, len(before), len(new))

    def speech(self, message: Message) -> list[int]:
        """A teacher's turn as the ids that the policy would sample, the end of the turn included."""
        asked = [{"role": "user", "content": "?"}, message]
        made = self._renderer.render(self._guarded(asked))
        if made.sampled_mask:
            return [id_ for id_, sampled in zip(made.token_ids, made.sampled_mask, strict=True) if sampled]
        opened = self._renderer.render_ids(asked[:1], add_generation_prompt=True)
        said: list[int] = made.token_ids[len(opened) :]
        ends = [at for at, id_ in enumerate(said) if id_ in self.stop_ids]
        return said[: ends[-1] + 1] if ends else said

    def parse(self, sampled: list[int], prompt: Ids | None = None, tools: list[Tool] | None = None) -> Said:
        """What was said."""
        spoken = sampled[:-1] if sampled and sampled[-1] in self.stop_ids else sampled
        fed = None if prompt is None or self._appends else _listed(prompt)
        try:
            found = self._renderer.parse_response(spoken, tools=_functions(tools), prompt_ids=fed)
        except (RecursionError, ValueError) as error:  # JSON that no parser takes: nested too deeply, numbers too long
            raw = self._tokenizer.decode(spoken)
            return Said("", "", [SaidCall("", None, raw, "malformed", f"the call cannot be read: {error}")], True)
        calls = [_said_call(call) for call in found.tool_calls]
        return Said(
            found.content.strip(), (found.reasoning_content or "").strip(), calls, found.reasoning_complete is not False
        )

    def encode(self, text: str) -> list[int]:
        """Plain text to ids; special tokens in it stay text."""
        return self._tokenizer.encode(self._tokenizer.guard(text))

    def encode_marks(self, text: str) -> list[int]:
        """Text to ids as an agent would write it: its special tokens mean what they say."""
        return self._tokenizer.encode(text)

    def decode(self, ids: list[int]) -> str:
        """Ids to text, special tokens shown. Bytes that are no UTF-8 become U+FFFD."""
        return self._tokenizer.decode(ids)

    @property
    def reads_calls(self) -> bool:
        """Whether tool calls are found in what the agent says."""
        return bool(getattr(self._renderer, "supports_tools", True))

    def _described(self, tools: list[Tool] | None) -> list[Tool] | None:
        described: list[Tool] | None = _each_text(_functions(tools), self._tokenizer.guard)
        return described

    def _guarded(self, messages: list[Message]) -> list[Message]:
        return [_guarded(message, self._tokenizer) for message in messages]

    def _appended(self, renderer: Appends, last: int, new: list[Message]) -> list[Part] | None:
        """See `extension`. An agent's message among the new ones was not sampled here: it would be written anew."""
        parts = []
        for index, message in enumerate(new):
            role, text = _role(message), _content(message)
            if role == "assistant":
                return None
            closing = () if index else tuple(renderer.closing(last))
            parts.append(Part(index, *(self._written if len(text) <= _REPEATED else self._write)(closing, role, text)))
        return [*parts, self._opens]

    def _write(self, closing: tuple[int, ...], role: str, text: str) -> tuple[Int32, UInt8]:
        """A message of that text, which may be hostile, and what closes the turn before it: ids and provenance."""
        assert self._appends is not None
        ids, says = self._appends.written(role, self._tokenizer.guard(text))
        marks = [ENVIRONMENT if one else TEMPLATE for one in says]
        return _fixed([*closing, *ids], np.int32), _fixed([*[TEMPLATE] * len(closing), *marks], np.uint8)


@functools.lru_cache(maxsize=16)
def load(folder: str, name: str = "auto") -> Rendering:
    """The rendering of the model in `folder`. It keeps no state, so all may share it.

    Raises ConfigError for an unknown name, and for a template that cannot be used.
    """
    import renderers.base

    from troupe.actors.rendering import chatml, generic

    chatml.register()
    generic.register()
    tokenizer = PlainTokenizer(folder)
    if name == "auto":
        name = _choose(tokenizer)
    if ":" in name or name in renderers.base.RENDERER_REGISTRY:
        renderer = _make(tokenizer, name)
    else:
        known = ["auto", *sorted(renderers.base.RENDERER_REGISTRY)]
        raise ConfigError(f"no renderer '{name}'.{nearest(name, known)} Known: {', '.join(known)}, or module:Class of your own")
    stop_ids = list(dict.fromkeys([*renderer.get_stop_token_ids(), *_ends(folder)]))
    if not stop_ids:
        raise ConfigError(
            f"the model in '{folder}' names no token that ends a turn: set eos_token in its tokenizer_config.json"
        )
    return Rendering(tokenizer, renderer, name, stop_ids)


def context_window(folder: str) -> int:
    """Tokens that the model in `folder` can see, by its config.json; 0 if it does not say."""
    path = Path(folder) / "config.json"
    found = json.loads(path.read_text(encoding="utf-8")) if path.is_file() else {}
    return reach(found) or 0


def text_of(message: Message) -> str:
    """The text of a message, whose content is a string, a list of parts, or nothing."""
    content = message.get("content")
    if isinstance(content, str):
        return content
    parts = content if isinstance(content, list) else []
    return "".join(part if isinstance(part, str) else str(part.get("text", "")) for part in parts)


def until(text: str, stops: list[str]) -> tuple[str, bool]:
    """`text` before the stop string that is complete first, and whether there is one. It was sampled, but is not said."""
    if not stops:
        return text, False
    found = [(at + len(stop), at) for stop in stops if (at := text.find(stop)) >= 0]
    return (text[: min(found)[1]], True) if found else (text, False)


# -- choosing --------------------------------------------------------------------------------------------------------

_PROBES: list[list[Message]] = [
    [{"role": "user", "content": "Hello there."}],
    [
        {"role": "system", "content": "Be brief."},
        {"role": "user", "content": "Hello there."},
        {"role": "assistant", "content": "Good day."},
        {"role": "user", "content": "And now?"},
    ],
]


def _choose(tokenizer: PlainTokenizer) -> str:
    """The renderer that writes what the model's own chat template writes; the model's name only decides who is asked first.

    A fine-tune keeps its family's renderer exactly as long as it keeps its template.
    """
    import renderers.base

    if not isinstance(tokenizer.chat_template, str):
        raise ConfigError(f"the tokenizer in '{tokenizer.name_or_path}' has no chat template: name one with model.renderer")
    base = Path(tokenizer.name_or_path).name.lower()
    named: set[str] = {
        name for model, name in renderers.base.MODEL_RENDERER_MAP.items() if model.split("/")[-1].lower() == base
    }
    others = [n for n in renderers.base.RENDERER_REGISTRY if n not in named and n not in ("default", "generic")]
    candidates: list[str] = [*sorted(named), "chatml", *others]
    for name in candidates:
        if _agrees(tokenizer, name):
            return name
    return "generic"


def _agrees(tokenizer: PlainTokenizer, name: str) -> bool:
    try:
        renderer = _make(tokenizer, name)
        return all(
            renderer.render_ids(probe, add_generation_prompt=True)
            == tokenizer.apply_chat_template(probe, add_generation_prompt=True)
            for probe in _PROBES
        )
    except Exception:  # a renderer of another family: it asks for tokens that this tokenizer has not
        return False


def _make(tokenizer: PlainTokenizer, name: str) -> Any:
    """A renderer by name. Raises ConfigError if it does not fit the tokenizer."""
    import renderers
    from renderers.configs import CustomRendererConfig, config_from_name

    from troupe.actors.rendering import chatml, generic

    try:
        if name == "chatml":
            names_smollm = SMOLLM2_SYSTEM in str(tokenizer.chat_template)
            config: Any = chatml.ChatMLConfig(default_system=SMOLLM2_SYSTEM if names_smollm else "")
        elif name == "generic":
            # Calls can be told apart where the template has them as tokens of their own, written as JSON.
            marks = tokenizer.convert_tokens_to_ids(["<tool_call>", "</tool_call>"])
            has_calls = "<tool_call>" in str(tokenizer.chat_template) and not {None, tokenizer.unk_token_id} & set(marks)
            config = generic.GenericConfig(tool_parser="qwen3" if has_calls else None)
        elif ":" in name:
            config = CustomRendererConfig(import_path=name)
        else:
            config = config_from_name(name)
        return renderers.create_renderer(tokenizer, config)
    except ConfigError:
        raise
    except Exception as error:
        reason = f"{type(error).__name__}: {error}" if str(error) else type(error).__name__
        raise ConfigError(f"renderer '{name}' does not fit the tokenizer in '{tokenizer.name_or_path}': {reason}") from error


def _ends(folder: str) -> list[int]:
    """All ids that end a turn by the model's own generation settings (secondary ones too)."""
    for file in ("generation_config.json", "config.json"):
        path = Path(folder) / file
        if path.is_file():
            found = json.loads(path.read_text(encoding="utf-8")).get("eos_token_id")
            if found is not None:
                return [found] if isinstance(found, int) else list(found)
    return []


# -- helpers ---------------------------------------------------------------------------------------------------------


def _functions(tools: list[Tool] | None) -> list[Tool] | None:
    return [{"type": "function", "function": tool.get("function") or tool} for tool in tools] if tools else None


def _guarded(message: Message, tokenizer: PlainTokenizer) -> Message:
    role, text = _role(message), _content(message)
    mine = role == "assistant"  # thoughts and calls of an agent are marks that mean something

    def guard(text: str) -> str:
        return tokenizer.guard(text, special_only=mine)

    kept: Message = _each_text({key: value for key, value in message.items() if key in _GUARDED}, guard)
    return {**message, **kept, "role": role, "content": guard(text)}


def _role(message: Message) -> str:
    role = str(message.get("role"))
    if (found := _ROLES.get(role)) is None:
        raise ConfigError(f"a message of role '{role}': roles are {', '.join(dict.fromkeys(_ROLES.values()))}")
    return found


def _content(message: Message) -> str:
    content = message.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list | None):
        raise ConfigError(f"the content of a message is {type(content).__name__}, not text")
    return text_of(message)


def _listed(ids: Ids) -> list[int]:
    found: list[int] = ids.tolist() if isinstance(ids, np.ndarray) else ids
    return found


_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant"}
_ROLES |= {"tool": "tool", "function": "tool"}
_GUARDED = ("tool_calls", "reasoning_content", "name")


def _each_text(value: Any, change: Callable[[str], str]) -> Any:
    """`value`, which is made of dicts and lists, with each text in it changed."""
    if isinstance(value, str):
        return change(value)
    if isinstance(value, dict):
        return {change(key) if isinstance(key, str) else key: _each_text(item, change) for key, item in value.items()}
    return [_each_text(item, change) for item in value] if isinstance(value, list) else value


def _parts(made: Any, start: int, count: int) -> list[Part]:
    """The ids from `start` on, by message; ids of no message go with the one before them, those at the end open the turn."""
    ids: list[list[int]] = [[] for _ in range(count + 1)]  # the last are those that open the turn
    marks: list[list[int]] = [[] for _ in range(count + 1)]
    indices = made.message_indices[start:]
    content = made.is_content[start:] if made.is_content else [index >= 0 for index in indices]
    last = max((at for at, index in enumerate(indices) if index >= 0), default=-1)
    current = 0
    for at, (id_, index, says) in enumerate(zip(made.token_ids[start:], indices, content, strict=True)):
        current = max(current, index)
        part = current if at <= last and count else count
        ids[part].append(id_)
        marks[part].append(ENVIRONMENT if says else TEMPLATE)
    numbers = [*range(count), -1]
    return [Part(n, _fixed(i, np.int32), _fixed(m, np.uint8)) for n, i, m in zip(numbers, ids, marks, strict=True)]


def _scaffold(ids: list[int]) -> Part:
    return Part(-1, _fixed(ids, np.int32), _fixed([TEMPLATE] * len(ids), np.uint8))


def _fixed(values: list[int], dtype: Any) -> Any:
    array = np.array(values, dtype)
    array.flags.writeable = False
    return array


_STATUS: dict[str, tuple[CallStatus, str]] = {
    "invalid_json": ("malformed", "the call is not valid JSON"),
    "unclosed_block": ("malformed", "the call has no end"),
    "missing_name": ("malformed", "the call does not name a tool"),
    "malformed_structure": ("malformed", "the call is not an object with a name and arguments"),
    "unknown_tool": ("unknown_tool", ""),
}


def _said_call(call: Any) -> SaidCall:
    status, problem = _STATUS.get(str(call.status), ("ok", ""))
    arguments = call.arguments
    if status == "ok" and isinstance(arguments, str):
        try:
            arguments = json.loads(arguments)
        except (ValueError, RecursionError):
            status, problem = "malformed", "the arguments are not valid JSON"
    if status == "ok" and not isinstance(arguments, dict):
        kind = re.sub("^a NoneType$", "null", f"a {type(arguments).__name__}")
        status, problem = "malformed", f"the arguments are {kind}, not an object"
    if status == "malformed" and str(call.status) == "unclosed_block":
        status = "truncated"
    name = (call.name or "").encode("utf-8", "replace").decode()  # JSON can smuggle in half a surrogate pair
    return SaidCall(name, arguments, call.raw, status, problem, call.id or "")
