"""`troupe baseline`: every player on the same held-out tasks, what is missing said in one line, nothing left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import asdict

import pytest
from typer.testing import CliRunner

pytest.importorskip("gymnasium", reason="gymnasium is not installed: pip install 'troupe-rl[baseline]'")

from troupe.cluster import baseline, baseline_commands
from troupe.learner.evaluation import Estimate
from troupe.protocol.errors import ConfigError


def troupe(*args):
    return subprocess.run([sys.executable, "-m", "troupe", "baseline", *args], capture_output=True, text=True, timeout=280)


def test_the_random_player_is_the_floor_and_the_scripted_one_the_ceiling():
    floor, again = (baseline.random_player("frozen_lake", {}, 40, seed=3) for _ in range(2))
    ceiling = baseline.scripted_player("frozen_lake", {}, 40, seed=3)
    assert floor == again and floor.episodes == ceiling.episodes == 40
    assert floor.success.high < ceiling.success.low and floor.reward.value == floor.success.value


def test_options_reach_the_world_of_every_player():
    options = {"sure": 0.5, "win": 1.0, "chance": 0.01}  # now the calm arm is the better one
    assert baseline.scripted_player("bandit", options, 10, 0).reward.value == 0.5
    assert baseline.random_player("bandit", {**options, "chance": 1.0}, 10, 0).reward.value >= 0.5


def test_scores_are_means_with_intervals_over_tasks():
    row = baseline.row("x", "", [(True, 2.0), (False, 0.0), (True, 1.0), (False, 0.0)], seed=0)
    assert (row.episodes, row.success.value, row.reward.value) == (4, 0.5, 0.75)
    assert row.success.low < 0.5 < row.success.high and row.reward.low < 0.75 < row.reward.high


# -- the LLM policy's row --------------------------------------------------------------------------------------------


def scores(value, trials):
    return {"success": asdict(Estimate(value, value - 0.1, value + 0.1, trials)), "reward": value, "trials": trials}


def document(step, value, options=None, tasks="held-out"):
    return {
        "chosen": {"tasks": tasks},
        "world": {"name": "guess", "options": options or {}},
        "policy": {"step": step},
        "scores": {"all": scores(value, 20), "clean": None},
    }


@pytest.fixture
def run(tmp_path):
    (tmp_path / "evals").mkdir()
    (tmp_path / "config.toml").write_text('name = "x"\nsteps = 1\n[env]\nname = "guess"\n')
    return tmp_path


def put(run, name, found):
    (run / "evals" / f"{name}.json").write_text(json.dumps(found))


def test_the_policys_row_is_the_newest_evaluation_on_held_out_tasks_of_this_very_world(run):
    put(run, "a", document(10, 0.5))
    put(run, "b", document(20, 0.7))
    put(run, "c", document(30, 0.9, options={"high": 50}))
    put(run, "d", document(40, 0.9, tasks="train"))
    (run / "evals" / "e.json").write_text("{}")
    row = baseline.policy_row(run, "guess", {})
    assert (row.success.value, row.episodes, row.what) == (0.7, 20, f"{run.name}, step 20")


def test_the_runs_own_evaluation_counts_where_it_is_newer(run):
    put(run, "a", document(10, 0.5))
    own = {"version": 12, "success": 0.25, "low": 0.1, "high": 0.4, "reward": 0.3, "turns": 2.0, "trials": 40, "failed": 0}
    own |= {"sampling": {"temperature": 1.0, "top_p": 1.0, "top_k": 0, "max_tokens": 8, "stop": []}, "seconds": 1.0}
    (run / "evals.jsonl").write_text(json.dumps(own) + "\n")
    row = baseline.policy_row(run, "guess", {})
    assert (row.success.value, row.reward.value, row.episodes, row.what) == (0.25, 0.3, 40, f"{run.name}, step 12")


def test_a_run_without_an_evaluation_or_of_another_world_is_one_line(run):
    with pytest.raises(ConfigError, match=r"has no evaluation on held-out tasks of 'guess'.*troupe eval"):
        baseline.policy_row(run, "guess", {})
    with pytest.raises(ConfigError, match="is a run in 'guess', not in 'bandit'"):
        baseline_commands._policy(str(run), "bandit", {}, given=False)
    with pytest.raises(ConfigError, match="leave out --option"):
        baseline_commands._policy(str(run), "guess", {"high": 50}, given=True)


# -- the command -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("args", "reason"),
    [
        (["search"], "no tensor form"),
        (["frozen_lak"], "Did you mean 'frozen_lake'?"),
        (["guess", "--option", "high=1"], "high is 1"),
        (["guess", "--policy", "nowhere"], "'nowhere' is no run folder"),
    ],
)
def test_what_is_missing_is_one_line_before_anything_is_played(args, reason):
    import typer

    app = typer.Typer()
    baseline_commands.register(app)
    app.command("other")(lambda: None)
    result = CliRunner().invoke(app, ["baseline", *args])
    assert isinstance(result.exception, ConfigError) and reason in str(result.exception)


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_ppo_learns_the_bandit_and_the_table_has_every_player():
    done = troupe("bandit", "--iterations", "2", "--tasks", "50", "--json")
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    rows = {row["player"]: row for row in found["rows"]}
    assert list(rows) == ["random", "RLlib PPO", "scripted"] and all(row["episodes"] == 50 for row in rows.values())
    assert rows["RLlib PPO"]["success"]["value"] > rows["random"]["success"]["high"]
    assert found["ppo"]["iterations"] == 2 and found["ppo"]["steps"] >= 2 * baseline.BATCH
    assert "Traceback" not in done.stderr and "WARNING" not in done.stderr


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
def test_one_ctrl_c_ends_it_with_nothing_left_behind(tmp_path):
    command = [sys.executable, "-m", "troupe", "baseline", "bandit", "--seconds", "600"]
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    try:
        said = ""
        while "iteration 1" not in said:
            said = process.stderr.readline()
            assert said, process.stdout.read()
        process.send_signal(signal.SIGINT)
        _, err = process.communicate(timeout=120)
        assert process.returncode == 130 and "Stopped; nothing is kept." in err and "Traceback" not in err, err
    finally:
        process.kill()
        process.wait()
    until = time.monotonic() + 20
    while (left := [p.name for p in tmp_path.iterdir()]) and time.monotonic() < until:
        time.sleep(0.2)
    assert left == []
