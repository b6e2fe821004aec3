"""A generator is as alive as its engine."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from troupe.actors.generator import Generator
from troupe.actors.simulated import Simulation
from troupe.protocol.errors import ActorLost, RemoteError, TimedOut
from troupe.protocol.messages import Generate, Sampling, Weights


class GoneEngine:
    """Every call finds its server gone."""

    version = 0

    def __init__(self, error: Exception) -> None:
        self._error = error

    async def start(self) -> None:
        return

    async def generate(self, request: Generate) -> Any:
        raise self._error

    async def load_weights(self, version: int, tensors: Any) -> str:
        raise self._error


@pytest.mark.parametrize(
    ("method", "error"),
    [
        ("generate", ActorLost("the server was killed")),
        ("generate", RemoteError("the server was killed")),
        ("load_weights", ActorLost("the server was killed")),
        ("load_weights", RemoteError("the server was killed")),
        ("load_weights", TimedOut("the server was killed")),
    ],
)
def test_an_engine_that_is_gone_takes_its_generator_with_it(method: str, error: Exception) -> None:
    with Simulation(3) as simulation:

        async def main(context: Any) -> str:
            await context.spawn("generator-0", Generator, make_engine=lambda name: GoneEngine(error))
            generator = context.ref("generator-0", Generator)
            message: Any = Generate("r", "s", np.zeros(3, np.int32), Sampling())
            if method == "load_weights":
                message = Weights(1, "0" * 16, context.blobs.put({}))
            with pytest.raises(ActorLost):
                await getattr(generator, method)(message)
            assert not await context.exists("generator-0")
            return str(await context.watch("generator-0"))

        simulation.run(main)
