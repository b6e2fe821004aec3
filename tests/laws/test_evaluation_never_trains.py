"""Law 8: evaluation never trains, and its sampling settings are recorded."""

from __future__ import annotations

from troupe.cluster.run import Run


def test_no_evaluated_episode_is_in_a_batch_and_no_task_is_on_both_sides(simulated_run):
    run = simulated_run(eval__every=1, eval__temperature=0.5)
    run.play(3)
    trained = {episode for _, episodes in run.trained for episode in episodes}
    rows = Run(str(run.folder)).trajectories().to_pylist()
    evaluated = [row for row in rows if row["kind"] == "eval"]
    assert evaluated and not trained & {row["id"] for row in evaluated}
    assert {row["task_id"] for row in evaluated}.isdisjoint(row["task_id"] for row in rows if row["kind"] == "train")
    assert run.summary()["eval"]["last"]["sampling"]["temperature"] == 0.5
