"""Ends the servers that tests share."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator

import pytest

from tests.actors.engines import servers


@pytest.fixture(autouse=True, scope="session")
def shared_servers_end_with_the_session() -> Iterator[None]:
    yield
    for owner in servers.SERVERS.values():
        asyncio.run(owner.end())
        shutil.rmtree(owner._model.path, ignore_errors=True)
    servers.SERVERS.clear()
