"""The value model: what a sampled token's context is worth, for estimators that ask for it (GAE, bi-level GAE).

V of a token is predicted from the hidden state that the token itself is predicted from: the value of the state before it. A
linear head starts at V = 0 and lies on the policy's own backbone, which it does not change, or on a separate model, which
it trains. It is trained beside the policy, on the same sequences, to ½(V − target)², target = advantage + old V.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch

from troupe.learner import ranks
from troupe.learner.config import LearnerConfig, ModelConfig
from troupe.learner.model import load
from troupe.learner.optimiser import Optimiser
from troupe.learner.packing import Parts, Row, hidden_states, prepare


class Critic:
    """Owns the head, the separate model if there is one, and their optimiser."""

    def __init__(self, policy: Parts, config: LearnerConfig, model: ModelConfig, *, seed: int, device: torch.device) -> None:
        settings = config.critic
        self._lr, self._clip = settings.lr, settings.value_clip
        self._parts, self._own = policy, None
        if settings.kind == "separate":
            folder = settings.path or model.path
            self._own = load(ModelConfig(path=folder, dtype=model.dtype), seed=seed)
            self._parts = prepare(self._own, device=device, checkpointing=config.activation_checkpointing)
        self._head = torch.nn.Linear(self._parts.backbone.config.hidden_size, 1)
        torch.nn.init.zeros_(self._head.weight)
        torch.nn.init.zeros_(self._head.bias)
        ranks.spread(self._head, [], device)
        trained = [*self._head.parameters(), *(self._own.parameters() if self._own is not None else ())]
        self._optimiser = Optimiser(trained, betas=config.betas, weight_decay=0.0, max_grad_norm=config.max_grad_norm)

    def values(self, row: Row) -> torch.Tensor:
        """Values [k] of a row's targets, float32, with gradients for what is trained."""
        with torch.set_grad_enabled(torch.is_grad_enabled() and self._own is not None):
            hidden = hidden_states(self._parts, row)
        values: torch.Tensor = self._head(hidden.float())[:, 0]
        return values

    def learn(self, rows: Iterable[Row], old: torch.Tensor, target: torch.Tensor, count: int) -> float:
        """One optimiser step on the rows' `count` tokens; old values and targets are flat. Returns the mean loss."""
        total = 0.0
        for row in rows:
            value, before, goal = self.values(row), old[row.where], target[row.where]
            error = (value - goal).square()
            if self._clip is not None:  # PPO's clipped value loss (arXiv:2005.12729, section 3)
                near = before + (value - before).clamp(-self._clip, self._clip)
                error = torch.maximum(error, (near - goal).square())
            loss = error.sum() / (2 * count)
            loss.backward()  # type: ignore[no-untyped-call]
            total += loss.item()
        self._optimiser.step(self._lr)
        return ranks.total([total])[0]

    def state_dict(self) -> dict[str, Any]:
        """Head, separate model and optimiser."""
        own = {} if self._own is None else dict(self._own.state_dict())
        return {"head": dict(self._head.state_dict()), "own": own, "optimiser": self._optimiser.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`."""
        ranks.fill(self._head, state["head"])
        if self._own is not None:
            ranks.fill(self._own, state["own"])
        self._optimiser.load_state_dict(state["optimiser"])
