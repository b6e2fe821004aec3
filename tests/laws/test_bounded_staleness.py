"""Law 4, the bound: no trained token is older than the staleness budget, in whatever mode, whatever becomes of turns in flight.

A seed draws mode and policy for turns in flight, slow tokens and slow worlds, messages that are late or lost, generators that
drain and hand their turns over, and deaths of any actor.
"""

from __future__ import annotations

import asyncio
import functools
import json
import random
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.laws.plots import Plot
from tests.laws.rollouts import Run, Stage, every_seed_of
from troupe.actors.context import within
from troupe.actors.director import Director
from troupe.actors.env_pool import EnvPool
from troupe.actors.settings import RolloutSettings
from troupe.actors.simulated import Chaos
from troupe.protocol import stored
from troupe.protocol.messages import EpisodeDone, Routes, RunEpisode
from troupe.protocol.trajectory import POLICY, Trajectory

QUICK, BLOCK, SLOW = 60, 30, 3_000


def storm(seed: int) -> Plot:
    """The plot of `seed`."""
    dice = random.Random(f"staleness/{seed}")
    mode = dice.choice(["sync", "one-step-off", "async", "async"])
    settings: dict[str, Any] = {"mode": mode, "in_flight": dice.choice(["finish", "update", "restart"])}
    if mode == "async":
        settings["max_staleness"] = dice.choice([1, 2, 3])
    lost = dice.choice([0.0, 0.03, 0.1])
    plot = Plot(
        seed,
        RolloutSettings(
            groups_per_step=dice.choice([1, 2]),
            group_size=2,
            max_tokens=8,
            attempts=6,
            oversample=dice.choice([0.0, 0.0, 0.5]),
            tree=dice.choice([0, 0, 1]),
            **settings,
        ),
        steps=dice.choice([4, 6]),
        slots=dice.choice([2, 4, 8]),
        turns=dice.choice([1, 2, 3]),
        troubles={"step": dice.choice([0.0, 0.05])},
        chaos=Chaos((0.0005, dice.choice([0.005, 0.05, 0.3])), dice.choice([0.0, 0.05]), lost, lost),
        token_s=dice.choice([0.02, 0.1, 0.5]),
    )
    for _ in range(dice.choice([0, 1, 2, 4])):
        kind = dice.choice(["", "", "begins", "ends", "announces", "commit of", "hands over", "lives"])
        number = dice.randrange(1, {"": 150, "announces": plot.steps, "hands over": 2}.get(kind, 20))
        plot.crashes.append((kind, number, dice.choice(["it", *plot.names])))
    for _ in range(dice.choice([0, 1, 2, 3])):
        plot.retired.append((dice.uniform(0.5, 12.0), dice.choice(["generator-0", "generator-1"])))
    return plot


@functools.cache
def played(seed: int, model_folder: Path) -> Run:
    """The finished run of `seed`."""
    return Stage(storm(seed), model_folder).play()


every_storm = every_seed_of(played, QUICK, BLOCK, SLOW)


def ages(t: Trajectory) -> np.ndarray:
    """Versions that each token of the policy is behind, in the step that trains it."""
    return t.step - 1 - np.concatenate([node.versions for node in t.nodes])


@every_storm
def test_no_trained_token_is_older_than_the_budget_and_none_is_from_the_future(run: Run) -> None:
    settings = run.plot.settings
    trained = [t for step in run.batches for t in run.trained(step)]
    assert trained
    for t in trained:
        assert ages(t).min() >= 0 and ages(t).max() <= settings.max_staleness, f"{t.id}: {ages(t)}"
        if settings.mode == "one-step-off":
            assert set(ages(t)) == {min(1, t.step - 1)}, f"{t.id} is of several versions"


@every_storm
def test_nothing_is_lost_and_each_step_trains_exactly_its_groups(run: Run) -> None:
    assert not run.broken
    assert Counter(g.step for g in run.groups if g.trains) == dict.fromkeys(
        range(1, run.plot.steps + 1), run.plot.settings.groups_per_step
    )
    assert set(Counter(t.id for t in run.rows).values()) == {1}
    missing = {m.episode for m in run.dispatched} - {t.id for t in run.rows}
    living = {m.episode for m in run.dispatched if run.life(m.attempt) == run.lives["dispatcher"] - 1}
    assert not missing & living and (not missing or run.plot.settings.oversample)
    assert run.status is not None and (run.status.in_flight, run.status.stale_groups) == (0, 0)
    assert run.worlds_left == run.deposits_left == 0


@every_storm
def test_each_turn_is_what_engines_sampled_in_one_piece_or_in_several_that_follow_each_other(run: Run) -> None:
    for t in (t for step in run.batches for t in run.trained(step)):
        if t.fork is None:
            for turn in turns_in(t):
                assert pieces(run, *turn), f"{t.id}: no engine sampled {turn[1]}"


@every_storm
def test_only_with_update_a_turn_is_of_several_versions(run: Run) -> None:
    if run.plot.settings.in_flight != "update":
        assert all(len(set(versions)) == 1 for t in run.rows if t.status == "completed" for _, _, versions, _ in turns_in(t))


Turn = tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...], np.ndarray]


def turns_in(t: Trajectory) -> list[Turn]:
    """(prompt, tokens, versions, logprobs) of each turn."""
    found: list[Turn] = []
    for branch in t.branches():
        ids: list[int] = []
        for node in (t.nodes[i] for i in branch):
            mine = node.provenance == POLICY
            prompt, said = (*ids, *node.tokens[~mine].tolist()), tuple(node.tokens[mine].tolist())
            if said:
                found.append((prompt, said, tuple(node.versions.tolist()), node.logprobs))
            ids += node.tokens.tolist()
    return found


def pieces(run: Run, prompt: tuple[int, ...], said: tuple[int, ...], versions: tuple[int, ...], lp: np.ndarray) -> int:
    """In how few pieces engines sampled the turn; 0 if they did not."""
    if not said:
        return 0
    for end in range(len(said), 0, -1):
        if (prompt, said[:end], versions[:end], lp[:end].tobytes()) in run.sampled:
            if end == len(said):
                return 1
            if more := pieces(run, (*prompt, *said[:end]), said[end:], versions[end:], lp[end:]):
                return 1 + more
    return 0


def test_the_storms_hold_all_that_they_promise(model_folder: Path) -> None:
    """Else the bound would be checked in fair weather."""
    seen: Counter[str] = Counter()
    for seed in range(QUICK):
        run = played(seed, model_folder)
        settings = run.plot.settings
        for t in (t for step in run.batches for t in run.trained(step)):
            seen[f"{settings.mode}, {ages(t).max()} behind"] += 1
            for turn in turns_in(t):
                seen["turns in pieces"] += pieces(run, *turn) > 1
                seen["turns of two versions"] += len(set(turn[2])) > 1
        seen.update(f"{who.partition('-')[0]} dies" for _, who in run.crashes[: len(run.plot.crashes)])
        seen[f"{settings.in_flight} cuts turns"] += sum(event.endswith("abort") for event in run.trace)
    wanted = ["sync, 0 behind", "one-step-off, 1 behind", *(f"async, {n} behind" for n in range(4))]
    wanted += ["turns in pieces", "turns of two versions", "update cuts turns", "restart cuts turns"]
    wanted += [f"{who} dies" for who in ("store", "dispatcher", "env", "generator")]
    assert not {name for name in wanted if not seen[name]}, seen


# -- each way by itself ----------------------------------------------------------------------------------------------


def calm(in_flight: str, **changes: Any) -> Plot:
    """Nothing goes wrong; turns are long beside a training step."""
    settings = RolloutSettings(groups_per_step=2, group_size=2, max_tokens=30, max_staleness=2, in_flight=in_flight)  # type: ignore[arg-type]
    return Plot(settings=settings, steps=5, slots=20, turns=2, token_s=0.1, **changes)


@pytest.mark.parametrize(("in_flight", "mixed", "aborted"), [("finish", 0, 0), ("update", 1, 0), ("restart", 0, 1)])
def test_what_becomes_of_turns_in_flight(model_folder: Path, in_flight: str, mixed: int, aborted: int) -> None:
    run = Stage(calm(in_flight), model_folder).play()
    turns = [turn for t in run.rows for turn in turns_in(t)]
    assert any(len(set(versions)) > 1 for _, _, versions, _ in turns) == mixed
    assert any(event.endswith("abort") for event in run.trace) == aborted
    assert all(pieces(run, *turn) == 1 for turn in turns) and {t.status for t in run.rows} == {"completed"}


@pytest.mark.parametrize(("in_flight", "kept"), [("finish", False), ("update", True), ("restart", False)])
def test_a_generator_that_is_retired_hands_its_turns_over(model_folder: Path, in_flight: str, kept: bool) -> None:
    run = Stage(calm(in_flight, retired=[(0.7, "generator-0")]), model_folder).play()
    counts = [pieces(run, *turn) for t in run.rows for turn in turns_in(t)]
    assert min(counts) == 1 and (max(counts) > 1) == kept
    assert {t.status for t in run.rows} == {"completed"} and all(message.attempt == 0 for message in run.dispatched)


def test_a_replica_with_old_weights_samples_nothing_for_a_younger_step(model_folder: Path) -> None:
    """A pool that has not heard of the new routes still asks the replica which missed the new weights: it is refused."""

    class Deaf(Stage):
        async def _prove(self, name: str) -> None:
            if name == "generator-0" and self.weights is not None and self.weights.version in (1, 2):
                return  # the message is lost, again and again
            await super()._prove(name)

        async def _inform(self) -> None:
            await super()._inform()
            for pool in self._of("env-"):
                await within(9.0, pool, self.context.ref(pool, EnvPool).routes(Routes(["generator-0", "generator-1"])))

    settings = RolloutSettings(groups_per_step=2, group_size=2, max_tokens=4, mode="sync")
    run = Deaf(Plot(settings=settings, steps=4, chaos=Chaos((0.001, 0.01), slow=0.0)), model_folder).play()
    used = Counter((t.step, node.versions[0]) for t in run.rows for node in t.nodes if len(node.versions))
    assert {version for step, version in used} == {0, 1, 2, 3} and all(version == step - 1 for step, version in used)
    assert run.status is not None and run.status.failed == run.status.stale_groups == 0


def test_a_group_with_a_token_that_is_too_old_is_stored_told_of_and_not_trained(
    model_folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever let it through: here the pool says that it asked for any version, and a replica missed the new weights."""
    run_episode = EnvPool.run_episode

    async def careless(self: EnvPool, message: RunEpisode) -> EpisodeDone:
        message.min_version = -1
        return await run_episode(self, message)

    class Late(Stage):
        async def _prove(self, name: str) -> None:
            if name == "generator-0" and self.weights is not None and self.weights.version == 1:
                self.proved[name] = 1  # it is believed, and has them only later
                self.late = asyncio.get_running_loop().create_task(self._later(name))
                return
            await super()._prove(name)

        async def _later(self, name: str) -> None:
            await asyncio.sleep(1.5)
            await super()._prove(name)

    monkeypatch.setattr(EnvPool, "run_episode", careless)
    settings = RolloutSettings(groups_per_step=2, group_size=1, max_tokens=4, mode="sync")
    run = Late(Plot(settings=settings, steps=3), model_folder).play()
    trained = [t for step in run.batches for t in run.trained(step)]
    assert trained and all(ages(t).max() == 0 for t in trained)
    assert run.status is not None and run.status.stale_groups > 0 and not run.broken
    stale = [g for g in run.groups if not g.trains]
    assert len(stale) == run.status.stale_groups and all(g.completed == 1 for g in stale)
    assert any("takes none before 1: it is stored and not trained" in event for event in run.status.events)


# -- the whole company -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("in_flight", ["finish", "update", "restart"])
@pytest.mark.parametrize("mode", ["sync", "one-step-off", "async"])
def test_the_whole_company_keeps_the_bound(simulated_run: Any, mode: str, in_flight: str) -> None:
    run = simulated_run(steps=6, rollout__mode=mode, rollout__in_flight=in_flight)
    run.play(1, crashes=3, until_s=20.0)
    most = 0 if mode == "sync" else 1
    assert max(run.staleness) <= most and min(run.staleness) >= 0 and run.summary()["groups_stale"] == 0
    assert set(run.summary()["staleness"]) <= {str(age) for age in range(most + 1)}


def test_one_step_off_trains_each_step_on_one_version_and_generates_beside_it(simulated_run: Any) -> None:
    run = simulated_run(steps=5, rollout__mode="one-step-off", env__options={"turns": 2, "sleep": 5.0})
    run.play(0)
    table = stored.committed(str(run.folder / "trajectories"))
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert [row.get("staleness_1", 0.0) for row in rows] == [0.0, 1.0, 1.0, 1.0, 1.0]
    assert table.num_rows and run.summary()["staleness"] == {"0": pytest.approx(0.2, abs=0.1), "1": pytest.approx(0.8, abs=0.1)}


def test_weights_do_not_wait_for_a_batch_that_nobody_can_sample(simulated_run: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With one-step-off: while the next batch is waited for, all generators die and the learner takes all weights with it."""
    meet = Director._meet

    async def strike(self: Director, company: Any, step: int) -> None:
        if step == 3 and not run.simulation.crashes:
            for name in ("learner", "generator-0", "generator-1"):
                asyncio.get_running_loop().call_soon(run.simulation.crash, name)
        await meet(self, company, step)

    monkeypatch.setattr(Director, "_meet", strike)
    run = simulated_run(steps=4, rollout__mode="one-step-off", env__options={"turns": 2, "sleep": 5.0})
    run.play(0)
    assert len(run.crashes) >= 3 and run.summary()["finished"] and max(run.staleness) <= 1
    assert [row["version"] for row in run.events("announced")] == [0, 1, 2, 3, 4]
