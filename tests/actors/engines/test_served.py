"""What a served engine is refused for before there is a server."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from troupe.actors.engines.sglang import SGLangEngine
from troupe.actors.engines.vllm import VLLMEngine
from troupe.actors.settings import GeneratorSettings
from troupe.learner.config import ModelConfig
from troupe.learner.tiny import make_tiny
from troupe.protocol.errors import ConfigError


@pytest.mark.parametrize(("engine", "key"), [(SGLangEngine, "sglang_python"), (VLLMEngine, "vllm_python")])
async def test_an_interpreter_that_is_not_there_is_told_by_its_key(tmp_path: Path, engine: Any, key: str) -> None:
    model = ModelConfig(path=str(make_tiny(tmp_path / "model", ["a word"])))
    with pytest.raises(ConfigError, match=rf"generator\.{key}: no program '/nope/python' on .*virtual environment"):
        await engine(model, python="/nope/python").start()


@pytest.mark.parametrize("url", ["foo", "127.0.0.1:30000", "ftp://host:1", "http://", "http://host:99999", "http://host:x"])
def test_what_is_no_address_of_a_server_is_told_at_once(url: str) -> None:
    with pytest.raises(ValueError, match=r"is no address of a server: write it as http://"):
        GeneratorSettings(engine="sglang", sglang_url=url)


@pytest.mark.parametrize("url", ["", "http://127.0.0.1:30000", "https://some.host/sglang", "http://[::1]:30000"])
def test_addresses_are_taken(url: str) -> None:
    assert GeneratorSettings(engine="sglang", sglang_url=url).sglang_url == url
