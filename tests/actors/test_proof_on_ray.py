"""Law 4 on real Ray: a company whose engines really hold a wrong tensor, on purpose."""

from __future__ import annotations

import asyncio
import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from troupe.actors.company import Company, Parts
from troupe.actors.director import limits_of
from troupe.actors.factories import make_trainer
from troupe.actors.generator import Generator
from troupe.actors.host import RayContext
from troupe.actors.learner import Learner
from troupe.actors.ledger import Ledger
from troupe.actors.settings import RunConfig
from troupe.cluster.launch import ray_session
from troupe.learner.config import LearnerConfig, ModelConfig
from troupe.learner.tiny import make_tiny
from troupe.protocol.messages import ColdStart, Demonstrations, Generate, Sampling

pytestmark = [pytest.mark.xdist_group("ray"), pytest.mark.slow, pytest.mark.timeout(900)]


def engine_maker(model: ModelConfig, faults: Path) -> Any:
    """Defined in a function, so that it travels to the other process by value."""

    def make(name: str) -> Any:
        from copy import copy

        import torch

        from troupe.actors.engines.local import LocalEngine
        from troupe.learner.model import load

        class Faulty(LocalEngine):
            """Flips one bit of one tensor on its way into the model if there is a file of its name, which it removes."""

            async def load_weights(self, version: int, tensors: Any) -> str:
                held = {key: copy(array) for key, array in tensors.items()}
                fault = faults / name
                if fault.exists():
                    fault.unlink()
                    torch.as_tensor(held["model.norm.weight"]).view(torch.uint8)[0] ^= 1
                return await super().load_weights(version, held)

        return Faulty(partial(load, model, seed=1), generator_name=name)

    return make


@pytest.mark.parametrize("way", ["object_store", "disk", "gloo"])
async def test_a_replica_that_holds_a_wrong_tensor_is_replaced_and_works_only_when_its_replacement_has_proved(
    tmp_path: Path, way: str
) -> None:
    tiny = make_tiny(tmp_path / "model", ["go echo"], hidden=16, layers=1, heads=2)
    model, faults, run = ModelConfig(path=str(tiny)), tmp_path / "faults", tmp_path / "run"
    faults.mkdir()
    (run / "checkpoints").mkdir(parents=True)
    config = RunConfig.model_validate({"env": {"name": "echo", "actors": 1}, "generator": {"replicas": 2, "transfer": way}})
    parts = Parts(
        str(tiny), engine_maker(model, faults), partial(make_trainer, config=LearnerConfig(device="cpu"), model=model, seed=0)
    )
    with ray_session(None, f"proof-{way}"):
        context = RayContext.launch(f"proof-{way}", seed=0)
        ledger = Ledger(str(run), context.clock)
        company = Company(context, config, parts, limits_of(config), ledger)
        try:
            await company.gather()
            cold = ColdStart(Demonstrations([], [], 0.0), 0, 1)
            weights = (await context.ref("learner", Learner).cold_start(cold)).weights
            assert (run / "weights" / "version-0.safetensors").exists() == (way == "disk")

            (faults / "generator-1").touch()
            await company.publish(weights)
            assert events(run, "announced")[-1]["generators"] == ["generator-0"]
            await proved(company, 2)

            for name in ("generator-0", "generator-1"):
                (faults / name).touch()
            await company.publish(weights)  # nobody could prove it: it is announced when a replacement has
            said = [row["text"] for row in events(run, "said") if "the replica must be replaced" in row["text"]]
            assert len(said) == 3 and not list(faults.iterdir())
            last = events(run, "announced")[-1]
            assert last["generators"] and last["checksum"] == weights.checksum
            await proved(company, 2)
            assert [row["actor"] for row in events(run, "died")].count("generator-1") == 2
            for name in ("generator-0", "generator-1"):
                ask = Generate("r", "s", np.asarray([5, 6], np.int32), Sampling(max_tokens=3))
                assert set((await context.ref(name, Generator).generate(ask)).versions.tolist()) == {0}
        finally:
            await company.close()
            ledger.close()


def events(run: Path, kind: str) -> list[dict[str, Any]]:
    return [row for row in map(json.loads, (run / "journal.jsonl").read_text().splitlines()) if row["event"] == kind]


async def proved(company: Company, count: int) -> None:
    async with asyncio.timeout(120):
        while list(company.roll_call().values()).count("proved") < count:
            await asyncio.sleep(0.1)
