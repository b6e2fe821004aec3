"""Any chat template that only ever appends: the fallback for models of no known family.

The template is opaque, so it is tried first: every way in which a conversation can go on must leave what was rendered
before as it was. A template that changes the past (drops old thoughts, moves a system text) is refused by name, because
under it the tokens that the agent sampled would not be those that it is trained on. Registered as "generic".
"""

from __future__ import annotations

from typing import Any, ClassVar, Literal

import renderers.base
from renderers import RenderedTokens, extract_message_tool_names, reject_assistant_in_extension
from renderers.configs import DefaultRendererConfig
from renderers.default import DefaultRenderer

from troupe.protocol.errors import ConfigError

_USER, _ASSISTANT = {"role": "user", "content": "one"}, {"role": "assistant", "content": "two"}
_BASE = [_USER, _ASSISTANT]
_THOUGHT = {"role": "assistant", "content": "<think>\nhm\n</think>\n\ntwo"}
_CALL = {
    "role": "assistant",
    "content": "",
    "tool_calls": [{"type": "function", "id": "call00000", "function": {"name": "f", "arguments": {"x": 1}}}],
}
_RESULT = {"role": "tool", "content": "three", "name": "f", "tool_call_id": "call00000"}
_SYSTEM = {"role": "system", "content": "zero"}
_TRIED: list[list[dict[str, Any]]] = [
    [_USER, _ASSISTANT, _USER, _ASSISTANT, _USER],
    [_USER, _THOUGHT, _USER, _THOUGHT, _USER],
    [_SYSTEM, _USER, _ASSISTANT, _USER],
    [_USER, _CALL, _RESULT, _ASSISTANT, _USER],
]


class GenericConfig(DefaultRendererConfig):  # type: ignore[misc]
    """Options of the template may be given as further fields."""

    name: Literal["generic"] = "generic"  # type: ignore[assignment]
    _internal_fields: ClassVar[frozenset[str]] = frozenset({"tool_parser", "reasoning_parser"})


class GenericRenderer(DefaultRenderer):  # type: ignore[misc]
    """See `renderers.Renderer`; its turns are extended by what the template adds to a conversation of two messages."""

    is_prefix_stable = True

    def __init__(self, tokenizer: Any, config: GenericConfig | None = None) -> None:
        """Raises ConfigError if the template changes what it has rendered, or does not show where a turn ends."""
        super().__init__(tokenizer, config or GenericConfig())
        for conversation in _TRIED:
            self._try(conversation)
        opened, whole = self._text([_USER], opening=True), self._text(_BASE)
        _, found, close = whole.removeprefix(opened).partition(_ASSISTANT["content"])
        if not found or not close:
            raise self._refused("it does not say where the assistant's turn ends")
        self._close = tokenizer.encode(close)

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
        close = self._close[1:] if previous_completion_ids[-1:] == self._close[:1] else self._close
        ids, indices = [*previous_prompt_ids, *previous_completion_ids, *close], list[int]()
        indices += [-1] * len(ids)
        before = self._text(_BASE, tools)
        for end in range(1, len(new_messages) + 1):
            last = end == len(new_messages)
            plain = self._text([*_BASE, *new_messages[:end]], tools)
            if not plain.startswith(before):  # it writes these messages together: they cannot be added one by one
                return None
            added = self._tokenizer.encode(plain.removeprefix(before))
            opening = self._text([*_BASE, *new_messages], tools, opening=True).removeprefix(plain) if last else ""
            opened = self._tokenizer.encode(opening) if opening else []
            ids += [*added, *opened]
            indices += [end - 1] * len(added) + [-1] * len(opened)
            before = plain
        return RenderedTokens(
            token_ids=ids,
            message_indices=indices,
            message_roles=[message.get("role") or "" for message in new_messages],
            message_tool_names=extract_message_tool_names(new_messages),
        )

    def _text(self, messages: list[Any], tools: list[Any] | None = None, opening: bool = False) -> str:
        return str(self._tokenizer.render_template(messages, tools, opening, **(self.config.model_extra or {})))

    def _try(self, conversation: list[Any]) -> None:
        try:
            whole = self._text(conversation)
        except ConfigError:
            return  # such conversations are refused when they come up: not every model has tools or a system role
        for end in range(1, len(conversation)):
            try:
                part = self._text(conversation[:end], opening=conversation[end]["role"] == "assistant")
            except ConfigError:
                continue
            if not whole.startswith(part):
                at = next((i for i, (a, b) in enumerate(zip(part, whole, strict=False)) if a != b), min(len(part), len(whole)))
                raise self._refused(
                    f"a further {conversation[end]['role']} message turns {part[at : at + 30]!r} into {whole[at : at + 30]!r}"
                )

    def _refused(self, why: str) -> ConfigError:
        return ConfigError(
            f"the chat template of '{self._tokenizer.name_or_path}' cannot be trained with: {why}. The next turn must extend "
            "the tokens that were sampled: name the model's family with model.renderer, or give a template that only appends"
        )


def register() -> None:
    """Makes "generic" known to `renderers.create_renderer`."""
    renderers.base._populate_registry()
    renderers.base.RENDERER_REGISTRY["generic"] = GenericRenderer
