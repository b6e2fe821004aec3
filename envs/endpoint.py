"""A language model behind any endpoint that speaks OpenAI's chat completions, Troupe's own included, as a part of a world.

Promises: a request that brings no reply (no connection, an error of the endpoint, something else than a completion) is
EnvironmentFailed: it says nothing about the agent. Nothing is left open between two requests. How long all of it may take
is for the caller to bound.
"""

from __future__ import annotations

import os
import ssl
from collections.abc import Iterable
from functools import cached_property
from typing import Any

from troupe.protocol.errors import EnvironmentFailed


class Endpoint:
    """`model` at `base_url`. who: what it is, for errors. retries: of a request that fails, by OpenAI's client. timeout_s: for
    one request. api_key: by default OPENAI_API_KEY's, if there is one."""

    def __init__(
        self,
        model: str,
        base_url: str,
        *,
        who: str,
        retries: int = 2,
        timeout_s: float = 60.0,
        max_tokens: int = 512,
        temperature: float = 0.0,
        api_key: str | None = None,
    ) -> None:
        self.model, self.base_url, self.who = model, base_url, who
        self.api_key = api_key or os.environ.get("OPENAI_API_KEY") or "none"
        self.retries, self.timeout_s, self.max_tokens, self.temperature = retries, timeout_s, max_tokens, temperature

    async def reply(self, messages: Iterable[dict[str, str]]) -> str:
        """What the model says next, perhaps nothing. Raises EnvironmentFailed."""
        import httpx2
        import openai

        said: list[Any] = list(messages)
        async with (
            httpx2.AsyncClient(verify=self._certificates) as http,
            openai.AsyncOpenAI(
                base_url=self.base_url,
                api_key=self.api_key,
                http_client=http,
                max_retries=self.retries,
                timeout=self.timeout_s,
            ) as client,
        ):
            try:
                completion = await client.chat.completions.create(
                    model=self.model, messages=said, temperature=self.temperature, max_tokens=self.max_tokens
                )
                return completion.choices[0].message.content or ""
            except (openai.OpenAIError, LookupError, AttributeError, TypeError) as error:  # the last three: no completion
                raise EnvironmentFailed(f"{self.who} {self.model} at {self.base_url}: {_line(error)}") from error

    @cached_property
    def _certificates(self) -> ssl.SSLContext:
        """Read once: it takes longer than a question to a small model."""
        return ssl.create_default_context()


def _line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:300]}"
