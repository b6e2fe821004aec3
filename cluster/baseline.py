"""`troupe baseline`: what other players score in the same world, so that an LLM's score can be read.

Owns the processes of a baseline: Ray is started as a run starts it and is gone afterwards, on Ctrl-C too. Promises:
- all players play the same tasks of the held-out split, in the same world object, for the same rewards; RLlib's PPO trains on
  the train split alone, through the world's tensor form (`envs/tensors.py`);
- what broke is an error, never a score (law 6);
- the random player and the trained one depend on the seed; how far PPO comes in so many seconds depends on the machine.
"""

from __future__ import annotations

import contextlib
import json
import logging
import os
import tempfile
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from troupe.cluster import launch
from troupe.envs.tensors import Array, TensorEnv
from troupe.learner import evaluation
from troupe.protocol.errors import ConfigError

BATCH, MINIBATCH, EPOCHS, COPIES = 1024, 128, 8, 8
"""Of PPO: steps an iteration, a minibatch, passes over a batch, worlds at once."""
RATE, DISCOUNT, ENTROPY = 1e-3, 0.99, 0.01
HIDDEN = (128, 128)

Show = Callable[[float, str], None]
"""Told what share of the budget is used, and how training goes."""


@dataclass(frozen=True, slots=True)
class Budget:
    """Training ends with whichever comes first. iterations: None for as many as the seconds allow."""

    seconds: float
    iterations: int | None


@dataclass(frozen=True, slots=True)
class Row:
    """One player. success, reward: means over `episodes`, with 95 % intervals; None where that is not known."""

    player: str
    what: str
    episodes: int
    success: evaluation.Estimate
    reward: evaluation.Estimate


Outcome = tuple[bool, float]
"""success and reward of an episode."""

Chooser = Callable[[Array], int]
"""What to do where."""


def row(player: str, what: str, outcomes: Sequence[Outcome], seed: int) -> Row:
    """Scores of one player, an episode a task."""
    success, reward = (np.array(values, np.float64) for values in zip(*outcomes, strict=True))
    return Row(player, what, len(outcomes), evaluation.estimate(success, seed=seed), evaluation.estimate(reward, seed=seed))


def play(env: TensorEnv, tasks: int, choose: Chooser) -> list[Outcome]:
    """The held-out tasks 0..tasks-1, once each."""
    outcomes = []
    for index in range(tasks):
        seen, _ = env.reset(options={"split": "heldout", "index": index})
        total, over, info = 0.0, False, dict[str, Any]()
        while not over:
            seen, reward, done, truncated, info = env.step(choose(seen))
            total, over = total + reward, done or truncated
        outcomes.append((bool(info["success"]), total))
    return outcomes


def random_player(name: str, options: Mapping[str, Any], tasks: int, seed: int) -> Row:
    """The floor: every action as probable as any other."""
    env, rng = TensorEnv(name, options), np.random.default_rng(seed)
    with contextlib.closing(env):
        count = int(env.action_space.n)  # type: ignore[attr-defined]
        return row("random", "the floor", play(env, tasks, lambda seen: int(rng.integers(count))), seed)


def scripted_player(name: str, options: Mapping[str, Any], tasks: int, seed: int) -> Row | None:
    """The ceiling, as far as the world's own player is one. None: it has no player."""
    from troupe.envs import registry
    from troupe.envs.check import player_episodes

    try:
        played = player_episodes(registry.find(name), options, tasks, 0.0, "heldout")
    except ConfigError:
        return None
    return row("scripted", "the ceiling", [(e.success, e.reward) for e in played], seed)


def ppo_player(
    name: str, options: Mapping[str, Any], tasks: int, seed: int, budget: Budget, show: Show
) -> tuple[Row, dict[str, Any]]:
    """RLlib's PPO after training for `budget`, greedily; and what it has used. Raises ConfigError if RLlib is missing."""
    os.environ["OMP_NUM_THREADS"] = "1"
    with launch.ray_session(None, "troupe-baseline"), tempfile.TemporaryDirectory(prefix="troupe-baseline-") as folder:
        with _quiet():
            algorithm = _algorithm(name, dict(options), seed, folder)
        try:
            used = _trained(algorithm, budget, show)
            with contextlib.closing(TensorEnv(name, options)) as env:
                outcomes = play(env, tasks, _greedy(algorithm))
        finally:
            algorithm.stop()
    what = f"{used['steps']:,} steps in {used['seconds']:.0f} s"
    return row("RLlib PPO", what, outcomes, seed), used


def _trained(algorithm: Any, budget: Budget, show: Show) -> dict[str, Any]:
    began, done, steps = time.monotonic(), 0, 0
    while True:
        spent = time.monotonic() - began
        share = max(spent / budget.seconds, done / budget.iterations if budget.iterations else 0.0)
        if share >= 1.0:
            return {"seconds": spent, "iterations": done, "steps": steps}
        result = algorithm.train()
        found = result.get("env_runners", {})
        done, steps = done + 1, int(found.get("num_env_steps_sampled_lifetime", steps))
        mean = found.get("episode_return_mean")
        show(share, f"iteration {done}, {steps:,} steps" + ("" if mean is None else f", return {mean:.3f}"))


def _algorithm(name: str, options: dict[str, Any], seed: int, folder: str) -> Any:
    try:
        from ray.rllib.algorithms.ppo import PPOConfig
        from ray.rllib.core.rl_module.default_model_config import DefaultModelConfig
        from ray.tune.registry import register_env
        from ray.tune.trainable import trainable
    except ImportError as error:
        raise ConfigError(f"RLlib cannot be imported ({error}): pip install 'troupe-rl[baseline]'") from error
    logging.getLogger("ray.rllib").setLevel(logging.ERROR)  # importing it has set it otherwise
    vars(trainable)["DEFAULT_STORAGE_PATH"] = folder  # else it leaves a folder in the user's home
    register_env("troupe", lambda given: TensorEnv(name, options))
    config = (
        PPOConfig()
        .environment("troupe")
        .env_runners(num_env_runners=0, num_envs_per_env_runner=COPIES)
        .learners(num_learners=0)
        .training(
            train_batch_size_per_learner=BATCH,
            minibatch_size=MINIBATCH,
            num_epochs=EPOCHS,
            lr=RATE,
            gamma=DISCOUNT,
            entropy_coeff=ENTROPY,
        )
        .rl_module(model_config=DefaultModelConfig(fcnet_hiddens=list(HIDDEN), vf_share_layers=False))
        .debugging(seed=seed, log_level="ERROR")
    )
    return config.build_algo()


def _greedy(algorithm: Any) -> Chooser:
    import torch

    module = algorithm.get_module()

    def choose(seen: Array) -> int:
        with torch.no_grad():
            found = module.forward_inference({"obs": torch.from_numpy(seen[None])})
        return int(found["action_dist_inputs"][0].argmax())

    return choose


@contextlib.contextmanager
def _quiet() -> Any:
    """RLlib has much to say of what it will change one day."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield


# -- the LLM policy --------------------------------------------------------------------------------------------------


def policy_row(run: Path, world: str, options: Mapping[str, Any]) -> Row:
    """The newest evaluation of a run on held-out tasks of this world: of `troupe eval`, or the run's own, whichever is of the
    later step. Raises ConfigError if there is none."""
    found = [*_documents(run, world, options), *_own(run)]
    if not found:
        raise ConfigError(f"'{run}' has no evaluation on held-out tasks of '{world}' with these options: troupe eval {run}")
    step, scores = max(found, key=lambda pair: pair[0])
    success = evaluation.Estimate(**scores["success"])
    reward = evaluation.Estimate(scores["reward"], None, None, success.tasks)
    return Row("LLM policy", f"{run.name}, step {step}", int(scores["trials"]), success, reward)


def _documents(run: Path, world: str, options: Mapping[str, Any]) -> list[tuple[int, dict[str, Any]]]:
    found = []
    for file in sorted((run / "evals").glob("*.json")):
        with contextlib.suppress(OSError, ValueError, KeyError, TypeError):  # somebody's other file
            document = json.loads(file.read_text(encoding="utf-8"))
            chosen = document["chosen"]["tasks"] in ("held-out", "heldout")
            same = document["world"] == {"name": world, "options": dict(options)}
            scores = document["scores"]["clean"] or document["scores"]["all"]
            if chosen and same and scores["trials"]:
                found.append((int(document["policy"]["step"] or 0), scores))
    return found


def _own(run: Path) -> list[tuple[int, dict[str, Any]]]:
    """What the run found itself, in `evals.jsonl`: its intervals are Wilson's."""
    from troupe.actors.evaluator import read_evaluations

    found = []
    for known in read_evaluations(str(run / "evals.jsonl")):
        if known.trials and known.success is not None:
            success = asdict(evaluation.Estimate(known.success, known.low, known.high, known.trials))
            found.append((known.version, {"success": success, "reward": known.reward, "trials": known.trials}))
    return found
