"""A trainer on a tiny policy, what its engine would report, and demonstrations: what the tests of the trainer share."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from troupe.learner.config import LearnerConfig, LoraSettings, ModelConfig
from troupe.learner.model import load
from troupe.learner.trainer import Trainer
from troupe.protocol.trajectory import Trajectory

Make = Callable[..., Trajectory]
FULL, BF16, LORA = "full", "bf16", "lora"


def trainer(path: str, kind: str = FULL, *, seed: int = 0, **config: Any) -> Trainer:
    model = ModelConfig(
        path=path,
        dtype="bfloat16" if kind == BF16 else "float32",
        lora=LoraSettings(rank=2) if kind == LORA else None,
    )
    return Trainer(LearnerConfig(**{"lr": 3e-3, "device": "cpu", **config}), model, seed=seed)


def logprobs_of(t: Trainer, trajectory: Trajectory, temperature: float, top_p: float = 1.0) -> np.ndarray[Any, Any]:
    """What an engine with the trainer's weights would report for the policy tokens of an unforked trajectory.

    With `top_p`, its tokens are first exchanged for ones that lie within it.
    """
    model = load(t.model_config, seed=0)
    model.load_state_dict(t.model.state_dict())
    (sample,) = trajectory.samples()
    found = []
    for position in np.flatnonzero(sample.mask):
        with torch.no_grad():
            logits = model(input_ids=torch.from_numpy(sample.tokens[:position]).long()[None]).logits[0, -1].float()
        p = (logits / temperature).softmax(-1)
        ordered = p.sort(descending=True)
        inside = int((ordered.values.cumsum(-1) - ordered.values < top_p).sum())
        if top_p < 1:
            sample.tokens[position] = ordered.indices[position % inside]
        found.append(math.log(p[sample.tokens[position]] / ordered.values[:inside].sum()))
    at = 0
    for node in trajectory.nodes:
        node.tokens = sample.tokens[at : at + len(node.tokens)].copy()
        at += len(node.tokens)
    return np.array(found, np.float32)


def demonstrations(n: int = 12) -> tuple[list[Any], list[Any]]:
    rng = np.random.default_rng(0)
    tokens = [np.concatenate([rng.integers(0, 200, 5), [210, 211, 212]]).astype(np.int32) for _ in range(n)]
    return tokens, [np.array([0] * 5 + [1] * 3, np.int32) for _ in tokens]
