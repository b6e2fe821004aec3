"""How weights change: packing, advantages, losses, the optimiser step, checkpoints. Torch, no Ray.

`advantage` and `loss` register a user's own; importing this package alone does not import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from troupe.learner.advantages import Group, advantage

if TYPE_CHECKING:
    from troupe.learner.losses import Tokens, loss

__all__ = ["Group", "Tokens", "advantage", "loss"]


def __getattr__(name: str) -> Any:
    if name in ("Tokens", "loss"):
        from troupe.learner import losses

        return getattr(losses, name)
    raise AttributeError(f"module 'troupe.learner' has no attribute {name!r}")
