"""The run's eye on its own health: what is told, once; what is done, only if allowed."""

from __future__ import annotations

import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from troupe.actors.ledger import Ledger
from troupe.actors.settings import RunConfig
from troupe.actors.watch import Watch
from troupe.protocol.errors import Unhealthy

FALLS_AT = 20


def config(*on_collapse: str) -> RunConfig:
    health = {"on_collapse": list(on_collapse)}
    return RunConfig.model_validate({"steps": 100, "learner": {"clip_high": 0.2, "lr": 1e-3, "passes": 2}, "health": health})


def followed(
    folder: Path, settings: RunConfig, steps: int = 40, saved: tuple[int, ...] = ()
) -> tuple[Watch, Ledger, list[str]]:
    """A watch that has seen `steps` steps of a run whose entropy collapses at FALLS_AT."""
    for step in saved:
        (folder / "checkpoints" / f"step-{step}").mkdir(parents=True)
    told: list[str] = []
    ledger = Ledger(str(folder), SimpleNamespace(now=time.time))  # type: ignore[arg-type]
    watch = Watch(settings, ledger, told.append)
    for step in range(1, steps + 1):
        ledger.rows.append(row(step))
        watch.look()
    return watch, ledger, told


def row(step: int) -> dict[str, Any]:
    entropy = 1.0 + 0.01 * (step % 3) if step < FALLS_AT else 0.02
    return {"step": step, "entropy": entropy, "success": 0.5, "reward_mean": 0.5, "reward_min": 0.0, "reward_max": 1.0}


def test_an_alarm_is_told_once_with_what_was_seen_and_what_could_be_done(tmp_path: Path) -> None:
    watch, ledger, told = followed(tmp_path, config())
    assert len(told) == len(ledger.alarms) == 1 and not ledger.remedies
    assert told[0].startswith("health: entropy fell from 1") and "--on-collapse clip_higher" in told[0]
    assert FALLS_AT <= ledger.alarms[0]["step"] <= FALLS_AT + 5 and ledger.alarms[0]["since_step"] <= FALLS_AT
    assert watch.state == f"entropy collapse since step {ledger.alarms[0]['since_step']}"
    assert watch.treatment(50) == ({}, None)


def test_a_watch_that_takes_over_tells_and_does_nothing_twice(tmp_path: Path) -> None:
    followed(tmp_path, config("clip_higher"))
    watch, ledger, told = followed(tmp_path, config("clip_higher"))
    assert len(ledger.alarms) == len(ledger.remedies) == 1 and told == []
    assert watch.treatment(40) == ({"clip_high": 0.28}, None)


def test_an_alarm_of_an_older_step_is_not_told_anew_by_who_takes_over_before_the_next_row(tmp_path: Path) -> None:
    """A director that dies between a step and its figures leaves the row of the step before as the newest."""
    _, before, _ = followed(tmp_path, config("clip_higher"))
    at = before.alarms[0]["step"]
    told: list[str] = []
    ledger = Ledger(str(tmp_path), SimpleNamespace(now=time.time))  # type: ignore[arg-type]
    ledger.rows.extend(row(step) for step in range(1, at + 1))
    watch = Watch(config("clip_higher"), ledger, told.append)
    watch.look()
    assert told == [] and len(ledger.alarms) == len(ledger.remedies) == 1
    assert watch.state.startswith("entropy collapse")


def test_only_the_first_step_that_teaches_nothing_is_told(tmp_path: Path) -> None:
    told: list[str] = []
    ledger = Ledger(str(tmp_path), SimpleNamespace(now=time.time))  # type: ignore[arg-type]
    watch = Watch(config(), ledger, told.append)
    watch.look()
    for step, norm in enumerate((0.3, 0.0, 0.2, 0.0), 1):
        ledger.rows.append({**row(step), "grad_norm": norm})
        watch.look()
    assert len(told) == 1 and told[0].startswith("step 2 taught nothing")


def test_the_mildest_remedy_that_is_allowed_and_changes_something_is_taken(tmp_path: Path) -> None:
    watch, ledger, told = followed(tmp_path, config("stop", "filter", "clip_higher"))
    (remedy,) = ledger.remedies
    assert (remedy["action"], remedy["changes"], remedy["restart"]) == ("clip_higher", {"clip_high": 0.28}, None)
    assert watch.treatment(remedy["step"]) == ({}, None)
    assert watch.treatment(remedy["step"] + 1) == ({"clip_high": 0.28}, None)
    assert "Done about it: let unlikely tokens rise" in told[0] and "clip_high = 0.28" in told[0]


def test_a_roll_back_starts_from_the_newest_checkpoint_before_the_trouble(tmp_path: Path) -> None:
    watch, ledger, _ = followed(tmp_path, config("roll_back"), saved=(0, 10, 30))
    (remedy,) = ledger.remedies
    assert remedy["restart"] == 10
    assert watch.treatment(remedy["step"] + 1) == ({}, 10)
    assert watch.treatment(remedy["step"] + 2) == ({}, None)


def test_without_a_checkpoint_from_before_nothing_is_rolled_back(tmp_path: Path) -> None:
    _, ledger, told = followed(tmp_path, config("roll_back"), saved=(30,))
    assert not ledger.remedies and len(told) == 1


def test_stop_ends_the_run_and_says_why(tmp_path: Path) -> None:
    with pytest.raises(Unhealthy, match=r"entropy fell.*troupe trace"):
        followed(tmp_path, config("stop"))


def test_nothing_is_done_to_a_healthy_run(tmp_path: Path) -> None:
    watch, ledger, told = followed(tmp_path, config("stop", "filter"), steps=FALLS_AT - 1)
    assert (watch.state, ledger.alarms, ledger.remedies, told) == ("ok", [], [], [])
