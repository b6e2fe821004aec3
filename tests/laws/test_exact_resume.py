"""Law 7, exact resume: whatever dies, the same tokens are trained in the same order."""

from __future__ import annotations

import json

import pytest
from typer.testing import CliRunner

from troupe.actors.factories import make_trainer
from troupe.learner.train import app


@pytest.mark.parametrize("seed", range(30))
def test_a_run_whose_actors_are_killed_trains_exactly_what_an_undisturbed_one_trains(simulated_run, seed):
    calm = simulated_run()
    calm.play(0)
    stormy = simulated_run()
    stormy.play(seed, crashes=6, until_s=25.0)
    assert stormy.weights() == calm.weights(), stormy.crashes


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
    run.play(3, crashes=4, until_s=20.0)
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
