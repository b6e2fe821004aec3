"""Every contract test runs for every engine."""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Iterator

import pytest

from tests.actors.engines import servers
from tests.actors.engines.suite import ENGINES, Kind


@pytest.fixture(params=[pytest.param(name, marks=kind.marks) for name, kind in ENGINES.items()])
def kind(request: pytest.FixtureRequest) -> Kind:
    found = ENGINES[request.param]
    if reason := found.elsewhere(request.node):
        pytest.skip(reason)
    return found


@pytest.fixture(autouse=True, scope="session")
def shared_servers_end_with_the_session() -> Iterator[None]:
    yield
    for owner in servers.SERVERS.values():
        asyncio.run(owner.end())
        shutil.rmtree(owner._model.path, ignore_errors=True)
    servers.SERVERS.clear()
