"""A served run of ours can be the judge of another."""

import pytest

from troupe.envs.verifiers import Judge
from troupe.protocol.errors import EnvironmentFailed


def test_a_served_run_is_asked_like_any_other_endpoint(ask):
    replies = []

    async def scenario(client, url, context):
        options = {"model": "tiny", "base_url": f"{url}/v1", "system": "", "max_tokens": 4}
        judge = Judge("{answer}", **options, scale=lambda reply: replies.append(reply) or 0.5)
        assert await judge("the lake") == 0.5
        with pytest.raises(EnvironmentFailed, match="judge nobody"):
            await Judge("{answer}", **{**options, "model": "nobody"}, retries=0)("the lake")

    ask(scenario)
    assert len(replies) == 1
