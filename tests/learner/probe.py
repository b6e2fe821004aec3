"""What tests ask of trainers, alone or in each of several ranks."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist

from troupe.learner import ranks
from troupe.learner.config import LearnerConfig, ModelConfig
from troupe.learner.optimiser import Optimiser
from troupe.learner.trainer import Trainer
from troupe.protocol.checksum import checksum_of
from troupe.protocol.trajectory import Trajectory


def gradients(trainer: Trainer, trajectories: list[Trajectory], **config: Any) -> dict[str, torch.Tensor]:
    """The whole gradients that reach the optimisers of "policy" and "critic" in a training step, one after another.

    They are taken away there, and the policy is moved a little instead, the same way each time, so that in a second pass
    ratios are not 1; at the end its weights are as they were.
    """
    start = {name: p.detach().clone() for name, p in trainer.model.named_parameters()}
    before = trainer.config
    trainer.config = before.model_copy(update=config)
    seen: dict[str, list[torch.Tensor]] = {}

    def taken(optimiser: Optimiser, lr: float) -> float:
        found = [ranks.whole(m.grad).flatten() for _, m in optimiser._pairs if m.grad is not None]
        optimiser.clear()
        whose = "policy" if optimiser is trainer._optimiser else "critic"
        seen.setdefault(whose, []).append(torch.cat(found))
        if whose == "policy":
            generator = torch.Generator().manual_seed(len(seen[whose]))
            with torch.no_grad():
                for p in trainer.model.parameters():
                    p.add_(ranks.share((torch.randn(p.shape, generator=generator) * 0.02).to(p.dtype), p))
        return 0.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Optimiser, "step", taken)
        trainer.train(trajectories)
    assert len(seen["policy"]) == trainer.config.passes * trainer.config.minibatches
    trainer.config = before
    with torch.no_grad():
        for name, p in trainer.model.named_parameters():
            p.copy_(start[name])
    return {whose: torch.cat(found) for whose, found in seen.items()}


class Probe:
    """Trainers by name, in one of several ranks."""

    def __init__(self) -> None:
        self._trainers: dict[str, Trainer] = {}

    def trainer(self, config: LearnerConfig, model: ModelConfig, new: str = "") -> str:
        """The name of a trainer with these settings; one that was there already, unless `new` tells it apart."""
        name = new + config.model_dump_json() + model.model_dump_json()
        if name not in self._trainers:
            self._trainers[name] = Trainer(config, model, seed=0)
        return name

    def call(self, name: str, method: str, *args: Any) -> Any:
        """A method of the trainer; it must give the same on all ranks, but for time and what only the first gets."""
        answer = getattr(self._trainers[name], method)(*args)
        told: list[Any] = [None] * ranks.size()
        if isinstance(answer, dict) and "learn_s" in answer:
            del answer["learn_s"]
            dist.all_gather_object(told, answer)
            assert all(t == answer for t in told), told
        return answer

    def cold_start(self, name: str, tokens: Any, masks: Any, steps: int, batch: int) -> Any:
        """Of the trainer; what came of it, but for the time."""
        told = self._trainers[name].cold_start(tokens, masks, steps=steps, batch=batch)
        return {k: v for k, v in told.items() if k != "learn_s"}

    def gradients(self, name: str, trajectories: list[Trajectory], **config: Any) -> dict[str, np.ndarray[Any, Any]]:
        """See above."""
        return {whose: g.numpy() for whose, g in gradients(self._trainers[name], trajectories, **config).items()}

    def checksum(self, name: str) -> str:
        """Of the weights that are published."""
        tensors = self._trainers[name].tensors()
        assert bool(tensors) == ranks.first()
        return checksum_of(tensors) if tensors else ""

    def held(self, name: str) -> tuple[int, int]:
        """How many numbers of the policy and of its optimiser the ranks hold: (the most of one, all together)."""
        trainer = self._trainers[name]
        tensors = [*trainer.model.parameters(), *(t for s in trainer._optimiser._adam.state.values() for t in s.values())]
        mine = sum(getattr(t, "_local_tensor", t).numel() for t in tensors)
        counts: list[int] = [0] * ranks.size()
        dist.all_gather_object(counts, mine)
        return max(counts), sum(counts)

    def differ(self, name: str, batches: list[list[Trajectory]]) -> None:
        """Each rank trains on a batch of its own."""
        self._trainers[name].train(batches[ranks.rank()])

    def spoil(self, name: str) -> None:
        """Makes one weight infinite, on the rank that holds it."""
        first = next(iter(self._trainers[name].model.parameters()))
        spoilt = ranks.whole(first.detach()).clone()
        spoilt[0] = torch.inf
        with torch.no_grad():
            first.copy_(ranks.share(spoilt, first))

    def break_one(self, name: str, folder: str, broken: str) -> None:
        """The first rank restores from `folder`, the other from `broken`."""
        self._trainers[name].restore(broken if ranks.rank() else folder)


class Waiting:
    """The first rank waits for another that sleeps, or fails."""

    def sleep(self, seconds: float, alone: int = 1) -> None:
        if ranks.rank() == alone:
            time.sleep(seconds)
        dist.barrier()

    def fail(self) -> None:
        if ranks.rank() == 1:
            raise MemoryError("no room for the activations")
        dist.barrier()

    def fine(self) -> int:
        return ranks.size()
