"""What OpenAI's clients say and expect to hear: requests checked, answers and errors in their shapes.

Source: the Chat Completions reference of OpenAI. Promises:
- fields that we do not know are ignored, as clients send many; a known field of a wrong type or range is a 400 that names it;
- what we know and cannot do (`top_logprobs` above 0, images, a forced tool, JSON mode) is refused, never silently left out.
"""

from __future__ import annotations

import json
import time
import uuid
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator

from troupe.actors.rendering import Message, Rendering, SaidCall, Tool

MAX_CHOICES = 64
MAX_STOPS = 16


class _Ignoring(BaseModel):
    model_config = ConfigDict(extra="ignore")


def _text(content: Any) -> Any:
    """Content is a string, null (an assistant's turn of tool calls only) or a list of text parts."""
    if content is None:
        return ""
    if isinstance(content, list):
        for part in content:
            if not isinstance(part, dict) or part.get("type") not in ("text", "refusal"):
                kind = part.get("type") if isinstance(part, dict) else type(part).__name__
                raise ValueError(f"this policy reads text only, not a content part of type {kind!r}")
        content = "".join(str(part.get(part["type"], "")) for part in content)
    if isinstance(content, str):
        try:
            content.encode()
        except UnicodeEncodeError as error:
            raise ValueError(f"not valid Unicode at character {error.start}: half of a surrogate pair") from error
    return content


class CalledFunction(_Ignoring):
    """What a turn called. arguments: JSON text."""

    name: str
    arguments: str = "{}"


class ToolCall(_Ignoring):
    """A tool call of the policy's own earlier turn."""

    id: str = ""
    type: Literal["function"] = "function"
    function: CalledFunction


class Function(_Ignoring):
    """A function that the policy may call. parameters: JSON schema."""

    name: str = Field(min_length=1)
    description: str = ""
    parameters: dict[str, Any] = Field(default_factory=lambda: {"type": "object", "properties": {}})


class ToolSpec(_Ignoring):
    type: Literal["function"] = "function"
    function: Function


class ResponseFormat(_Ignoring):
    """Only text: this policy's sampling is not constrained by a grammar."""

    type: Literal["text"]


class ChatMessage(_Ignoring):
    """One message of the conversation so far."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Annotated[str, BeforeValidator(_text)] = ""
    tool_calls: list[ToolCall] | None = None
    tool_call_id: str | None = None
    name: str | None = None

    @model_validator(mode="after")
    def _says_something(self) -> ChatMessage:
        if self.role != "assistant" and "content" not in self.model_fields_set:
            raise ValueError(f"a message of role '{self.role}' needs content")
        return self


class StreamOptions(_Ignoring):
    include_usage: bool = False


class ChatRequest(_Ignoring):
    """Body of POST /v1/chat/completions. `model` may be anything: there is one policy behind this door."""

    messages: list[ChatMessage] = Field(min_length=1)
    model: str = ""
    temperature: float | None = Field(None, ge=0, le=2)
    top_p: float | None = Field(None, gt=0, le=1)
    max_tokens: int | None = Field(None, ge=1)
    max_completion_tokens: int | None = Field(None, ge=1)
    seed: int | None = Field(None, ge=-(2**63), lt=2**63)
    n: int | None = Field(None, ge=1, le=MAX_CHOICES)
    stop: str | list[str] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = Field(None, ge=0, le=0)
    tools: list[ToolSpec] | None = None
    tool_choice: Literal["auto", "none"] | None = None
    response_format: ResponseFormat | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None

    @property
    def stops(self) -> list[str]:
        """The stop strings, empty ones left out."""
        given = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [text for text in given if text]

    @property
    def functions(self) -> list[Tool]:
        """The tools that the policy is told of."""
        return [] if self.tool_choice == "none" else [tool.function.model_dump() for tool in self.tools or []]

    @property
    def limit(self) -> int | None:
        """Tokens that the answer may have; None: as many as fit into the context."""
        return self.max_completion_tokens if self.max_completion_tokens is not None else self.max_tokens


class WeightsRequest(BaseModel):
    """Body of POST /weights: one of the two."""

    model_config = ConfigDict(extra="forbid")

    version: int | None = Field(None, ge=0)
    checkpoint: str | None = Field(None, min_length=1)


def render(rendering: Rendering, messages: list[ChatMessage], tools: list[Tool] | None = None) -> list[int]:
    """Token ids of the conversation with the opening of the answer. The policy's own turns keep its think tokens; what
    others say cannot forge a special token."""
    said: list[Message] = [message.model_dump(exclude_none=True) for message in messages]
    for message in said:
        message["role"] = "system" if message["role"] == "developer" else message["role"]
    return [id_ for part in rendering.opening(said, tools or None) for id_ in part.ids]


def called(calls: list[SaidCall], answer: str) -> list[dict[str, Any]]:
    """`message.tool_calls`: those calls of a turn that can be run. `answer` makes their ids unique."""
    return [
        {
            "id": call.id or f"call_{answer}_{number}",
            "type": "function",
            "function": {"name": call.name, "arguments": json.dumps(call.arguments, ensure_ascii=False)},
        }
        for number, call in enumerate(calls)
        if call.status == "ok"
    ]


class Shapes:
    """Builds the bodies of one answer: what its chunks, or its whole, have in common is decided here."""

    def __init__(self, model: str) -> None:
        self._model = model
        self._id = f"chatcmpl-{uuid.uuid4().hex}"
        self._created = int(time.time())

    def whole(self, choices: list[dict[str, Any]], usage: dict[str, int], version: int) -> dict[str, Any]:
        """A `chat.completion`."""
        return {**self._head("chat.completion", version), "choices": choices, "usage": usage}

    def chunk(
        self, choices: list[dict[str, Any]], version: int, usage: dict[str, int] | None, with_usage: bool
    ) -> dict[str, Any]:
        """A `chat.completion.chunk`; with `include_usage` every chunk has the key, and only the last a value."""
        body = {**self._head("chat.completion.chunk", version), "choices": choices}
        return {**body, "usage": usage} if with_usage else body

    def _head(self, kind: str, version: int) -> dict[str, Any]:
        # The field is meant for "the backend that made this": for us that is the weight version.
        return {
            "id": self._id,
            "object": kind,
            "created": self._created,
            "model": self._model,
            "system_fingerprint": f"weights-{version}",
        }


def usage(prompt: int, completion: int) -> dict[str, int]:
    """Token counts; what was sampled counts, the end of the turn included."""
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def logprobs(tokens: list[tuple[str, float]]) -> dict[str, Any]:
    """`choice.logprobs` for (token text, natural logarithm of its probability) pairs."""
    content = [
        {"token": text, "logprob": logprob, "bytes": list(text.encode()), "top_logprobs": []} for text, logprob in tokens
    ]
    return {"content": content, "refusal": None}


def error(message: str, *, type: str, code: str | None = None, param: str | None = None) -> dict[str, Any]:
    """An error body. `type` is OpenAI's word, `code` the name of our error class."""
    return {"error": {"message": message, "type": type, "param": param, "code": code}}
