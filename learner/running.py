"""What is known of each token during one training step, and the sums of which its metrics are made."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from troupe.learner import ranks
from troupe.learner.batch import TrainingBatch


class Running:
    """Per-token tensors [k] and running sums of one training step."""

    def __init__(self, batch: TrainingBatch, device: torch.device) -> None:
        self.owner = batch.trajectory
        self.trajectory = torch.from_numpy(batch.trajectory).to(device)
        self.rollout = torch.from_numpy(batch.rollout).to(device)
        self.old = torch.zeros_like(self.rollout)
        self.entropy = torch.zeros_like(self.rollout)
        self.reference = torch.zeros_like(self.rollout)
        self.value = torch.zeros_like(self.rollout)
        self.target = torch.zeros_like(self.rollout)
        self.importance = torch.ones_like(self.rollout)
        self.credit(np.zeros(len(batch.rollout), np.float32))
        self.value_losses: list[float] = []
        self._loss: list[float] = [0.0]
        self._norms: list[float] = []
        self._tokens = 0
        self._figures: dict[str, float] = {"clip_fraction": 0.0}

    def credit(self, advantage: np.ndarray[Any, np.dtype[np.float32]]) -> None:
        self.active = advantage != 0
        self.advantage = torch.from_numpy(advantage).to(self.rollout.device)

    def add(self, loss: torch.Tensor, figures: dict[str, torch.Tensor]) -> None:
        self._loss[-1] += loss.item()
        for name, figure in figures.items():
            self._figures[name] = self._figures.get(name, 0.0) + figure.sum().item()

    def sum_loss(self) -> float:
        """The loss of the optimiser step, of all ranks."""
        self._loss[-1] = ranks.total(self._loss[-1:])[0]
        return self._loss[-1]

    def finish(self, norm: float, count: int) -> None:
        self._norms.append(norm)
        self._loss.append(0.0)
        self._tokens += count

    def metrics(self) -> dict[str, float]:
        figures = ranks.total(list(self._figures.values()))
        told = {
            "entropy": self.entropy.mean().item(),
            "loss": sum(self._loss) / len(self._norms),
            "grad_norm": sum(self._norms) / len(self._norms),
            **{name: total / self._tokens for name, total in zip(self._figures, figures, strict=True)},
        }
        if self.value_losses:
            told["value_loss"] = sum(self.value_losses) / len(self.value_losses)
        return told
