"""Which requests an engine can be asked at all, told before anything is computed."""

from __future__ import annotations

from troupe.protocol.errors import TaskFailed
from troupe.protocol.messages import Generate


def length_limit(request: Generate, context: int, vocabulary: int) -> int:
    """How long the sequence may become, prompt included. Raises TaskFailed for a prompt that the model cannot be fed."""
    prompt = request.prompt
    if not len(prompt):
        raise TaskFailed(f"request '{request.request}': the prompt is empty; there is nothing to continue")
    if len(prompt) >= context:
        raise TaskFailed(
            f"request '{request.request}': a prompt of {len(prompt)} tokens leaves no room in the context of "
            f"{context}: end the episode earlier (limits.max_episode_tokens) or compact it"
        )
    if prompt.min() < 0 or prompt.max() >= vocabulary:
        raise TaskFailed(
            f"request '{request.request}': token ids run from {prompt.min()} to {prompt.max()}, the model knows 0 "
            f"to {vocabulary - 1}: is the tokenizer of another model?"
        )
    return min(len(prompt) + request.sampling.max_tokens, context)
