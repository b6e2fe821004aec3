"""What the tests of the actors share."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.actors.dispatching import Company


@pytest.fixture
def company(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Company]]:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # the machine does not crash here
    count = iter(range(1_000_000))
    yield lambda **options: Company(tmp_path / str(next(count)), **options)
