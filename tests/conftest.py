"""Settings for the whole suite."""

from __future__ import annotations

import asyncio
import inspect
import os
import signal
from collections.abc import Iterator

import pytest
from hypothesis import HealthCheck, settings

# Two shared cores: an example may be slow without being wrong.
settings.register_profile("troupe", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("troupe")

# A shell that runs the suite in the background ignores Ctrl-C for all its children; tests that send it must reach theirs.
if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
    signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_pyfunc_call(pyfuncitem: pytest.Function) -> bool | None:
    """Runs `async def` tests, each on an event loop of its own."""
    if not inspect.iscoroutinefunction(pyfuncitem.obj):
        return None
    names = pyfuncitem._fixtureinfo.argnames
    asyncio.run(pyfuncitem.obj(**{name: pyfuncitem.funcargs[name] for name in names}))
    return True


@pytest.fixture(autouse=True)
def environment_is_left_as_it_was() -> Iterator[None]:
    """Joining a Ray cluster sets variables that would change how the next test starts its own."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)
