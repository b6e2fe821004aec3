"""How long a company waits for its children, and when it gives up."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from tests.laws.conftest import SeededEngine, model_folder, simulated_run
from troupe.actors.company import Company, Parts
from troupe.actors.director import Director, limits_of
from troupe.actors.env_pool import EnvPool
from troupe.actors.learner import Learner
from troupe.actors.ledger import Ledger
from troupe.actors.settings import RunConfig
from troupe.actors.simulated import Simulation
from troupe.protocol.errors import ActorLost, NotReady, TimedOut, TroupeError
from troupe.protocol.messages import Scale

assert simulated_run and model_folder  # fixtures

CONFIG = RunConfig.model_validate({"name": "it", "env": {"name": "echo"}, "max_restarts": 3})
LOST, AWAY = ActorLost("it was lost"), NotReady("it is starting")


def outcome_of(answers: list[tuple[float, Exception | None]], folder: Path) -> tuple[int, str]:
    """Of patient calls to a child that answers after so many seconds, with that error or well, in the end always like that:
    how many there were, and how they ended."""
    calls, ended = 0, ""

    async def call() -> str:
        nonlocal calls
        seconds, error = answers[min(calls, len(answers) - 1)]
        calls += 1
        await asyncio.sleep(seconds)
        if error is not None:
            raise error
        return "answered"

    async def main(context: Any) -> None:
        nonlocal ended
        parts = Parts("", lambda name: pytest.fail("nobody is started"))
        company = Company(context, CONFIG, parts, limits_of(CONFIG), Ledger(str(folder), context.clock))
        try:
            ended = await company.patiently("child.work", call, seconds=3_600.0)
        except TimedOut as error:
            ended = str(error)

    with Simulation(0) as simulation:
        simulation.run(main)
    return calls, ended


def test_a_child_that_dies_after_working_long_is_waited_for_as_long_as_any_other(tmp_path):
    away: list[tuple[float, Exception | None]] = [(0.0, AWAY)] * 500  # 250 s
    assert outcome_of([(1_000.0, LOST), *away, (400.0, LOST), *away, (1_000.0, None)], tmp_path) == (1_003, "answered")


@pytest.mark.parametrize(
    ("answers", "calls", "why"),
    [
        ([(0.0, AWAY)], 602, "child.work was not taken for 300 s; last: it is starting"),
        ([(1_000.0, LOST), (0.0, AWAY)], 602, "child.work was not taken for 300 s; last: it is starting"),
        ([(100.0, LOST)], 4, "child.work was lost in its work 4 times; last: it was lost"),
        ([(4_000.0, None)], 1, "child.work has not answered for 3600 s"),
    ],
)
def test_a_child_is_not_asked_for_ever_and_the_reason_is_named(tmp_path, answers, calls, why):
    assert outcome_of(answers, tmp_path) == (calls, why)


def test_new_weights_wait_for_the_slowest_pool_not_for_one_after_the_other(simulated_run, monkeypatch):
    routes = EnvPool.routes

    async def slow(self: EnvPool, message: Any) -> Any:
        await asyncio.sleep(10.0)
        return await routes(self, message)

    monkeypatch.setattr(EnvPool, "routes", slow)
    run = simulated_run(steps=2, env__actors=6, eval__tasks=0)
    run.play(0)
    took = [json.loads(line)["sync_s"] for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert max(took) < 30.0  # two rounds, if everybody was just being told what they know


def test_generators_whose_next_weights_die_on_their_way_go_on_with_those_that_they_have_proved(simulated_run, monkeypatch):
    publish, train = Company.publish, Learner.train
    companies, states = [], []

    async def strike(self: Company, weights: Any) -> None:
        if weights.version == 3 and not companies:
            companies.append(self)
            run.simulation.crash("learner")
        await publish(self, weights)

    async def look(self: Learner, message: Any) -> Any:
        await asyncio.sleep(60.0)
        states.extend(state for company in companies for name, state in company.roll_call().items() if "generator" in name)
        return await train(self, message)

    monkeypatch.setattr(Company, "publish", strike)
    monkeypatch.setattr(Learner, "train", look)
    run = simulated_run(steps=4, checkpoint_every=9, eval__tasks=0)
    run.play(0)
    assert len(states) == 2 * 4 and set(states) == {"proved"}  # steps 1 to 3 once more, and step 4
    assert run.summary()["episodes_retried"] == 0


@pytest.mark.parametrize("wanted", [{"env_actors": 4}, {"env_actors": 1}, {"generators": 3}, {"generators": 1}])
def test_a_company_that_still_starts_is_not_scaled_and_then_it_is(simulated_run, monkeypatch, wanted):
    lead, seen = Director._lead, []

    async def slow(self: SeededEngine) -> None:
        await asyncio.sleep(10.0)

    async def scale_beside(self: Director, company: Company) -> None:
        async def scale() -> None:
            await asyncio.sleep(5.0)
            with pytest.raises(NotReady, match="still starting its actors: scale it when they live"):
                await self.scale(Scale(**wanted))
            await asyncio.sleep(10.0)
            await self.scale(Scale(**wanted))
            seen.append([len(company.members(kind)) for kind in ("env-", "generator-")])

        scaling = asyncio.ensure_future(scale())
        await lead(self, company)
        await scaling

    monkeypatch.setattr(SeededEngine, "start", slow)
    monkeypatch.setattr(Director, "_lead", scale_beside)
    simulated_run(steps=6, env__options={"turns": 2, "sleep": 2.0}).play(0)
    assert seen == [[wanted.get("env_actors", 2), wanted.get("generators", 2)]]


def test_a_child_that_never_comes_to_life_ends_the_run_however_long_a_start_takes(simulated_run, monkeypatch):
    async def hang(self: SeededEngine) -> None:
        await asyncio.sleep(400.0)
        raise TimedOut("its server has not started for 400 s")

    monkeypatch.setattr(SeededEngine, "start", hang)
    run = simulated_run()
    with pytest.raises(TroupeError, match=r"generator-\d did not come to life in 3 starts; last: its server has not started"):
        run.play(0)
    assert run.simulation.loop.time() < 1_500.0
