"""What tests of worlds with sandboxes share."""

import pytest

from troupe.envs.sandbox import missing


@pytest.fixture
def bubblewrap() -> dict[str, str]:
    """Options of a world that runs programs in bubblewrap; skips, with the reason, where there is none."""
    if why := missing("bubblewrap"):
        pytest.skip(why)
    return {"sandbox": "bubblewrap"}
