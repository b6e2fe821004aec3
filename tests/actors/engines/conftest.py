"""Every contract test runs for every engine."""

from __future__ import annotations

import pytest

from tests.actors.engines.suite import ENGINES, Kind


@pytest.fixture(params=[pytest.param(name, marks=kind.marks) for name, kind in ENGINES.items()])
def kind(request: pytest.FixtureRequest) -> Kind:
    found = ENGINES[request.param]
    if reason := found.elsewhere(request.node):
        pytest.skip(reason)
    return found
