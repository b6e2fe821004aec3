"""Law 8: evaluation never trains, and its sampling settings are recorded."""

from __future__ import annotations

from typing import Any

from tests.laws.rollouts import EVALUATION, Run, every_seed
from troupe.cluster.run import Run as RunFolder


@every_seed
def test_no_evaluated_episode_is_in_a_batch_whatever_goes_wrong(run: Run) -> None:
    evaluated = {t.id for t in run.rows if t.kind == "eval"}
    assert all(not group.trains for group in run.groups if group.kind == "eval")
    assert all(evaluated.isdisjoint(id for id, _ in batch) for batches in run.batches.values() for batch in batches)
    asked = {message.episode: message.kind for message in run.dispatched}
    for t in run.rows:
        assert t.kind == asked.get(t.id, t.kind), f"{t.id} was dispatched as {asked[t.id]} and stored as {t.kind}"
        assert t.task.split == ("heldout" if t.kind == "eval" else "train")


@every_seed
def test_an_evaluation_keeps_its_own_sampling_and_scores_what_is_stored(run: Run) -> None:
    for t in run.rows:
        if t.kind == "eval" and t.sampling:  # those that never began were not sampled
            assert t.sampling["temperature"] == EVALUATION.temperature and t.sampling["max_tokens"] == EVALUATION.max_tokens
    assert run.broken or len(run.evaluated) == len(run.plot.evaluations)
    for (_, tasks, trials), score in zip(run.plot.evaluations, run.evaluated, strict=False):
        assert len(score.rewards) + score.failed == tasks * trials and score.sampling == EVALUATION
        serials: dict[str, list[float]] = {}
        for t in run.rows:
            if t.kind == "eval" and t.status == "completed":
                serials.setdefault(t.id.rpartition("-")[0].rpartition("-")[0], []).append(t.reward)
        assert not score.rewards or sorted(score.rewards) in [sorted(rewards) for rewards in serials.values()]


def test_no_evaluated_episode_is_in_a_batch_and_no_task_is_on_both_sides(simulated_run: Any) -> None:
    run = simulated_run(eval__every=1, eval__temperature=0.5)
    run.play(3)
    trained = {episode for _, episodes in run.trained for episode in episodes}
    rows = RunFolder(str(run.folder)).trajectories().to_pylist()
    evaluated = [row for row in rows if row["kind"] == "eval"]
    assert evaluated and not trained & {row["id"] for row in evaluated}
    assert {row["task_id"] for row in evaluated}.isdisjoint(row["task_id"] for row in rows if row["kind"] == "train")
    assert run.summary()["eval"]["last"]["sampling"]["temperature"] == 0.5
