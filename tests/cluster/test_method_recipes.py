"""The recipes of published methods: each does what its comment says against GRPO, that and nothing else, and can be run."""

from __future__ import annotations

import asyncio
import itertools
import json
import math
import os
import re
import signal
import subprocess
import sys
from itertools import takewhile
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from troupe.actors import loops
from troupe.actors.settings import RunConfig
from troupe.cluster import config as recipes
from troupe.envs import registry
from troupe.envs.drive import Driver
from troupe.learner import advantages, composition
from troupe.learner.config import KlSettings, ModelConfig, OverlongSettings, ToolCostSettings
from troupe.learner.rewards import return_of
from troupe.protocol.trajectory import ENVIRONMENT, POLICY, Node, Step, Task, Trajectory

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "recipes" / "methods").glob("*.toml"))
NAMES = [path.stem for path in RECIPES]

SIZES = {"learner.lr", "learner.cold_start_lr", "rollout.groups_per_step", "rollout.group_size", "rollout.max_tokens"}
"""What may differ between recipes without being a method."""

SOFT_OVERLONG = {"learner.overlong": OverlongSettings(limit=256, buffer=64).model_dump()}
DYNAMIC_SAMPLING = {"rollout.filter": "informative"}
NO_KL = {"learner.kl": None}
AGAINST_GRPO: dict[str, dict[str, Any]] = {
    "grpo": {},
    "dr_grpo": {"learner.advantage": "dr_grpo", "learner.aggregate": "constant", "learner.aggregate_length": 256, **NO_KL},
    "dapo": {
        "learner.clip_high": 0.28,
        "learner.aggregate": "token-mean",
        **SOFT_OVERLONG,
        **DYNAMIC_SAMPLING,
        **NO_KL,
    },
    "gspo": {"learner.loss": "gspo", "learner.clip_low": 3e-4, "learner.clip_high": 4e-4},
    "cispo": {
        "learner.loss": "cispo",
        "learner.clip_low": 0.999,
        "learner.clip_high": 0.28,
        "learner.aggregate": "token-mean",
        **SOFT_OVERLONG,
        **DYNAMIC_SAMPLING,
        **NO_KL,
    },
    "starpo": {"learner.advantage": "starpo"},
    "starpo_s": {"learner.advantage": "gae", "learner.filter": "top_std", "learner.clip_high": 0.28, **NO_KL},
    "gigpo": {"learner.advantage": "gigpo", "learner.turn_gamma": 0.95},
    "prorl": {
        "learner.kl": KlSettings(coef=0.04, reset_every=20, reset_optimiser=True).model_dump(),
        "learner.clip_high": 0.4,
        "rollout.temperature": 1.2,
        **DYNAMIC_SAMPLING,
    },
    "treepo": {"learner.advantage": "treepo", "rollout.tree": 2, "rollout.tree_segment": 4},
    "pass_at_k": {"learner.advantage": "pass_at_k"},
    "aspo": {"learner.advantage": "aspo"},
    "eto": {"learner.objective": "preference", "learner.passes": 3, "learner.minibatches": 1, **NO_KL},
    "search_r1": {
        "learner.advantage": "gae",
        "learner.kl": KlSettings(coef=1e-3, estimator="k1", where="reward").model_dump(),
    },
    "r1_searcher": {
        "learner.advantage": "reinforce_pp",
        "learner.kl": KlSettings(coef=1e-4, estimator="k1", where="reward").model_dump(),
        "learner.stages": [
            {"from_step": 1, "reward_parts": {"outcome": 0.0, "retrieval": 1.0, "format": 1.0, "penalty": 0.0}},
            {"from_step": 9, "reward_parts": {"outcome": 1.0, "retrieval": 0.0, "format": 0.0, "penalty": 1.0}},
        ],
    },
    "step_grpo": {},
    "toolrl": {**NO_KL},
    "otc_po": {"learner.tool_cost": ToolCostSettings().model_dump()},
    "retool": {"learner.advantage": "gae", **NO_KL},
    "torl": {"rollout.stop": ["</code>"], **NO_KL},
    "swe_rl": {},
}
DEFAULTS: dict[str, dict[str, Any]] = {  # what the method needs and a default already gives
    "starpo_s": {"gamma": 1.0, "gae_lambda": 1.0, "filter_value": 0.25, "clip_low": 0.2},
    "gigpo": {"gigpo_weight": 1.0, "gigpo_norm": "mean"},
    "pass_at_k": {"pass_k": 4},
    "aspo": {"aspo_delta": -2.0, "aspo_cap": 0.7},
    "eto": {"dpo_beta": 0.1},
    "search_r1": {"gamma": 1.0, "gae_lambda": 1.0},
    "r1_searcher": {"gamma": 1.0, "whiten": "auto"},
    "retool": {"gamma": 1.0, "gae_lambda": 1.0},
}
METHODS = """GRPO, Dr. GRPO, DAPO, GSPO, CISPO, StarPO, StarPO-S, GiGPO, Step-GRPO, ProRL, TreePO, Pass@k training, ToolRL,
OTC-PO, ASPO, ReTool, ToRL, ETO, Search-R1, R1-Searcher, SWE-RL"""


def load(name: str) -> RunConfig:
    return recipes.read(str(ROOT / "recipes" / "methods" / f"{name}.toml"))


def comment(name: str) -> str:
    """The comment that opens the recipe, on one line."""
    lines = (ROOT / "recipes" / "methods" / f"{name}.toml").read_text().splitlines()
    return " ".join(line.lstrip("# ") for line in takewhile(lambda line: line.startswith("#"), lines))


def settings(config: RunConfig) -> dict[str, Any]:
    """What [learner] and [rollout] say, by section.key."""
    data = config.model_dump()
    return {f"{section}.{key}": value for section in ("learner", "rollout") for key, value in data[section].items()}


def test_each_recipe_is_described_here() -> None:
    assert set(NAMES) == set(AGAINST_GRPO)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_changes_against_grpo_what_its_method_says_and_nothing_else(name: str) -> None:
    mine, grpo = settings(load(name)), settings(load("grpo"))
    assert {key: value for key, value in mine.items() if key not in SIZES and grpo[key] != value} == AGAINST_GRPO[name]
    learner = load(name).learner.model_dump()
    assert {key: learner[key] for key in DEFAULTS.get(name, {})} == DEFAULTS.get(name, {})


@pytest.mark.parametrize("name", NAMES)
def test_the_comment_cites_the_source_and_names_every_change(name: str) -> None:
    source, found, against = comment(name).partition("Against GRPO: ")
    assert re.search(r"arXiv:\d{4}\.\d{5}", source) and found
    for key, value in AGAINST_GRPO[name].items():
        named = key.partition(".")[2]
        assert re.search(rf"\b{named}\b", against), f"{name}: {named}"
        if named in ("advantage", "loss"):
            assert f"{named} = {value}" in against
        if named == "kl":
            assert ("no kl" in against) == (value is None)


@pytest.mark.parametrize("name", NAMES)
def test_a_recipe_fits_together_and_its_world_can_be_made(name: str) -> None:
    config = load(name)
    world = registry.find(config.env.name)
    registry.make(world, config.env.options)
    loops.choose(config.agent, world)
    composition.check(config.learner, config.model_settings(""))
    assert config.model.path or next(iter(world.corpus()), None) is not None
    assert config.name == name and config.eval.tasks


@pytest.mark.parametrize("name", NAMES)
def test_no_part_of_a_method_is_without_effect_by_construction(name: str) -> None:
    """A clip needs a ratio that leaves 1, a deviation and k of n need a group, an anchor a state, a limit an episode."""
    config = load(name)
    learner, rollout = config.learner, config.rollout
    world = registry.find(config.env.name)
    turns = config.env.max_turns or world.max_turns
    assert learner.passes * learner.minibatches > 1
    assert rollout.group_size >= max(2, learner.pass_k if learner.advantage == "pass_at_k" else 2)
    if learner.filter == "top_std":
        assert rollout.groups_per_step * learner.filter_value >= 1
    if learner.advantage == "gigpo":
        assert world.state_key is not registry.TextWorld.state_key
    if learner.advantage == "aspo" or learner.tool_cost is not None:
        assert loops.choose(config.agent, world) is loops.react
    if name == "step_grpo":
        assert config.env.options["progress"] > 0
    if name in ("retool", "torl"):
        assert config.env.name == "math_code" and (config.cold_start.steps > 0) == (name == "retool")
    if learner.overlong is not None:
        assert learner.overlong.limit <= turns * rollout.max_tokens
    if learner.aggregate == "constant":
        assert learner.aggregate_length == turns * rollout.max_tokens
    if learner.kl is not None and learner.kl.reset_every:
        assert learner.kl.reset_every < config.steps
    if learner.stages:
        assert learner.stages[-1].from_step <= config.steps
        assert all(set(stage.reward_parts) == parts_of(config) for stage in learner.stages)


def parts_of(config: RunConfig) -> set[str]:
    """Names of the parts of a reward in the recipe's world."""

    async def judged() -> set[str]:
        driver = Driver(registry.make(registry.find(config.env.name), config.env.options))
        await driver.reset(driver.world.task("train", 0))
        turn = await driver.verify()
        await driver.close()
        return set(turn.parts if turn else ())

    return asyncio.run(judged())


def test_r1_searcher_pays_in_each_stage_what_the_paper_says() -> None:
    """(searched, well-formed, F1 of the answer) → equations 1 and 2, then 3 and 4."""
    learner = load("r1_searcher").learner
    for searched, formed, f1 in itertools.product((False, True), (False, True), (0.0, 0.8)):
        parts = {"outcome": f1, "retrieval": 0.5 * searched, "format": 0.5 * formed, "penalty": 0.0 if formed else -2.0}
        t = trajectory(0)
        t.steps[-1] = Step(reward=sum(parts.values()), parts=parts)
        t.reward = t.steps[-1].reward
        paid = [return_of(t, learner.at(step)) for step in (1, 8, 9, 20)]
        first, second = 0.5 * searched + 0.5 * formed, f1 - 2 * (not formed)
        assert paid == pytest.approx([first, first, second, second])


def node(rng: np.random.Generator, parent: int, provenance: int, step: int) -> Node:
    n = 5
    k = n if provenance == POLICY else 0
    return Node(
        parent=parent,
        role="assistant" if provenance == POLICY else "user",
        step=step,
        tokens=rng.integers(0, 200, n).astype(np.int32),
        provenance=np.full(n, provenance, np.uint8),
        logprobs=rng.normal(-5.5, 0.2, k).astype(np.float32),
        versions=np.zeros(k, np.int32),
    )


def trajectory(index: int) -> Trajectory:
    """Two turns from the state s, of the group that starts there, with a reward of 1 for every third."""
    rng = np.random.default_rng(index)
    nodes: list[Node] = []
    for turn in range(2):
        nodes.append(node(rng, len(nodes) - 1, ENVIRONMENT, turn))
        nodes.append(node(rng, len(nodes) - 1, POLICY, turn))
    reward = float(index % 3 == 0)
    return Trajectory(
        id=f"e{index:02d}",
        attempt=0,
        group=index // 8,
        member=index % 8,
        kind="train",
        step=1,
        task=Task("t", "world", "train", index // 8),
        status="completed",
        stop="terminated",
        nodes=nodes,
        steps=[Step(state_key="s"), Step(reward=reward)],
        reward=reward,
        success=bool(reward),
        sampling={"temperature": 1.0},
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_recipes_learner_takes_a_training_step(name: str, tmp_path: Path) -> None:
    from troupe.learner.tiny import make_tiny
    from troupe.learner.trainer import Trainer

    folder = make_tiny(tmp_path / "tiny", ["some words"], hidden=16, layers=1, heads=2, mlp=24, context=64)
    trainer = Trainer(load(name).learner, ModelConfig(path=str(folder)), seed=0)
    before = trainer.tensors()
    metrics = trainer.train([trajectory(i) for i in range(16)])
    assert all(math.isfinite(value) for value in metrics.values())
    assert any((array != before[key]).any() for key, array in trainer.tensors().items())


def test_starpo_and_grpo_compute_the_same_as_its_recipe_says() -> None:
    group = advantages.Group([trajectory(i) for i in range(8)], np.array([1.0, 0, 0, 1, 0, 0, 1, 0]))
    one, other = (advantages.find(name)(group) for name in ("starpo", "grpo"))
    assert np.array_equal(one, other)


def test_the_documentation_tells_of_every_method_once_and_links_every_recipe() -> None:
    text = (ROOT / "docs" / "methods.md").read_text()
    rows = [row.split("|")[1].strip() for row in text.splitlines() if row.startswith("| ")]
    for method in re.split(r",\s", METHODS):
        assert rows.count(method) == 1, method
    assert set(re.findall(r"\(\.\./recipes/methods/(\w+)\.toml\)", text)) == set(NAMES)


@pytest.mark.slow
@pytest.mark.xdist_group("ray")
@pytest.mark.parametrize("name", ["gspo", "starpo_s", "gigpo", "treepo"])
def test_a_recipe_runs_a_step(name: str, tmp_path: Path) -> None:
    small = {
        "steps": 1,
        "cold_start.steps": 6,
        "cold_start.demonstrations": 64,
        "cold_start.batch": 8,
        "rollout.groups_per_step": 4,
        "rollout.group_size": 4,
        "eval.tasks": 4,
        "env.slots": 8,
    }
    flags = [f"--set={key}={json.dumps(value)}" for key, value in small.items()]
    run = tmp_path / "run"
    command = [sys.executable, "-m", "troupe", "train", f"recipes/methods/{name}.toml", "--run-dir", str(run), *flags]
    environment = {key: value for key, value in os.environ.items() if not key.startswith(("RAY_", "TMPDIR"))}
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    try:
        output, _ = process.communicate(timeout=240)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)
            process.communicate(timeout=60)
    assert process.returncode == 0, output
    summary = json.loads((run / "summary.json").read_text())
    assert (summary["finished"], summary["steps"]) == (True, 1)
