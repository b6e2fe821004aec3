"""`troupe eval`: the same scores from the same seed, broken episodes apart, and no task that was trained on passes for new."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import typer
from typer.testing import CliRunner

from tests.laws.conftest import SeededEngine, SimulatedRun, simulated_run
from troupe.actors import journal
from troupe.actors.company import Parts
from troupe.actors.simulated import Chaos, Simulation
from troupe.cluster import eval_commands, eval_report, evaluating, launch
from troupe.cluster.eval_tasks import choose, guard, history_of
from troupe.cluster.evaluating import Episode, Plan, Policy
from troupe.cluster.run import Run
from troupe.envs import registry
from troupe.learner.tiny import make_tiny
from troupe.protocol.checksum import checksum_of
from troupe.protocol.errors import ConfigError, TroupeError
from troupe.protocol.messages import Sampling
from troupe.protocol.stored import committed

assert simulated_run  # a fixture: `simulated_run(steps=2)` makes a run of the whole company, in virtual time
ROOT = Path(__file__).resolve().parents[2]
WORLD = registry.find("echo")


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tiny")
    return make_tiny(folder, ["echo train heldout turn 0 1 2 3 4 5 6 7 8 9"], hidden=16, layers=1, heads=2)


@pytest.fixture
def trained(simulated_run: Any) -> SimulatedRun:
    """A run of two steps with a cold start."""
    run: SimulatedRun = simulated_run(steps=2, checkpoint_every=1)
    run.play(0)
    return run


def plan_of(run: SimulatedRun, folder: Path, trials: int = 2, count: int = 3, seed: int = 7) -> Plan:
    run.config.model.path = str(run.model_folder)
    policy = Policy(run.config.model_settings(str(run.model_folder)), run.model_folder)
    tasks = [WORLD.task("heldout", index) for index in range(count)]
    config = evaluating.prepared(run.config, policy)
    return Plan(folder, config, policy, tasks, trials, Sampling(temperature=0.5, max_tokens=6), seed)


def played(run: SimulatedRun, plan: Plan, dice: int, chaos: Chaos | None = None, crash: str = "") -> list[Episode]:
    """What comes of `plan` in virtual time, where `chaos` reigns and `crash` dies in the middle of it."""
    plan.folder.mkdir()
    tensors = {"w": np.arange(4, dtype=np.int32)}
    with Simulation(dice, chaos) as run.simulation:
        simulation = run.simulation
        if crash:
            simulation.loop.call_later(3.0, simulation.crash, crash)
        parts = Parts(str(run.model_folder), lambda name: SeededEngine(name, run))
        found: list[Episode] = simulation.run(
            lambda context: evaluating.lead(context, plan, parts, checksum_of(tensors), tensors)
        )
        assert not simulation.actors, "its company ends with it"
        assert not crash or crash in [name for _, name in simulation.crashes]
    return found


def test_the_same_seed_gives_the_same_outcomes_whatever_dies_or_is_lost(simulated_run: Any, tmp_path: Path) -> None:
    run = simulated_run()
    quiet = played(run, plan_of(run, tmp_path / "quiet"), 1)
    storm = Chaos(lose_request=0.02, lose_reply=0.02)
    assert [(e.task, e.trial) for e in quiet] == [(f"heldout/{i}", trial) for i in range(3) for trial in range(2)]
    for crash in ("env-0", "generator-0", "dispatcher", "store"):
        assert played(run, plan_of(run, tmp_path / crash), 2, storm, crash) == quiet, crash
    assert played(run, plan_of(run, tmp_path / "other", seed=8), 1) != quiet


def test_nothing_is_trained_and_nothing_is_written_into_the_run(trained: SimulatedRun, tmp_path: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in trained.folder.rglob("*")}
    steps = len(trained.trained)
    plan = plan_of(trained, trained.folder / "evals")
    played(trained, plan, 3)
    rows = committed(plan.folder / "trajectories").to_pylist()
    assert len(rows) == plan.episodes and {(row["kind"], row["trains"]) for row in rows} == {("eval", False)}
    assert {json.loads(row["sampling"])["temperature"] for row in rows} == {0.5}
    assert len(trained.trained) == steps
    actors = {row.get("actor") for row in journal.read(str(plan.folder / "journal.jsonl"))}
    assert {"store", "dispatcher", "env-0", "generator-0"} <= actors and actors.isdisjoint({"learner", "evaluator"})
    after = {p: p.stat().st_mtime_ns for p in trained.folder.rglob("*") if plan.folder not in (p, *p.parents)}
    assert after == before


def test_episodes_that_break_are_counted_beside_the_trials_and_end_nothing(simulated_run: Any, tmp_path: Path) -> None:
    run = simulated_run(env__options={"turns": 2, "fail": 0.3}, rollout__attempts=2, rollout__quarantine_after=1)
    plan = plan_of(run, tmp_path / "broken", count=8, trials=4)
    episodes = played(run, plan, 4)
    broken = {e.task for e in episodes if e.success is None}
    assert 0 < len(broken) < 8
    assert broken.isdisjoint(e.task for e in episodes if e.success is not None), "a task of this world breaks always or never"
    found = document_of(plan, episodes)
    assert found["scores"]["all"]["trials"] + found["scores"]["all"]["broken"] == plan.episodes == 32
    assert found["scores"]["all"]["broken"] == 4 * len(broken) == sum(row["episodes"] for row in found["broken"])
    assert all("fails by the task's seed" in row["reason"] for row in found["broken"])
    good = [e.success for e in episodes if e.success is not None]
    assert found["scores"]["all"]["success"]["value"] == pytest.approx(sum(good) / len(good))


def test_an_evaluation_that_does_not_advance_is_given_up(simulated_run: Any, tmp_path: Path, monkeypatch: Any) -> None:
    run = simulated_run(env__options={"turns": 2, "sleep": 20.0}, rollout__episode_s=100.0)
    monkeypatch.setattr(evaluating, "_SLACK_S", -90.0)
    with pytest.raises(TroupeError, match="no episode has ended for 10 s, 6 are in flight"):
        played(run, plan_of(run, tmp_path / "stuck"), 5)


# -- what it came to -------------------------------------------------------------------------------------------------


def document_of(plan: Plan, episodes: list[Episode], ks: Any = (2,), contaminated: Any = None) -> dict[str, Any]:
    return eval_report.document(
        plan, episodes, ks, checksum="c", contaminated=contaminated or {}, chosen="held-out", at="now", seconds=1.0
    )


@pytest.fixture
def example(simulated_run: Any, tmp_path: Path) -> tuple[Plan, list[Episode]]:
    """Two tasks of four trials: one with two successes, one with one and an episode that broke."""
    plan = plan_of(simulated_run(), tmp_path / "example", count=2, trials=4)
    outcomes = {"heldout/0": [True, True, False, False], "heldout/1": [True, False, False, None]}
    episodes = [
        Episode(task, trial, success, float(bool(success)), 2 + trial, 10 * trial, "" if success is not None else "data: no")
        for task, of_task in outcomes.items()
        for trial, success in enumerate(of_task)
    ]
    return plan, episodes


def test_the_document_says_what_the_formulas_say(example: tuple[Plan, list[Episode]]) -> None:
    plan, episodes = example
    found = json.loads(eval_report.text_of(document_of(plan, episodes)))
    scores = found["scores"]["all"]
    assert (scores["trials"], scores["broken"]) == (7, 1)
    assert scores["success"]["value"] == pytest.approx(3 / 7)
    assert scores["avg"]["value"] == pytest.approx((2 / 4 + 1 / 3) / 2)
    assert scores["pass_at"]["2"]["value"] == pytest.approx(((1 - 1 / 6) + (1 - 1 / 3)) / 2)  # C(2,2)/C(4,2), C(2,2)/C(3,2)
    assert scores["pass_hat"]["2"]["value"] == pytest.approx((1 / 6 + 0) / 2)
    assert scores["turns"] == pytest.approx((2 + 3 + 4 + 5 + 2 + 3 + 4) / 7)
    assert scores["tokens"] == pytest.approx((0 + 10 + 20 + 30 + 0 + 10 + 20) / 7)
    assert found["tasks"][1]["outcomes"] == [True, False, False, None]
    assert (found["tasks"][1]["trials"], found["tasks"][1]["broken"]) == (3, 1)
    assert found["broken"] == [{"reason": "data: no", "episodes": 1}]
    assert (found["sampling"]["temperature"], found["seed"], found["world"]["name"]) == (0.5, 7, "echo")
    assert found["scores"]["clean"] is None and found["contaminated"] == {}


def test_contaminated_tasks_are_marked_and_scored_apart(example: tuple[Plan, list[Episode]]) -> None:
    plan, episodes = example
    found = document_of(plan, episodes, contaminated={"heldout/1": "runs/x"})
    assert found["scores"]["clean"]["success"]["value"] == 1 / 2
    assert found["scores"]["contaminated"]["success"]["value"] == pytest.approx(1 / 3)
    assert [task["contaminated"] for task in found["tasks"]] == [False, True]
    page = eval_report.page(found, 140)
    assert "clean" in page and "contaminated" in page and page.count("trained on") == 1


def test_the_page_shows_the_worst_tasks_first_and_says_what_it_leaves_out(
    example: tuple[Plan, list[Episode]], monkeypatch: Any
) -> None:
    found = document_of(*example)
    monkeypatch.setattr(eval_report, "_SHOWN", 1)
    page = eval_report.page(found, 140)
    assert "heldout/1" in page and "heldout/0" not in page and "and 1 tasks that went no worse" in page
    assert "0.429 [0.333, 0.500] on 2 tasks" in page and "pass^2" in page and "1 × data: no" in page
    every = eval_report.page(found, 140, every_task=True)
    assert every.index("heldout/1") < every.index("heldout/0")


def test_without_a_single_trial_there_is_no_number(example: tuple[Plan, list[Episode]]) -> None:
    plan, episodes = example
    for episode in episodes:
        episode.success, episode.failure = None, "infrastructure: gone"
    found = json.loads(eval_report.text_of(document_of(plan, episodes)))
    assert found["scores"]["all"]["success"]["value"] is None and found["tasks"][0]["success"] is None
    assert "0.0" not in eval_report.page(found, 140).split("max_tokens")[1]


# -- tasks and contamination -----------------------------------------------------------------------------------------


def newest(run: SimulatedRun) -> Path:
    return run.folder / "checkpoints" / "step-2"


def test_tasks_that_were_trained_on_are_refused_unless_forced(trained: SimulatedRun) -> None:
    history = history_of(newest(trained))
    stored = [row for row in Run(trained.folder).trajectories().to_pylist() if row["kind"] == "train"]
    assert {task.id for task in history.tasks} == {row["task_id"] for row in stored}
    seen = choose("train", 3, WORLD, history)
    assert seen == history.tasks[:3]
    assert guard(choose("held-out", 50, WORLD, history), history, force=False) == {}
    mixed = [WORLD.task("heldout", 0), *seen]
    with pytest.raises(ConfigError, match=r"^3 of 4 tasks were trained on, in '.*run-1' \(train/10007, .*--force$"):
        guard(mixed, history, force=False)
    assert guard(mixed, history, force=True) == {task.id: str(trained.folder) for task in seen}


def test_a_task_under_another_id_is_still_the_task_and_so_is_what_was_demonstrated(trained: SimulatedRun) -> None:
    history = history_of(newest(trained))
    renamed = WORLD.task("train", history.tasks[0].seed)
    renamed.id = "brand new"
    assert history.run_of(renamed) == str(trained.folder)
    assert history.run_of(WORLD.task("train", 9_000_000_000)) == str(trained.folder)  # the first demonstration
    assert history.run_of(WORLD.task("train", 9_000_000_004)) is None  # there were four
    other = WORLD.task("train", history.tasks[0].seed)
    other.env = "another world"
    assert history.run_of(other) is None


def test_an_older_checkpoint_has_seen_only_the_steps_before_it(trained: SimulatedRun) -> None:
    first = history_of(trained.folder / "checkpoints" / "step-1")
    assert {task.seed // 10_000 for task in first.tasks} == {1}
    assert {task.seed // 10_000 for task in history_of(newest(trained)).tasks} == {1, 2}
    assert history_of(trained.folder / "checkpoints" / "step-0").tasks == []


def test_what_the_run_before_trained_on_counts_too(trained: SimulatedRun, simulated_run: Any) -> None:
    later = simulated_run(steps=2, seed=5, model={"path": str(newest(trained) / "model")})
    (later.folder / "checkpoints" / "step-0").mkdir()
    history = history_of(later.folder / "checkpoints" / "step-0")
    assert history.run_of(history_of(newest(trained)).tasks[0]) == str(trained.folder)


def test_a_model_that_no_run_made_has_no_history(model_folder: Path) -> None:
    assert history_of(model_folder).seen == {} and history_of(None).seen == {}


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("{", "line 2 is not JSON"),
        ("[1]", "line 2 is no object"),
        ('{"sed": 1}', "unknown key 'sed'. Did you mean 'seed'"),
        ('{"split": "heldout"}', 'line 2 has no "seed"'),
        ('{"seed": 18446744073709551616}', 'no "seed" of 64 bits'),
        ('{"seed": "1"}', "'seed' is '1', not of type int"),
        ('{"seed": 3}', "there is a task 'heldout/3' already"),
    ],
)
def test_a_malformed_file_of_tasks_is_refused_by_line(tmp_path: Path, line: str, reason: str) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text(f'{{"seed": 3}}\n{line}\n')
    with pytest.raises(ConfigError) as error:
        choose(str(file), 0, WORLD, history_of(None))
    assert reason in str(error.value) and "\n" not in str(error.value)


def test_a_file_gives_its_tasks_in_order(tmp_path: Path) -> None:
    file = tmp_path / "tasks.jsonl"
    file.write_text('{"seed": 3}\n\n{"id": "mine", "split": "train", "seed": 1, "data": {"x": 1}}\n')
    one, two = choose(str(file), 0, WORLD, history_of(None))
    assert one == WORLD.task("heldout", 3)
    assert (two.id, two.env, two.split, two.seed, two.data) == ("mine", "echo", "train", 1, {"x": 1})
    assert choose(str(file), 1, WORLD, history_of(None)) == [one]


# -- the command -----------------------------------------------------------------------------------------------------


def command(*arguments: str) -> Any:
    app = typer.Typer()
    eval_commands.register(app)
    return CliRunner().invoke(app, arguments)


@pytest.mark.parametrize(
    ("flags", "reason"),
    [
        (["--trials", "0"], "--trials is 0"),
        (["--count", "0"], "--count is 0"),
        (["--trials", "2", "--k", "1,4"], "--k 4 needs as many trials of a task, and there are 2"),
        (["--k", "0"], "--k is 0"),
        (["--k", "two"], "--k 'two'"),
        (["--format", "yaml"], "unknown format 'yaml'"),
        (["--env", "frozen_lak"], "Did you mean 'frozen_lake'"),
        (["--checkpoint", "step-9"], "no checkpoint 'step-9'"),
        (["--temperature", "-1"], "temperature must be 0"),
        (["--top-p", "0"], "top_p must be above 0"),
        (["--max-tokens", "0"], "max_tokens must be at least 1"),
        (["--tasks", "held-ot"], "Did you mean 'held-out'"),
        (["--tasks", "train"], "were trained on"),
        (["--output", "/nowhere/at/all.json"], "there is no folder '/nowhere/at'"),
        (["--model", "smollm2-135m"], "one of them"),
        (["--set", "env.options.turms=3"], "no option 'turms'"),
    ],
)
def test_a_wish_that_makes_no_sense_is_refused_before_anything_starts(
    trained: SimulatedRun, monkeypatch: Any, flags: list[str], reason: str
) -> None:
    for folder in (trained.folder / "checkpoints").iterdir():
        (folder / "trainer.json").write_text(json.dumps({"step": int(folder.name[5:]), "checksum": "c"}))
    monkeypatch.setattr(evaluating, "evaluate", lambda *_: pytest.fail("it started"))
    result = command(str(trained.folder), *flags)
    assert isinstance(result.exception, TroupeError), result.output or result.exception
    assert reason in str(result.exception) and "\n" not in str(result.exception)
    assert not (trained.folder / "evals").exists()


def test_a_run_without_a_checkpoint_and_a_model_without_a_world_are_refused(simulated_run: Any) -> None:
    assert "has no checkpoint yet" in str(command(str(simulated_run().folder)).exception)
    assert "--env" in str(command("--model", "smollm2-135m").exception)
    assert "name a run" in str(command().exception)


# -- for real --------------------------------------------------------------------------------------------------------

ENVIRONMENT = {name: value for name, value in os.environ.items() if not name.startswith(("RAY_", "TMPDIR"))}
SMALL = {
    "cold_start.steps": 40,
    "cold_start.demonstrations": 200,
    "rollout.groups_per_step": 2,
    "rollout.group_size": 2,
    "eval.tasks": 6,
    "eval.trials": 2,
    "env.actors": 1,
}


def troupe(*arguments: str) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "troupe", *arguments],
        cwd=ROOT,
        env=ENVIRONMENT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def finished(process: subprocess.Popen[str], code: int = 0) -> str:
    out, err = process.communicate(timeout=400)
    assert process.returncode == code, out + err
    assert not [name for name in os.listdir("/tmp") if name.startswith(f"troupe-ray-{process.pid}-")]
    return out if code == 0 else err


@pytest.fixture(scope="module")
def lake(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    run = tmp_path_factory.mktemp("lake") / "run"
    settings = [f"--set={key}={json.dumps(value)}" for key, value in SMALL.items()]
    finished(troupe("train", "recipes/frozen_lake.toml", "--run-dir", str(run), "--steps", "1", *settings))
    yield run


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
@pytest.mark.timeout(1800)
def test_two_evaluations_of_a_run_are_the_same_and_agree_with_its_own(lake: Path) -> None:
    stored = (lake / "trajectories" / "manifest.jsonl").read_bytes()
    one = json.loads(finished(troupe("eval", str(lake), "--format", "json")))
    two = json.loads(finished(troupe("eval", str(lake), "--format", "json", "--set", "env.actors=2", "--set", "env.slots=2")))
    assert one["tasks"] == two["tasks"] and one["scores"] == two["scores"]
    own = json.loads((lake / "evals.jsonl").read_text().splitlines()[-1])
    assert one["scores"]["all"]["success"]["value"] == own["success"] and one["scores"]["all"]["trials"] == own["trials"] == 12
    assert one["policy"]["step"] == own["version"] == 1
    assert one["policy"]["checksum"] == json.loads((lake / "summary.json").read_text())["weights"]["checksum"]
    assert json.loads((lake / "evals" / f"{one['name']}.json").read_text()) == one
    assert Run(lake / "evals" / one["name"]).query("SELECT count(*) AS n FROM trajectories").to_pylist() == [{"n": 12}]
    assert (lake / "trajectories" / "manifest.jsonl").read_bytes() == stored

    assert "were trained on" in finished(troupe("eval", str(lake), "--tasks", "train", "--count", "2"), code=2)
    file = lake / "forced.json"
    arguments = ("--tasks", "train", "--count", "2", "--trials", "1", "--force", "--output", str(file))
    page = finished(troupe("eval", str(lake), *arguments))
    forced = json.loads(file.read_text())
    assert page.count("trained on") == 2 and len(forced["contaminated"]) == 2
    assert forced["scores"]["contaminated"]["trials"] == 2 and forced["scores"]["clean"]["trials"] == 0


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
@pytest.mark.timeout(900)
def test_ctrl_c_ends_it_and_keeps_nothing(lake: Path) -> None:
    before = sorted((lake / "evals").iterdir()) if (lake / "evals").exists() else []
    process = troupe("eval", str(lake), "--count", "500", "--trials", "20")
    deadline = time.monotonic() + 300
    while time.monotonic() < deadline and process.poll() is None:
        if [path for path in (lake / "evals").glob("*/trajectories/*.arrow") if path.parents[1] not in before]:
            break
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    assert "Stopped; nothing is kept" in finished(process, code=130)
    assert (sorted((lake / "evals").iterdir()) if (lake / "evals").exists() else []) == before
    with pytest.raises(ConfigError, match="is not running"), launch.attached(str(lake)):
        pass
