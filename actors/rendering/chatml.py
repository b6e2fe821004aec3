"""ChatML for the models that `renderers` does not know: our own tiny ones and SmolLM2.

`<|im_start|>role\\ntext<|im_end|>\\n`, with tools and calls as Hermes writes them. Turns only append: a conversation that
was rendered is a prefix of its continuation, thoughts included, so the next turn always extends the sampled stream.
Registered with `renderers` as "chatml".
"""

from __future__ import annotations

import json
import re
from typing import Any, ClassVar, Literal

import renderers.base
from renderers import (
    ParsedResponse,
    ParsedToolCall,
    RenderedTokens,
    ToolCallParseStatus,
    extract_message_tool_names,
    reject_assistant_in_extension,
)
from renderers.configs import BaseRendererConfig

from troupe.actors.rendering import text_of
from troupe.protocol.errors import ConfigError

THINK, END_THINK = "<think>", "</think>"
_CALL = re.compile(r"<tool_call>(.*?)(</tool_call>|\Z)", re.DOTALL)

_TOOLS = """You can call tools. They are described by JSON schemas:
<tools>
{tools}
</tools>
To call one, write
<tool_call>
{{"name": "the tool's name", "arguments": {{"argument": "value"}}}}
</tool_call>
Several calls may follow each other in one message."""


class ChatMLConfig(BaseRendererConfig):  # type: ignore[misc]
    """default_system: what a conversation without a system message begins with; empty: nothing."""

    name: Literal["chatml"] = "chatml"
    default_system: str = ""
    _template_fields: ClassVar[frozenset[str]] = frozenset()
    _internal_fields: ClassVar[frozenset[str]] = frozenset({"default_system"})


class ChatMLRenderer:
    """See `renderers.Renderer`, whose contract this implements."""

    config_class = ChatMLConfig
    is_prefix_stable = True

    def __init__(self, tokenizer: Any, config: ChatMLConfig | None = None) -> None:
        """Raises ConfigError if the tokenizer has not ChatML's two marks."""
        self.config = config or ChatMLConfig()
        self._tokenizer = tokenizer
        ids = [tokenizer.convert_tokens_to_ids(mark) for mark in ("<|im_start|>", "<|im_end|>")]
        if None in ids or tokenizer.unk_token_id in ids:
            raise ConfigError(
                f"the tokenizer in '{tokenizer.name_or_path}' has no <|im_start|> and <|im_end|>: it is not a ChatML model"
            )
        self._start, self._end = ids
        self._newline = tokenizer.encode("\n")
        self._agent = tokenizer.encode("assistant\n")
        self._opening = [self._start, *self._agent]

    def render(
        self, messages: list[Any], *, tools: list[Any] | None = None, add_generation_prompt: bool = False
    ) -> RenderedTokens:
        made = RenderedTokens(
            message_roles=[message.get("role") or "" for message in messages],
            message_tool_names=extract_message_tool_names(messages),
        )
        first = messages[0] if messages else {}
        has_system = first.get("role") == "system"
        head = [text_of(first) if has_system else self.config.default_system] + [_described(tools)] * bool(tools)
        system = "\n\n".join(part for part in head if part)
        if not has_system and system:
            self._add(made, -1, "system", system)
        for index, message in enumerate(messages):
            self._add(made, index, message.get("role") or "", system if has_system and index == 0 else _spoken(message))
        if add_generation_prompt:
            self._emit(made, -1, self._opening)
        return made

    def render_ids(self, messages: list[Any], **options: Any) -> list[int]:
        ids: list[int] = self.render(messages, **options).token_ids
        return ids

    def bridge_to_next_turn(
        self,
        previous_prompt_ids: list[int],
        previous_completion_ids: list[int],
        new_messages: list[Any],
        *,
        tools: list[Any] | None = None,
    ) -> RenderedTokens | None:
        if not new_messages or reject_assistant_in_extension(new_messages):
            return None
        made = RenderedTokens(
            message_roles=[message.get("role") or "" for message in new_messages],
            message_tool_names=extract_message_tool_names(new_messages),
        )
        before = [*previous_prompt_ids, *previous_completion_ids]
        self._emit(made, -1, [*before, *self.closing(before[-1] if before else -1)])
        for index, message in enumerate(new_messages):
            self._add(made, index, message.get("role") or "", text_of(message))
        self._emit(made, -1, self._opening)
        return made

    def parse_response(
        self, token_ids: list[int], *, tools: list[Any] | None = None, prompt_ids: list[int] | None = None
    ) -> ParsedResponse:
        said = self._tokenizer.decode(token_ids[:-1] if token_ids[-1:] == [self._end] else token_ids)
        thoughts, complete = None, True
        if "<" not in said:
            return ParsedResponse(said)
        if THINK in said:
            before, _, inside = said.partition(THINK)
            thoughts, closed, after = inside.partition(END_THINK)
            said, complete = before + after, bool(closed)
        calls = [_call(found[1], closed=bool(found[2])) for found in _CALL.finditer(said)]
        return ParsedResponse(_CALL.sub("", said), thoughts, calls, complete)

    def get_stop_token_ids(self) -> list[int]:
        return [self._end]

    # -- what is the same wherever it stands (see `rendering.Appends`) --------------------------------------------------

    def closing(self, last: int) -> list[int]:
        return self._newline if last == self._end else [self._end, *self._newline]

    def written(self, role: str, text: str) -> tuple[list[int], list[bool]]:
        head, made = len(role) + 1, self._tokenizer(f"{role}\n{text}")  # in one piece: tokens may cross the newline
        ids = [self._start, *made["input_ids"], self._end, *self._newline]
        says = [begin >= head for begin, _ in made["offset_mapping"]]
        return ids, [False, *says, False, *[False] * len(self._newline)]

    def opens(self) -> list[int]:
        return self._opening

    # -- building ----------------------------------------------------------------------------------------------------

    def _add(self, made: RenderedTokens, index: int, role: str, text: str) -> None:
        """A whole message. What an assistant would have sampled is marked so: its text and the end of its turn."""
        if role != "assistant":
            self._emit(made, index, *self.written(role, text))
            return
        self._emit(made, index, self._opening)  # the agent begins to speak after the newline: no token crosses it
        ids = self._tokenizer.encode(text) if text else []
        self._emit(made, index, [*ids, self._end], [True] * (len(ids) + 1), sampled=True)
        self._emit(made, index, self._newline)

    def _emit(
        self, made: RenderedTokens, index: int, ids: list[int], content: list[bool] | None = None, sampled: bool = False
    ) -> None:
        made.token_ids += ids
        made.message_indices += [index] * len(ids)
        made.sampled_mask += [sampled] * len(ids)
        made.is_content += content or [False] * len(ids)


def _spoken(message: Any) -> str:
    """What an agent would have written to say this message, calls and thoughts included."""
    text = text_of(message)
    if thoughts := message.get("reasoning_content"):
        text = f"{THINK}{thoughts}{END_THINK}{text}"
    for call in message.get("tool_calls") or []:
        function = call.get("function") or call
        arguments = function.get("arguments", {})
        arguments = arguments if isinstance(arguments, str) else json.dumps(arguments, ensure_ascii=False)
        body = f'{{"name": {json.dumps(function.get("name", ""), ensure_ascii=False)}, "arguments": {arguments}}}'
        text += f"{chr(10) if text else ''}<tool_call>\n{body}\n</tool_call>"
    return text


def _described(tools: list[Any] | None) -> str:
    functions = [json.dumps(tool.get("function") or tool, ensure_ascii=False) for tool in tools or []]
    return _TOOLS.format(tools="\n".join(functions))


def _call(raw: str, *, closed: bool) -> ParsedToolCall:
    raw = raw.strip()
    if not closed:
        return ParsedToolCall(raw, status=ToolCallParseStatus.UNCLOSED_BLOCK)
    try:
        body = json.loads(raw)
    except (ValueError, RecursionError):
        return ParsedToolCall(raw, status=ToolCallParseStatus.INVALID_JSON)
    if not isinstance(body, dict):
        return ParsedToolCall(raw, status=ToolCallParseStatus.MALFORMED_STRUCTURE)
    name = body.get("name")
    if not isinstance(name, str) or not name:
        return ParsedToolCall(raw, arguments=body.get("arguments"), status=ToolCallParseStatus.MISSING_NAME)
    return ParsedToolCall(raw, name, body.get("arguments", {}))


def register() -> None:
    """Makes "chatml" known to `renderers.create_renderer`. (Its own renderers come first: it fills an empty registry only.)"""
    renderers.base._populate_registry()
    renderers.base.RENDERER_REGISTRY["chatml"] = ChatMLRenderer
