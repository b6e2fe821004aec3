"""Law 7, exact resume: whatever dies, the same tokens are trained in the same order."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from troupe.actors.factories import make_trainer
from troupe.cluster.run import Run as RunFolder
from troupe.learner.train import app


def steps_measured(run):
    return [json.loads(line)["step"] for line in (run.folder / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.parametrize("seed", range(30))
def test_a_run_whose_actors_are_killed_trains_exactly_what_an_undisturbed_one_trains(simulated_run, seed):
    calm = simulated_run()
    calm.play(0)
    stormy = simulated_run()
    stormy.play(seed, crashes=6, until_s=25.0)
    assert stormy.weights() == calm.weights(), stormy.crashes
    assert steps_measured(stormy) == steps_measured(calm), stormy.crashes


COMING_AND_GOING = {"env__slots": 2, "env__actors": 2, "env__max_actors": 4, "env__scale_out_s": 1.0, "env__scale_in_s": 4.0}


@pytest.mark.parametrize("drain_s", [0.0, 1.0, 600.0])
@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 20))])
def test_a_run_whose_pools_come_and_go_trains_exactly_what_a_still_one_trains(simulated_run, seed, drain_s):
    """By hand, and with the load; actors die while pools start and drain; every episode is stored once."""
    still = simulated_run()
    still.play(0)
    slowly = {"turns": 2, "sleep": 1.5}
    moved = simulated_run(**COMING_AND_GOING, env__min_actors=1, env__drain_s=drain_s, env__options=slowly)
    moved.play(seed, crashes=3, until_s=25.0, scalings=6)
    assert moved.weights() == still.weights(), moved.crashes
    assert steps_measured(moved) == steps_measured(still), moved.crashes
    rows = RunFolder(moved.folder).trajectories().select(["id", "trains"]).to_pylist()
    assert len({row["id"] for row in rows}) == len(rows)
    assert sum(row["trains"] for row in rows) == 4 * 2 * 3
    assert len(moved.events("scale")) >= 2


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 20))])
def test_a_run_whose_generators_come_and_go_trains_exactly_what_a_still_one_trains(simulated_run, seed):
    """Actors die while generators start and drain; weights travel in files; every episode is stored once."""
    still = simulated_run()
    still.play(0)
    moved = simulated_run(generator__transfer="disk", env__options={"turns": 2, "sleep": 1.5})
    moved.play(seed, crashes=3, until_s=25.0, scalings=6, scaled="generators")
    assert moved.weights() == still.weights(), moved.crashes
    rows = RunFolder(moved.folder).trajectories().select(["id", "trains"]).to_pylist()
    assert len({row["id"] for row in rows}) == len(rows)
    assert sum(row["trains"] for row in rows) == 4 * 2 * 3
    assert len(moved.events("scale")) >= 2 and moved.events("retired")
    assert len(list((moved.folder / "weights").iterdir())) <= 4


def test_pools_follow_the_load_and_every_change_is_told(simulated_run):
    run = simulated_run(**COMING_AND_GOING, env__options={"turns": 2, "sleep": 2.0}, steps=5)
    run.play(0)
    changes = [(row["pools"], row["why"]) for row in run.events("scale")]
    assert changes[0] == ([2, 4], changes[0][1]) and changes[0][1].endswith("episodes wait")
    said = [row["text"] for row in run.events("said")]
    assert all(f"pools {a} → {b}: {why}" in said for (a, b), why in changes)
    rows = [json.loads(line) for line in (run.folder / "metrics.jsonl").read_text().splitlines()]
    assert {row["pools"] for row in rows} > {4} or rows[-1]["pools"] == 4
    assert len(changes) - sum(row["pools_scaled"] for row in rows) in (0, 1)  # one may come after the last step
    timed = [row for row in rows if "env_step_s_p50" in row]  # two steps may follow each other at once
    assert timed and all(1.9 < row["env_step_s_p50"] <= row["env_step_s_p99"] < 2.2 for row in timed)
    latency = run.summary()["env_latency"]["echo"]
    assert latency["step"]["count"] >= 2 * 30 and latency["reset"]["p99_s"] < 0.1


@pytest.mark.parametrize("seed", [*range(3), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(3, 12))])
@pytest.mark.parametrize("segment", [0, 2])
def test_a_run_that_samples_as_a_tree_grows_the_same_trees_whoever_dies(simulated_run, seed, segment):
    runs = []
    for crashes in (0, 6):
        tree = {"rollout__tree": 1, "rollout__tree_segment": segment, "rollout__group_size": 4}
        runs.append(simulated_run(**tree))
        runs[-1].play(seed if crashes else 0, crashes=crashes, until_s=25.0)
    calm, stormy = runs
    assert stormy.weights() == calm.weights(), stormy.crashes
    first, second = (forks_of(run) for run in runs)
    assert first == second and sum(taken > 0 for _, taken in first.values()) >= (16 if segment == 0 else 20)


def forks_of(run):
    """What each trained trajectory took from whom."""
    columns = ["id", "fork_episode", "fork_tokens", "trains"]
    rows = RunFolder(str(run.folder)).trajectories().select(columns).to_pylist()
    return {row["id"]: (row["fork_episode"], row["fork_tokens"] or 0) for row in rows if row["trains"]}


COLLAPSING = {
    "steps": 14,
    "keep_checkpoints": 2,
    "learner": {"clip_high": 0.2, "passes": 2},
    "health": {"min_rows": 4, "window": 1, "hacking_rows": 6, "on_collapse": ["clip_higher"]},
}


@pytest.mark.parametrize("seed", range(6))
def test_a_run_that_changes_its_settings_by_itself_does_the_same_whoever_dies(simulated_run, seed):
    runs = []
    for crashes in (0, 6):
        runs.append(simulated_run(**COLLAPSING))
        runs[-1].collapse_at = 8
        runs[-1].play(seed, crashes=crashes, until_s=40.0)
    calm, stormy = runs
    assert stormy.weights() == calm.weights(), stormy.crashes
    assert stormy.treated == calm.treated
    assert [calm.treated[step] for step in (8, 9, 14)] == [{}, {"clip_high": 0.28}, {"clip_high": 0.28}]
    assert stormy.summary()["remedies"] == calm.summary()["remedies"]
    assert stormy.summary()["alarms"] == calm.summary()["alarms"] != []


@pytest.mark.parametrize("seed", range(6))
def test_a_run_that_rolls_back_does_so_once_from_a_checkpoint_before_the_alarm_whoever_dies(simulated_run, seed):
    run = simulated_run(**{**COLLAPSING, "health": {**COLLAPSING["health"], "on_collapse": ["roll_back"]}})
    run.collapse_at = 8
    run.play(seed, crashes=6 * (seed > 0), until_s=40.0)
    (remedy,) = run.summary()["remedies"]
    assert remedy["step"] == 8 and remedy["restart"] <= run.summary()["alarms"][0]["since_step"]
    # a learner that dies before its next checkpoint rolls back again, from the same one
    assert set(run.rolled_back) == {(8, f"step-{remedy['restart']}")}, run.crashes
    assert steps_measured(run) == list(range(1, 15))


def test_the_same_seed_gives_the_same_run_event_by_event(simulated_run):
    first, second = simulated_run(), simulated_run()
    first.play(5, crashes=3, until_s=15.0)
    second.play(5, crashes=3, until_s=15.0)
    assert first.crashes == second.crashes
    assert first.loads == second.loads
    assert first.sampled == second.sampled


def test_every_step_of_a_run_is_replayed_to_the_byte_by_the_learner_alone(simulated_run, tmp_path):
    """The real trainer in a simulated company, with batches that lag behind and actors that die."""
    credit = tmp_path / "credit.py"
    credit.write_text("def by_length(group):\n    return [float(t.policy_tokens % 3 - 1) for t in group.trajectories]\n")
    run = simulated_run(rollout__max_staleness=2, keep_checkpoints=2, learner__advantage=f"{credit}:by_length")
    config = run.config
    run.make_trainer = lambda: make_trainer(config.learner, config.model_settings(str(run.model_folder)), config.seed)
    run.play(0, crashes=4, until_s=20.0)
    assert run.crashes
    for step, begins in ((2, 1), (4, 3)):  # after checkpoints 0 and 2
        command = ["--run", str(run.folder), "--step", str(step), "--model", str(run.model_folder), "--json"]
        answer = CliRunner().invoke(app, command)
        assert answer.exit_code == 0, answer.output
        rows = [json.loads(line) for line in answer.stdout.splitlines()]
        assert [row["step"] for row in rows] == list(range(begins, step + 1))
        assert all(row["differs"] == {} and row["weights"] != row["weights_before"] for row in rows)
        assert f"step {step}: weights equal to the run's, to the byte ({rows[-1]['weights']})" in answer.stderr
    assert rows[-1]["weights"] == run.weights()
