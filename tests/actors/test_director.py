"""The director: one that takes over goes on where the one before was, and tells nothing twice."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from typing import Any

import pytest

from tests.laws.conftest import SimulatedRun, model_folder, simulated_run
from troupe.actors.company import Company
from troupe.actors.director import Director
from troupe.actors.dispatcher import Dispatcher
from troupe.actors.groups import Group
from troupe.cluster.run import Run as RunFolder

assert simulated_run and model_folder  # fixtures


@pytest.mark.parametrize("label", ["first", "step 2", "last"])
def test_an_evaluation_in_which_the_director_dies_is_run_once_awaited_and_told(
    simulated_run: Any, monkeypatch: pytest.MonkeyPatch, label: str
) -> None:
    run: SimulatedRun = simulated_run(eval__every=2, eval__tasks=8, env__options={"turns": 2, "sleep": 2.0})
    evaluate, deaths = Director._evaluate, 0

    async def dies(self: Director, company: Company, what: str) -> None:
        nonlocal deaths
        if what == label and not deaths:
            deaths += 1
            asyncio.get_running_loop().call_later(1.0, run.simulation.crash, "director")
        await evaluate(self, company, what)

    monkeypatch.setattr(Director, "_evaluate", dies)
    run.play(0)
    assert run.crashes and run.summary()["finished"]
    rows = [json.loads(line) for line in (run.folder / "evals.jsonl").read_text().splitlines()]
    assert [row["version"] for row in rows] == [0, 2, 4]
    told = [row["text"] for row in run.events("said") if " evaluation, version " in row["text"]]
    assert [text.partition(" evaluation")[0] for text in told] == ["first", "step 2", "last"]


def test_what_the_dispatcher_has_to_say_is_told_once_whoever_leads(simulated_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    run: SimulatedRun = simulated_run(steps=6)
    run_group, measure, deaths = Dispatcher._run_group, Director._measure, 0

    async def says(self: Dispatcher, group: Group, *args: Any) -> Any:
        verdict = await run_group(self, group, *args)
        self._notes.say(f"group {group.number} has ended")
        return verdict

    async def dies(self: Director, *args: Any) -> None:
        nonlocal deaths
        await measure(self, *args)
        deaths += 1
        if deaths in (1, 2, 4):
            run.simulation.crash("director")
            await asyncio.sleep(0)

    monkeypatch.setattr(Dispatcher, "_run_group", says)
    monkeypatch.setattr(Director, "_measure", dies)
    run.play(0)
    assert len(run.crashes) >= 3 and run.summary()["finished"]
    told = Counter(row["text"] for row in run.events("said") if row["text"].endswith("has ended"))
    trained = {int(text.split()[1]) for text in told} & {
        row["group"] for row in RunFolder(run.folder).trajectories().to_pylist()
    }
    assert max(told.values()) == 1 and len(trained) == len(told) >= 12 + 2 * 3, "groups of six steps and of two evaluations"
