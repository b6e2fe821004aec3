"""The command line: bad input to any command is one clear line on standard error and a non-zero exit, and loses nothing."""

import json
import multiprocessing
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from troupe.cluster import cli

_PROCESSES = multiprocessing.get_context("forkserver")
_PROCESSES.set_forkserver_preload(  # imported once, not by each
    ["troupe.cluster.launch", "troupe.cluster.commands", "torch", "duckdb", "tokenizers"]
)

ROOT = Path(__file__).resolve().parents[2]
LAKE = str(ROOT / "recipes" / "frozen_lake.toml")
WORLDS = {
    "good.py": "from troupe.envs.base import TextWorld\n\n\nclass Good(TextWorld):\n"
    "    def reset(self, task): return 'hi'\n    def step(self, text): return 'no'\n\n\nclass Stranger: ...\n",
    "syntax.py": "class Broken(:\n",
    "raises.py": "raise RuntimeError('no such device\\nand more')\n",
}


@pytest.fixture
def troupe(tmp_path):
    """Runs the command in a folder of its own, which it must leave as it was unless told otherwise."""
    for name, text in WORLDS.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "empty").mkdir()
    (tmp_path / "bad_key.toml").write_text('steps = 3\n\n[learner]\nadvantge = "grpo"\n')
    (tmp_path / "bad_type.toml").write_text('steps = "many"\n')
    (tmp_path / "bad.toml").write_text("steps = = 3\n")
    (tmp_path / "estimator.toml").write_text('[learner]\nadvantage = "gropo"\n')
    used = tmp_path / "used"
    used.mkdir()
    (used / "config.toml").write_text('name = "used"\n[env]\nname = "echo"\n')
    (used / "precious").write_text("results")
    for name in ("far", "done"):
        (tmp_path / name / "checkpoints" / "step-27").mkdir(parents=True)
        (tmp_path / name / "config.toml").write_text(f'name = "{name}"\nsteps = 40\n[env]\nname = "echo"\n')
        (tmp_path / name / "summary.json").write_text(json.dumps({"finished": name == "done", "steps": 40}))
    env = {**os.environ, "TROUPE_MODELS": str(tmp_path / "empty"), "COLUMNS": "200", "NO_COLOR": "1"}
    for name in ("RAY_ADDRESS", "RAY_API_SERVER_ADDRESS"):
        env.pop(name, None)

    def run(*args):
        said = [tmp_path.with_name(f"{tmp_path.name}-{stream}") for stream in ("out", "err")]
        process = _PROCESSES.Process(target=command, args=(args, tmp_path, env, said))
        process.start()
        process.join(120)
        stdout, stderr = (file.read_text() for file in said)
        return SimpleNamespace(returncode=process.exitcode, stdout=stdout, stderr=stderr)

    run.env = env
    return run


def command(args, folder, env, said):
    """`troupe ARGS` in a process of its own, which has imported most of it already."""
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    for number, file in enumerate([os.devnull, *said]):
        os.dup2(os.open(file, os.O_RDWR | os.O_CREAT), number)
    sys.argv = ["troupe", *args]
    cli.main()


@pytest.mark.parametrize("module", [True, False], ids=["python -m troupe", "troupe"])
def test_the_command_is_there_by_both_its_names(troupe, tmp_path, module):
    start = [sys.executable, "-m", "troupe"] if module else [str(Path(sys.executable).with_name("troupe"))]
    done = subprocess.run([*start, "train", "bad_kee.toml"], cwd=tmp_path, env=troupe.env, capture_output=True, text=True)
    assert done.stderr == "troupe: No recipe 'bad_kee.toml'. Did you mean 'bad_key.toml'?\n" and done.returncode in (1, 2)


def tree(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in folder.rglob("*") if p.is_file() and p.suffix != ".pyc"}


TRAIN = [
    (("recipes/nope.toml",), "No recipe 'recipes/nope.toml'."),
    (("bad_kee.toml",), "No recipe 'bad_kee.toml'. Did you mean 'bad_key.toml'?"),
    (("bad_key.toml",), "bad_key.toml line 4: unknown key 'learner.advantge'. Did you mean 'learner.advantage'?"),
    (("bad_type.toml",), "bad_type.toml line 1: 'steps' = 'many': Input should be a valid integer"),
    (("bad.toml",), "bad.toml: not valid TOML"),
    ((), "name a recipe"),
    ((LAKE, "--set", "learner.lr"), "--set 'learner.lr': write it as section.key=value"),
    ((LAKE, "--set", "rollout.group_sise=4"), "unknown key 'rollout.group_sise'. Did you mean 'rollout.group_size'?"),
    ((LAKE, "--steps", "0"), "'steps' = 0"),
    ((LAKE, "--model", "./gone"), "No model './gone'"),
    ((LAKE, "--model", "empty"), "model folder 'empty' has no config.json"),
    ((LAKE, "--model", "smollm2-135m"), "run `troupe models fetch smollm2-135m`"),
    ((LAKE, "--env", "frozen_lak"), "No environment 'frozen_lak'. Did you mean 'frozen_lake'?"),
    ((LAKE, "--set", "learner.advantage=pass_at_k", "--set", "learner.pass_k=9"), "rollout.group_size at least 9"),
    ((LAKE, "--set", "learner.advantage=distill"), "name its model with learner.teacher"),
    ((LAKE, "--on-collapse", "fitler"), "with health.on_collapse=[\"fitler\"]: 'health.on_collapse.0' = 'fitler'"),
    ((LAKE, "--on-collapse", "fitler"), "Did you mean 'filter'?"),
    ((LAKE, "--set", "env.max_actors=1"), "actors = 2 is the number at the start; it is not within"),
    ((LAKE, "--set", "rollout.group_size=1"), "would teach nothing: make it 2 or more"),
    ((LAKE, "--set", "learner.minibatches=1000"), "trajectories (rollout.groups_per_step * rollout.group_size)"),
    (
        (LAKE, "--set", "learner.filter=top_std", "--set", "learner.filter_value=3"),
        "[learner]: filter = 'top_std' takes a share",
    ),
    ((LAKE, "--set", "learner.kl=0.04"), "it is a section: write [learner.kl]"),
    ((LAKE, "--set", "env.options.sise=4"), "frozen_lake has no option 'sise'. Did you mean 'size'?"),
    (("--env", "no_such_module:World"), "environment 'no_such_module:World' cannot be imported: ModuleNotFoundError"),
    (("--env", "goood.py:Good"), "environment 'goood.py:Good': no file goood.py. Did you mean 'good.py'?"),
    (("--env", "good.py:Goof"), "good.py has no 'Goof'. Did you mean 'Good'?"),
    (("--env", "good.py:Stranger"), "is not a world: derive it from troupe.envs"),
    (("--env", "syntax.py:Broken"), "environment 'syntax.py:Broken' cannot be imported: SyntaxError"),
    (("--env", "raises.py:World"), "environment 'raises.py:World' cannot be imported: RuntimeError: no such device"),
    ((LAKE, "--run-dir", "used"), "run folder 'used' exists: go on with `troupe train --resume used`"),
    ((LAKE, "--run-dir", "good.py"), "run folder 'good.py' exists"),
    (("--resume", "empty"), "'empty' is no run folder: it has no config.toml"),
    (("--resume", "gone"), "'gone' is no run folder"),
    (("--resume", "far", "--steps", "3"), "'far' is at step 27 already, and 3 is counted from the beginning of the run"),
    (("--resume", "done"), "'done' is finished, at step 40. For more of it: --resume done --steps N"),
    ((LAKE, "--set", "generator.device=cuda:-1"), "generator.device=cuda:-1"),
    ((LAKE, "--set", "generator.threads=100000"), "'generator.threads' = 100000: Input should be less than or equal to 1024"),
    ((LAKE, "--resume", "used"), "--resume takes its recipe and folder from the run"),
    ((LAKE, "--stepz", "9"), ". See: "),
    ((LAKE, "--seed", "one"), "'--seed'"),
]
OTHERS = [
    (("scale", "done", "--pools", "2"), "'done' is finished. For more of it: troupe train --resume done --steps N"),
    (("scale", "far", "--pools", "2"), "'far' is not running. Go on with: troupe train --resume far"),
    (("query", "empty", "SELECT 1"), "'empty' is not a run folder"),
    (("query", "usde", "SELECT 1"), "there is no run folder 'usde'. Did you mean 'used'?"),
    (("query", "used", "SELEKT 1"), "SELEKT"),
    (("timeline", "usde"), "there is no run folder 'usde'. Did you mean 'used'?"),
    (("timeline", "used"), "'used' tells nothing of its time yet: it does after its first step"),
    (("query", "used", "SELECT rewad FROM trajectories"), "rewad"),
    (("query", "used", "SELECT 1", "--format", "jsn"), "unknown format 'jsn', known: table, json, csv, arrow"),
    (("query", "used", "SELECT 1", "-o", "gone/x.csv"), "cannot write 'gone/x.csv'"),
    (("scale", "used", "--env-actors", "3"), "'used' is not running"),
    (("scale", "used"), "say what to scale: --pools N or --generators N"),
    (("scale", "used", "--pools", "0"), "'--pools'"),
    (("bench", "env", "echp"), "No environment 'echp'. Did you mean 'echo'?"),
    (("bench", "env", "guess", "--set", "env.options.hihg=9"), "guess has no option 'hihg'. Did you mean 'high'?"),
    (("bench", "env", "guess", "--set", "env.slotz=9"), "unknown key 'env.slotz'"),
    (("bench", "env", "guess", "--actors", "0"), "'--actors'"),
    (("scale", "empty", "--env-actors", "3"), "'empty' is no run folder"),
    (("config", "bad_key.toml"), "unknown key 'learner.advantge'"),
    (("config", "gone.toml"), "No recipe 'gone.toml'"),
    (("env", "show", "echp"), "No environment 'echp'. Did you mean 'echo'?"),
    (("env", "show", "guess", "--option", "hihg=9"), "guess has no option 'hihg'. Did you mean 'high'?"),
    (("env", "show", "guess", "--option", "high"), "--option 'high': write it as key=value"),
    (("env", "show", "guess", "--option", "high=2"), "high is 2; it is 10 to 1000000"),
    (("env", "play", "guess", "--split", "heldaut"), "no split 'heldaut': it is one of train, heldout."),
    (("env", "check", "good.py:Gone"), "good.py has no 'Gone'"),
    (("models", "fetch", "smollm"), "No model 'smollm' to fetch. Did you mean 'smollm2-135m'?"),
    (("models", "path", "smollm2-135m"), "run `troupe models fetch smollm2-135m`"),
    (("serve", "empty"), "'empty' is n"),
    (("submit", "gone.toml"), "No recipe 'gone.toml'"),
    (("trane",), "No such command 'trane'"),
]


CASES = [(("train", *args), reason) for args, reason in TRAIN] + OTHERS


@pytest.mark.parametrize(("args", "reason"), CASES, ids=[" ".join(args).replace(LAKE, "LAKE") for args, _ in CASES])
def test_bad_input_is_one_clear_line_and_loses_nothing(troupe, tmp_path, args, reason):
    before = tree(tmp_path)
    done = troupe(*args)
    assert reason in done.stderr
    assert done.stderr.startswith("troupe: ") and len(done.stderr.splitlines()) == 1
    assert done.stdout == ""
    assert done.returncode in (1, 2)
    assert tree(tmp_path) == before
