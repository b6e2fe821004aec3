"""AdamW over float32 masters: what turns accumulated gradients into new weights.

Promises:
- gradients are accumulated in float32 whatever the model's type, so the number of micro-batches does not change them (of a
  bfloat16 model each micro-batch's is rounded before that, to some thousandths);
- a step whose gradient is not finite raises Diverged and changes nothing;
- `load_state_dict(state_dict())` continues bit by bit; betas and decay are those of the constructor;
- of several ranks each keeps its share of masters and moments, and the norm is that of the whole gradient.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch

from troupe.learner import ranks
from troupe.learner.errors import Diverged


class Optimiser:
    """AdamW (arXiv:1711.05101) on `parameters`; matrices decay, vectors (norms, biases) do not."""

    def __init__(
        self,
        parameters: Iterable[torch.nn.Parameter],
        *,
        betas: tuple[float, float],
        weight_decay: float,
        max_grad_norm: float,
    ) -> None:
        self._max_grad_norm = max_grad_norm
        self._pairs: list[tuple[torch.nn.Parameter, torch.Tensor]] = []  # (parameter, its master)
        for parameter in parameters:
            if parameter.dtype == torch.float32:
                self._pairs.append((parameter, parameter))
                continue
            master = parameter.detach().float()
            parameter.register_post_accumulate_grad_hook(_moves_gradient_to(master))  # type: ignore[no-untyped-call]
            self._pairs.append((parameter, master))
        masters = [master for _, master in self._pairs]
        self._adam = torch.optim.AdamW(
            [
                {"params": [m for m in masters if m.ndim > 1], "weight_decay": weight_decay},
                {"params": [m for m in masters if m.ndim <= 1], "weight_decay": 0.0},
            ],
            betas=betas,
            fused=True,
        )

    @torch.no_grad()
    def step(self, lr: float) -> float:
        """Applies and clears the accumulated gradient; returns its norm before clipping. Raises Diverged."""
        masters = [master for _, master in self._pairs]
        norm = float(ranks.whole(torch.nn.utils.clip_grad_norm_(masters, self._max_grad_norm)))
        if math.isfinite(norm):
            for group in self._adam.param_groups:
                group["lr"] = lr
            self._adam.step()
            for parameter, master in self._pairs:
                if parameter is not master:
                    parameter.copy_(master)
        self.clear()
        if not math.isfinite(norm):
            raise Diverged(f"the gradient's norm is {norm}: lower the learning rate, or look for a broken reward")
        return norm

    def clear(self) -> None:
        """Forgets the accumulated gradient."""
        for _, master in self._pairs:
            master.grad = None

    def reset(self) -> None:
        """Forgets the moments, as after a change of objective, and takes the parameters as they are now."""
        self.forget()
        self.sync()

    def forget(self) -> None:
        """Starts the moments anew; the masters stay, with what a narrower type of the parameters cannot hold."""
        self._adam.state.clear()

    @torch.no_grad()
    def sync(self) -> None:
        """Takes over parameters that were set from outside."""
        for parameter, master in self._pairs:
            if parameter is not master:
                master.copy_(parameter)

    def state_dict(self) -> dict[str, Any]:
        """Moments, and the masters where they are not the parameters themselves."""
        return {"adam": self._adam.state_dict(), "masters": [m for p, m in self._pairs if m is not p]}

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """The inverse of `state_dict`, of whole tensors."""
        masters = [master for group in self._adam.param_groups for master in group["params"]]
        moments = {
            i: {name: ranks.share(t, masters[i]) for name, t in found.items()} for i, found in state["adam"]["state"].items()
        }
        groups = self._adam.state_dict()["param_groups"]
        self._adam.load_state_dict({"state": moments, "param_groups": groups})
        own = [m for p, m in self._pairs if m is not p]
        for mine, saved in zip(own, state["masters"], strict=True):
            mine.copy_(ranks.share(saved, mine))


def _moves_gradient_to(master: torch.Tensor) -> Any:
    def move(parameter: torch.Tensor) -> None:
        assert parameter.grad is not None
        gradient = parameter.grad.float()
        master.grad = gradient if master.grad is None else master.grad.add_(gradient)
        parameter.grad = None

    return move
