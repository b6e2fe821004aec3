"""Settings for the whole suite."""

from __future__ import annotations

import asyncio
import gc
import inspect
import json
import os
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, settings

# Two shared cores: an example may be slow without being wrong.
settings.register_profile("troupe", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("troupe")

# A shell that runs the suite in the background ignores Ctrl-C for all its children; tests that send it must reach theirs.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_finish() -> None:
    """What importing all the tests has made stays until they end: no `gc.collect` of theirs needs to look at it again."""
    gc.collect()
    gc.freeze()


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs `async def` tests, each on an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(scope="session")
def two_ranks() -> Iterator[Any]:
    """Two processes over gloo, each with a `Probe` of trainers that share their work. Mark the test xdist_group("ranks")."""
    from tests.learner.probe import Probe
    from troupe.learner.ranked import Ranked

    ranks = Ranked(2, Probe, limit_s=120.0)
    yield ranks
    ranks.close()


@pytest.fixture(autouse=True)
def environment_is_left_as_it_was() -> Iterator[None]:
    """Joining a Ray cluster sets variables that would change how the next test starts its own."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def renderings(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """Four ways of writing conversations down, each with a small tokenizer of its own.

    "tiny": our own models. "qwen3": think blocks that its template strips when the user speaks again, calls and their
    ends as tokens. "two ends": pad = EOS, and a second id that ends a turn. "generic": a template that nobody knows.
    """
    from troupe.actors import rendering
    from troupe.learner.tiny import make_tiny

    def folder(name: str, *marks: str) -> Path:
        made = make_tiny(tmp_path_factory.mktemp(name), ["some words that are known"], hidden=16, layers=1, heads=2)
        tokenizer = json.loads((made / "tokenizer.json").read_text())
        for mark in marks:
            at = len(tokenizer["model"]["vocab"]) + sum(t["content"] in marks for t in tokenizer["added_tokens"])
            plain = {"single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
            tokenizer["added_tokens"].append({"id": at, "content": mark, "special": mark.startswith("<|"), **plain})
        (made / "tokenizer.json").write_text(json.dumps(tokenizer))
        return made

    calls = ("<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<|endoftext|>")
    two_ends = folder("two", "<|endoftext|>")
    second = json.loads((two_ends / "tokenizer.json").read_text())["added_tokens"][-1]["id"]
    (two_ends / "generation_config.json").write_text(json.dumps({"eos_token_id": [2, second], "pad_token_id": 2}))
    generic = folder("generic")
    settings = json.loads((generic / "tokenizer_config.json").read_text())
    settings["chat_template"] = (
        "{% for m in messages %}[{{ m['role'] }}] {{ m['content'] }}<|im_end|>{% endfor %}"
        "{% if add_generation_prompt %}[assistant] {% endif %}"
    )
    (generic / "tokenizer_config.json").write_text(json.dumps(settings))
    return {
        "tiny": rendering.load(str(folder("tiny"))),
        "qwen3": rendering.load(str(folder("qwen3", *calls)), "qwen3"),
        "two ends": rendering.load(str(two_ends)),
        "generic": rendering.load(str(generic)),
    }


@pytest.fixture(autouse=True)
def worlds_that_a_test_left_stuck_are_not_the_next_ones() -> Iterator[None]:
    """A coroutine that swallows its cancellation is counted until its process ends (`calls.stuck`)."""
    yield
    calls = sys.modules.get("troupe.envs.calls")
    if calls is not None:
        calls._given_up.clear()
