"""The learner alone: stored data to weights without Ray, and steps of a run again, to the byte."""

from __future__ import annotations

import asyncio
import json
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pyarrow as pa
import pyarrow.feather as feather
import pyarrow.parquet as pq
import pytest

from troupe.actors import journal
from troupe.actors.settings import RunConfig
from troupe.actors.store import Store
from troupe.cluster import config as recipes
from troupe.learner import train
from troupe.learner.config import LearnerConfig, ModelConfig
from troupe.learner.trainer import Trainer
from troupe.protocol import arrow, stored
from troupe.protocol.checksum import checksum_of
from troupe.protocol.messages import CommitGroup, Deposit
from troupe.protocol.trajectory import Failure, Trajectory

CONTEXT: Any = SimpleNamespace(
    name="store", rng=random.Random(0), clock=SimpleNamespace(now=lambda: 0.0), blobs=SimpleNamespace()
)
STEPS, GROUPS, SIZE = 4, 2, 3
SETTINGS = {"lr": 3e-3, "device": "cpu", "passes": 2}
Make = Callable[..., Trajectory]
Command = Callable[..., tuple[int, str, str]]


@pytest.fixture
def command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs the command in this process: (exit code, standard output, standard error)."""

    def run(*arguments: Any) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["train", *map(str, arguments)])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            train.main()
        return (int(ended.value.code or 0), *capsys.readouterr())

    return run


def make_store(folder: Path, make: Make) -> None:
    """Four steps of two groups of three; after the first two an evaluation, a group that does not train, a failure."""

    async def fill() -> None:
        store = Store(CONTEXT, str(folder))
        await store.start()
        number = 0

        async def put(step: int, *, kind: Any = "train", trains: bool = True, broken: bool = False) -> None:
            nonlocal number
            number += 1
            names = []
            for member in range(SIZE):
                t = make(number * SIZE + member, number, float(member == number % SIZE))
                t.kind, t.step, t.success = kind, step, t.reward > 0
                if broken and member == 1:
                    t.status, t.stop, t.failure = "failed", "failed", Failure("infrastructure", "E", "it broke")
                assert (await store.deposit(Deposit(t))).accepted
                names.append(t.id)
            assert (await store.commit(CommitGroup(number, kind, step, names, trains))).accepted

        for step in range(1, STEPS + 1):
            if step == 3:
                await put(2, kind="eval", trains=False)
                await put(2, trains=False)
            for group in range(GROUPS):
                await put(step, broken=step == 3 and group == 0)
        await store.close()

    asyncio.run(fill())


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory, tiny: str, make_trajectory: Make) -> Path:
    """A run folder: what store, trainer and journal write in a run. Tests that change it make a copy."""
    run = tmp_path_factory.mktemp("run")
    sections = {"learner": SETTINGS, "cold_start": {"steps": 1}, "rollout": {"groups_per_step": GROUPS}}
    recipes.write(RunConfig.model_validate({"seed": 5, **sections}), run / "config.toml")
    shutil.copytree(tiny, run / "model")
    make_store(run / "trajectories", make_trajectory)
    trainer = Trainer(LearnerConfig(**SETTINGS), ModelConfig(path=tiny), seed=5)
    journal.append(str(run / "journal.jsonl"), event="begun", device="cpu", torch="2.0")
    groups = stored.manifest(run / "trajectories").groups
    for step in range(STEPS + 1):
        if step:
            batch = stored.training(run / "trajectories", [g for g in groups if g.trains and g.step == step])
            journal.append(str(run / "metrics.jsonl"), step=step, **trainer.train(arrow.from_table(batch)))
        about = {"version": step, "checksum": checksum_of(trainer.tensors())}
        journal.append(str(run / "journal.jsonl"), event="announced", **about)
        if step in (0, 2):
            trainer.save(run / "checkpoints" / f"step-{step}")
    return run


@pytest.fixture
def run(made: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(made, tmp_path / "run"))


def announced(run: Path) -> dict[int, str]:
    rows = journal.read(str(run / "journal.jsonl"))
    return {row["version"]: row["checksum"] for row in rows if row["event"] == "announced"}


def written(run: Path, file: Path, change: Callable[[pa.Table], pa.Table] = lambda table: table) -> Path:
    feather.write_feather(change(stored.committed(run / "trajectories")), file)
    return file


# -- steps of a run --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("step", "begins"), [(1, 1), (2, 1), (3, 3), (4, 3), (None, 3)])
def test_a_step_of_a_run_is_taken_again_to_the_byte(made: Path, command: Command, step: int | None, begins: int) -> None:
    code, out, err = command("--run", made, *(["--step", step] if step else []))
    lines = [
        f"step {k}: weights equal to the run's, to the byte ({announced(made)[k]})" for k in range(begins, (step or STEPS) + 1)
    ]
    assert (code, out.splitlines()) == (0, lines)
    assert f"step {begins - 1}   weights {announced(made)[begins - 1]}" in err


def test_another_learning_rate_differs_and_says_where_first(made: Path, command: Command) -> None:
    code, out, _ = command("--run", made, "--step", 3, "--set", "learner.lr=1e-3")
    assert code == 1
    assert out.startswith("step 3: differs from the run: loss ")
    assert (
        "grad_norm" in out
        and "weights" in out
        and "here cpu, 1 threads, 1 ranks, torch" in out
        and "the run cpu, 1 threads, 1 ranks, torch 2.0" in out
    )


def test_what_the_run_recorded_is_what_is_compared(run: Path, command: Command) -> None:
    """A metric off by the last digit, a checksum off by one, a checkpoint of other weights: each is told."""
    rows = journal.read(str(run / "metrics.jsonl"))
    rows[2]["entropy"] += 1e-15 * rows[2]["entropy"] * 2
    (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    code, out, _ = command("--run", run, "--step", 3)
    assert code == 1 and out.startswith("step 3: differs from the run: entropy ") and "weights" not in out

    text = (run / "journal.jsonl").read_text()
    (run / "journal.jsonl").write_text(text.replace(announced(run)[4], "0" * 16).replace(announced(run)[2], "1" * 16))
    code, out, _ = command("--run", run, "--step", 4)
    assert code == 1
    assert "step 4: differs from the run: weights" in out and "0" * 16 in out
    assert "version 2, where this begins, is not the run's" in out


def test_json_has_one_object_a_step_and_nothing_else(made: Path, command: Command) -> None:
    code, out, err = command("--run", made, "--step", 2, "--json")
    rows = [json.loads(line) for line in out.splitlines()]
    sums = announced(made)
    assert code == 0
    assert [(r["step"], r["weights_before"], r["weights"], r["differs"]) for r in rows] == [
        (1, sums[0], sums[1], {}),
        (2, sums[1], sums[2], {}),
    ]
    recorded = journal.read(str(made / "metrics.jsonl"))[1]
    assert all(rows[1][name] == value for name, value in recorded.items() if name not in ("time", "learn_s"))
    assert "to the byte" in err


def test_a_run_without_a_cold_start_needs_no_checkpoint(run: Path, command: Command) -> None:
    shutil.rmtree(run / "checkpoints")
    text = (run / "config.toml").read_text()
    (run / "config.toml").write_text(text.replace("[cold_start]\nsteps = 1", "[cold_start]\nsteps = 0"))
    code, out, _ = command("--run", run, "--step", 1)
    assert code == 0 and "to the byte" in out


def test_a_step_that_was_not_recorded_is_taken_all_the_same(run: Path, command: Command) -> None:
    """The step at which a run broke, say."""
    for name in ("metrics.jsonl", "journal.jsonl"):
        journal.keep(str(run / name), lambda row: max(row.get("step", 0), row.get("version", 0)) < 4)
    code, out, _ = command("--run", run, "--step", 4)
    assert code == 0
    assert out.splitlines()[-1].startswith("step 4: the run recorded nothing of it to compare with; weights ")
    (run / "journal.jsonl").unlink()
    code, out, _ = command("--run", run, "--step", 3)
    assert code == 0 and "step 3: metrics equal to the run's" in out


# -- stored data -----------------------------------------------------------------------------------------------------


WITHOUT_RAY = """
import sys
ours = ("troupe.actors", "troupe.cluster", "troupe.serve", "troupe.envs")
sys.modules.update(dict.fromkeys(("ray", "duckdb", "tensorboard", "fastapi", "openai", "httpx", *ours), None))
from troupe.learner.train import app
model, config, *stored = sys.argv[1:]
for data in stored:
    app(["--data", data, "--model", model, "--config", config, "--json"], standalone_mode=False)
"""


def test_it_trains_from_a_store_and_from_a_file_without_ray_and_comes_to_the_same_bytes(made: Path, tmp_path: Path) -> None:
    """Also: in another process, and as the run did."""
    file = written(made, tmp_path / "some.arrow")
    arguments = [str(made / "model"), str(made / "config.toml"), str(made / "trajectories"), str(file)]
    done = subprocess.run(
        [sys.executable, "-c", WITHOUT_RAY, *arguments], capture_output=True, text=True, timeout=240, check=False
    )
    assert done.returncode == 0, done.stderr
    weights = [json.loads(line)["weights"] for line in done.stdout.splitlines()]
    expected = [announced(made)[step] for step in range(1, STEPS + 1)]
    assert weights == expected * 2


def test_only_what_a_run_would_train_trains(made: Path, command: Command) -> None:
    _, _, err = command("--data", made / "trajectories", "--model", made / "model", "--steps", 1)
    assert "3 trajectories left out: evaluated" in err
    assert "3 trajectories left out: of groups that do not train" in err
    assert "1 trajectories left out: failed or cancelled" in err


def test_steps_and_epochs_bound_the_work(made: Path, command: Command) -> None:
    def steps(*flags: Any) -> list[int]:
        _, out, _ = command("--data", made, "--model", made / "model", "--json", *flags)
        return [json.loads(line)["step"] for line in out.splitlines()]

    assert steps() == [1, 2, 3, 4]
    assert steps("--steps", 3) == [1, 2, 3]
    assert steps("--epochs", 2, "--steps", 6) == [1, 2, 3, 4, 5, 6]
    assert steps("--objective", "sft", "--batch", 4, "--epochs", 2) == [1, 2, 3, 4]  # 7 successes, 2 steps an epoch
    assert steps("--objective", "sft", "--batch", 4, "--all") == [1, 2, 3, 4, 5, 6]  # 23 trajectories
    assert steps("--objective", "dpo", "--epochs", 2, "--steps", 5) == [1, 2, 3, 4, 5]


def test_imitation_is_a_cold_start_on_what_the_policy_said_in_successes(made: Path, command: Command, tmp_path: Path) -> None:
    flags = ["--config", made / "config.toml", "--objective", "sft", "--batch", 4, "--epochs", 2, "--json"]
    _, out, err = command("--data", made, "--model", made / "model", *flags)
    assert "7 of 23 trajectories are imitated" in err
    table = stored.committed(made / "trajectories")
    rows = arrow.from_table(table.filter(table["trains"]).drop_columns(["trains"]))
    right = [t for t in rows if t.success and t.status == "completed"]
    samples = [sample for t in sorted(right, key=lambda t: (t.step, t.id)) for sample in t.samples()]
    trainer = Trainer(LearnerConfig(**SETTINGS), ModelConfig(path=str(made / "model")), seed=5)
    trainer.cold_start([s.tokens for s in samples], [s.mask for s in samples], steps=4, batch=4)
    assert json.loads(out.splitlines()[-1])["weights"] == checksum_of(trainer.tensors())

    shuffled = written(made, tmp_path / "shuffled.arrow", lambda table: table.take(list(range(table.num_rows))[::-1]))
    _, again, _ = command("--data", shuffled, "--model", made / "model", *flags)
    assert [json.loads(line)["weights"] for line in again.splitlines()] == [
        json.loads(line)["weights"] for line in out.splitlines()
    ]


def test_preferences_are_steps_on_the_pairs_of_each_batch(made: Path, command: Command) -> None:
    flags = ["--config", made / "config.toml", "--objective", "dpo", "--json"]
    _, out, _ = command("--data", made, "--model", made / "model", *flags)
    rows = [json.loads(line) for line in out.splitlines()]
    trainer = Trainer(LearnerConfig(**SETTINGS), ModelConfig(path=str(made / "model")), seed=5)
    groups = stored.manifest(made / "trajectories").groups
    for step in range(1, STEPS + 1):
        batch = stored.training(made / "trajectories", [g for g in groups if g.trains and g.step == step])
        trainer.prefer(arrow.from_table(batch))
    assert rows[-1]["weights"] == checksum_of(trainer.tensors())
    assert [row["pairs"] for row in rows] == [2, 2, 1, 2]


def test_going_on_from_what_was_saved_is_never_having_stopped(made: Path, command: Command, tmp_path: Path) -> None:
    """The saved folder is a checkpoint, optimiser included, whose model others load; it is not written over."""
    from transformers import AutoModelForCausalLM, AutoTokenizer

    first, second = tmp_path / "deep" / "first", tmp_path / "second.arrow"
    data = ["--model", made / "model", "--config", made / "config.toml"]
    code, out, _ = command("--data", made, *data, "--steps", 2, "--output", first)
    assert (code, out) == (0, f"saved to {first}; the model that others load is {first / 'model'}\n")
    AutoModelForCausalLM.from_pretrained(first / "model", local_files_only=True)
    AutoTokenizer.from_pretrained(first / "model", local_files_only=True)

    written(made, second, lambda table: table.filter(pa.compute.greater(table["step"], 2)))
    _, out, _ = command("--data", second, *data, "--from", first, "--json")
    assert [json.loads(line)["weights"] for line in out.splitlines()] == [announced(made)[3], announced(made)[4]]

    before = (first / "trainer.json").read_bytes()
    code, _, err = command("--data", made, *data, "--output", first)
    assert code == 2 and "exists already" in err
    assert (first / "trainer.json").read_bytes() == before


@pytest.mark.parametrize("kind", ["parquet", "stream", "wide", "unmarked"])
def test_files_that_others_wrote_train_the_same(made: Path, command: Command, tmp_path: Path, kind: str) -> None:
    table = stored.committed(made / "trajectories")
    file = tmp_path / "data"
    if kind == "parquet":
        pq.write_table(table, file)
    elif kind == "stream":
        with pa.OSFile(str(file), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as out:
            out.write_table(table)
    else:
        if kind == "wide":
            at = table.column_names.index("id")
            table = table.set_column(at, "id", table["id"].cast(pa.large_string()))
        table = table.replace_schema_metadata(None).drop_columns(["turns", "version_max", "fork_tokens"])
        feather.write_feather(table, file)
    code, out, _ = command("--data", file, "--model", made / "model", "--config", made / "config.toml", "--json")
    assert code == 0 and json.loads(out.splitlines()[-1])["weights"] == announced(made)[STEPS]


# -- bad input -------------------------------------------------------------------------------------------------------


def _without(*columns: str) -> Callable[[pa.Table], pa.Table]:
    return lambda table: table.drop_columns(list(columns))


def _null(table: pa.Table) -> pa.Table:
    return table.set_column(table.column_names.index("reward"), "reward", pa.nulls(table.num_rows, pa.float64()))


FILES: dict[str, Callable[[pa.Table], pa.Table]] = {
    "flat": _without("nodes", "steps"),
    "future": lambda table: table.replace_schema_metadata({arrow.VERSION_KEY: b"99"}),
    "text": lambda table: table.set_column(13, "reward", pa.array(["x"] * table.num_rows)),
    "null": _null,
    "empty": lambda table: table.slice(0, 0),
    "evals": lambda table: table.filter(pa.compute.equal(table["kind"], "eval")),
    "lost": lambda table: table.filter(pa.compute.invert(table["success"])),
    "won": lambda table: table.filter(table["success"]),
}


@pytest.mark.parametrize(
    ("arguments", "code", "says"),
    [
        ("", 2, "either --run RUN"),
        ("--run RUN --data RUN", 2, "either --run RUN"),
        ("--run RUN --steps 2", 2, "leave out --config"),
        ("--run RUN/none", 2, "is no run folder"),
        ("--run RUN --step 9", 2, "step 9 is not in 'RUN/trajectories': whole batches are there of steps 1 to 4"),
        ("--run RUN --step 2 --from RUN/checkpoints/step-2", 2, "step 2 needs a checkpoint from before it"),
        ("--run RUN --step 3 --from RUN/model", 1, "is no complete checkpoint"),
        ("--run RUN --set rollout.group_size=3", 2, "the learner alone has no key 'rollout.group_size'"),
        ("--run RUN --set learner.lr=fast", 2, "with learner.lr=fast: 'learner.lr' = 'fast'"),
        ("--run RUN --set learner.device=cuda:99", 2, "no GPU is seen here"),
        ("--run RUN --set learner.device=abacus", 2, "is no device that is known here"),
        ("--data RUN", 2, "name the model with --model"),
        ("--data RUN --model RUN/none", 2, "RUN/none' does not exist"),
        ("--data RUN --model RUN/model --step 2", 2, "--steps says how many"),
        ("--data RUN --model RUN/model --config RUN/none.toml", 2, "no recipe 'RUN/none.toml'"),
        ("--data RUN --steps few", 2, "Invalid value for '--steps'"),
        ("--data RUN --stepz 3", 2, "--steps). See: python -m troupe.learner.train --help"),
        ("--data RUN/none --model RUN/model", 2, "there is no 'RUN/none'"),
        ("--data RUN/model --model RUN/model", 2, "is no trajectory store"),
        ("--data RUN/config.toml --model RUN/model", 2, "cannot be read as Arrow or Parquet"),
        ("--data RUN --model RUN/model --output RUN/config.toml/out", 2, "cannot write 'RUN/config.toml/out': Not a directory"),
        ("--data RUN --model RUN/model --output new/" + "x" * 300, 2, "File name too long"),
        ("--data flat --model RUN/model", 2, "has no column 'steps', 'nodes'. Nested columns are left out by SQL"),
        ("--data future --model RUN/model", 1, "schema version 99"),
        ("--data text --model RUN/model", 2, "column 'reward' is string, not double"),
        ("--data null --model RUN/model", 2, "column 'reward' lacks a value in 30 rows"),
        ("--data empty --model RUN/model", 2, "holds no trajectory yet"),
        ("--data evals --model RUN/model", 2, "holds no completed training trajectory (3 evaluated)"),
        ("--data lost --model RUN/model --objective sft", 2, "trajectories succeeded: --all"),
        ("--data won --model RUN/model --objective dpo", 1, "there is nothing to prefer"),
        ("--data RUN --model small", 1, "outside of the model's vocabulary of 100"),
    ],
)
def test_bad_input_is_one_line(
    made: Path, tmp_path: Path, command: Command, monkeypatch: pytest.MonkeyPatch, arguments: str, code: int, says: str
) -> None:
    for name in FILES.keys() & set(arguments.split()):
        written(made, tmp_path / name, FILES[name])
    small = shutil.copytree(made / "model", tmp_path / "small")
    about = json.loads((small / "config.json").read_text())
    (small / "config.json").write_text(json.dumps(about | {"vocab_size": 100}))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "RUN").symlink_to(made)
    ended, out, err = command(*arguments.split(), *([] if arguments else ["--json"]))
    assert (ended, out) == (code, ""), err
    assert err.splitlines()[-1].startswith("troupe: ") and says in err.splitlines()[-1]
    assert "Traceback" not in err and not (tmp_path / "new").exists()


def test_a_run_whose_first_checkpoints_are_gone_says_which_are_there(run: Path, command: Command) -> None:
    shutil.rmtree(run / "checkpoints" / "step-0")
    code, _, err = command("--run", run, "--step", 2)
    assert code == 2 and "comes before step 2 (there: step-2): name another with --from" in err


def test_a_store_that_holds_nothing_yet_says_so(tmp_path: Path, made: Path, command: Command) -> None:
    (tmp_path / stored.MANIFEST).touch()
    code, _, err = command("--data", tmp_path, "--model", made / "model")
    assert code == 2 and "holds no trajectory yet" in err
