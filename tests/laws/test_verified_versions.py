"""Law 4, verified versions: announced only when every replica proved it, and no token is staler than the budget."""

from __future__ import annotations

import json

import pytest

import troupe
from tests.laws.conftest import SeededEngine
from troupe.protocol.trajectory import POLICY


@pytest.mark.parametrize("max_staleness", [0, 1, 3])
def test_no_trained_token_is_older_than_the_staleness_budget(simulated_run, max_staleness):
    run = simulated_run(steps=6, rollout__max_staleness=max_staleness)
    run.play(1, crashes=2, until_s=20.0)
    assert run.staleness and max(run.staleness) <= max_staleness and min(run.staleness) >= 0


def test_a_generator_that_holds_other_weights_than_were_sent_is_replaced_before_it_works(simulated_run):
    busy = {"env__slots": 2, "env__options": {"turns": 2, "sleep": 1.0}, "rollout__max_staleness": 2, "eval__tasks": 0}
    spoke = 0
    for seed in range(5):
        run = simulated_run(liar=0.4, max_restarts=100, **busy)
        run.summing_s = 1.0
        run.play(seed)
        journal = [json.loads(line) for line in (run.folder / "journal.jsonl").read_text().splitlines()]
        announced = {row["version"]: row["checksum"] for row in journal if row["event"] == "announced"}
        lies = [(name, version) for name, version, held in run.loads if held != announced.get(version)]
        assert not lies or any(row["event"] == "died" and row["actor"].startswith("generator") for row in journal)
        assert run.summary()["finished"]
        assert all(row["generators"] for row in journal if row["event"] == "announced")
        spoke += any(SeededEngine.LIE in tokens for _, _, tokens in run.sampled)
        nodes = [node for row in troupe.open(str(run.folder)).trajectories().column("nodes").to_pylist() for node in row]
        heard = {t for node in nodes for t, p in zip(node["tokens"], node["provenance"], strict=True) if p == POLICY}
        assert heard and SeededEngine.LIE not in heard, "tokens of weights that were not proved were heard"
    assert spoke, "some seed must let a liar speak unproved"
