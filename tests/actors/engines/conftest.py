"""Every contract test runs for every engine."""

from __future__ import annotations

import pytest

from tests.actors.engines.suite import ENGINES, Kind


@pytest.fixture(params=ENGINES)
def kind(request: pytest.FixtureRequest) -> Kind:
    return ENGINES[request.param]
