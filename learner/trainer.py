"""The learner itself: supervised cold start, policy-gradient steps, checkpoints. Runs alone on a bare machine.

Promises:
- gradients depend on the trajectories alone: not on packing, micro-batch size or order (law 5), to float32 rounding;
- all chance comes from (seed, step), so there is no generator to save: restoring a checkpoint and going on is
  bit-identical to never having stopped (law 7), given the same number of threads;
- a checkpoint folder is complete or absent;
- a batch that must not be trained on raises BatchError before anything changes.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from troupe.learner import advantages, checkpoint, losses
from troupe.learner.batch import TrainingBatch, assemble
from troupe.learner.config import LearnerConfig, ModelConfig
from troupe.learner.errors import BatchError, Diverged
from troupe.learner.losses import Tokens
from troupe.learner.model import Tensors, load, parameters_of, tensors_of
from troupe.learner.optimiser import Optimiser
from troupe.learner.packing import Entropy, Row, Trainable, logprobs, prepare, rows_of, trainable
from troupe.protocol.trajectory import Trajectory

Progress = Callable[[int, int, float], None]
"""Called with (steps done, steps in all, loss of the step)."""


class Trainer:
    """Owns the policy's weights and their optimiser. `step`: finished training steps, which is the weights' version."""

    def __init__(self, config: LearnerConfig, model: ModelConfig, *, seed: int) -> None:
        """Loads the model. Raises ConfigError for a model, estimator or loss that cannot be used."""
        self.config = config
        self.model_config = model
        self.seed = seed
        self.step = 0
        self._estimator = advantages.find(config.advantage)
        self._loss = losses.find(config.loss)
        torch.set_num_threads(config.threads)
        automatic = "cuda" if torch.cuda.is_available() else "cpu"
        self._device = torch.device(automatic if config.device == "auto" else config.device)
        self.model = load(model, seed=seed).to(self._device)
        self._parts = prepare(self.model)
        self._limits: Any = getattr(self.model, "config")  # noqa: B009  (torch types attributes of modules as tensors)
        self._optimiser = Optimiser(
            parameters_of(self.model).values(),
            betas=config.betas,
            weight_decay=config.weight_decay,
            max_grad_norm=config.max_grad_norm,
        )

    # -- supervised --------------------------------------------------------------------------------------------------

    def cold_start(
        self,
        tokens: Sequence[Any],
        supervised: Sequence[Any],
        *,
        steps: int,
        batch: int,
        progress: Progress | None = None,
    ) -> dict[str, float]:
        """`steps` steps of supervised learning on `batch` demonstrations each, drawn epoch by epoch.

        tokens: int32 [n] each; supervised: 0/1 of the same shapes, 1 where the token is learned. The loss is the mean
        negative logprob over the supervised tokens of a step. Returns loss_first, loss, tokens (supervised), learn_s.
        Leaves `step` at 0 and the optimiser fresh. Raises BatchError or Diverged.
        """
        started = time.perf_counter()
        if len(tokens) != len(supervised):
            raise BatchError(f"{len(tokens)} demonstrations but {len(supervised)} masks")
        demos = [
            trainable(t, m, name=f"demonstration {i}")
            for i, (t, m) in enumerate(zip(tokens, supervised, strict=True))
            if np.any(m)
        ]
        if not demos:
            raise BatchError("no demonstration has a supervised token: there is nothing to learn from")
        self._check_sequences(demos)
        self._optimiser.reset()
        order: list[int] = []
        rng = np.random.default_rng([self.seed, 1])
        seen: list[float] = []
        trained = 0
        for step in range(steps):
            while len(order) < batch:
                order.extend(rng.permutation(len(demos)).tolist())
            chosen, order = [demos[i] for i in order[:batch]], order[batch:]
            count = sum(len(s.at) for s in chosen)
            total = 0.0
            for row in self._rows(chosen):
                lp, _ = logprobs(self._parts, row)
                loss = -lp.sum() / count
                loss.backward()  # type: ignore[no-untyped-call]
                total += loss.item()
            self._optimiser.step(self._cold_start_lr(step, steps))
            trained += count
            seen.append(total)
            if progress is not None:
                progress(step + 1, steps, total)
        self._optimiser.reset()
        return {
            "loss_first": seen[0] if seen else math.nan,
            "loss": seen[-1] if seen else math.nan,
            "tokens": float(trained),
            "learn_s": time.perf_counter() - started,
        }

    def _lr(self, step: int) -> float:
        """Learning rate of the step after `step`: rises over `warmup_steps`, falls over `decay_steps`."""
        config = self.config
        rise = min(1.0, (step + 1) / config.warmup_steps) if config.warmup_steps else 1.0
        fall = max(0.05, 1.0 - step / config.decay_steps) if config.decay_steps else 1.0
        return config.lr * rise * fall

    def _cold_start_lr(self, step: int, steps: int) -> float:
        warmup = self.config.cold_start_warmup
        rise = min(1.0, (step + 1) / warmup) if warmup else 1.0
        return self.config.cold_start_lr * rise * (0.1 + 0.45 * (1 + math.cos(math.pi * step / steps)))

    # -- reinforcement -----------------------------------------------------------------------------------------------

    def train(self, trajectories: list[Trajectory]) -> dict[str, float]:
        """One training step: `passes` × `minibatches` optimiser steps on completed trajectories of whole groups.

        The loss is Σ w·ℓ over all policy tokens of an optimiser step, divided by their number, w being the truncated
        importance weight. Returns metrics; per-token means are over the policy tokens:
        - of the rewards: reward_mean, reward_std, group_reward_std (mean over groups), equal_groups (share of groups
          with nothing to compare), success, turns;
        - of the policy before the step: entropy (nats), lp_gap_mean and lp_gap_max (|learner − engine| logprob),
          staleness_mean (versions between sampling and now);
        - of the step: loss, clip_fraction (and other figures of the loss), grad_norm (before clipping, mean over
          optimiser steps), kl (old ‖ new, on a part of the batch), lr, policy_tokens, tokens, learn_s.

        Raises BatchError before anything changes, and Diverged at the first optimiser step that would not be finite.
        """
        started = time.perf_counter()
        config = self.config
        batch = assemble(trajectories, self._estimator)
        self._check_sequences(batch.sequences)
        lr = self._lr(self.step)
        run = _Step(batch, self._device)

        if config.minibatches > 1:  # later optimiser steps see changed weights, so the old logprobs are taken first
            self._measure(batch.sequences, run)
        for index in range(config.passes):
            for part in self._deal(batch, index):
                # with one optimiser step a pass, its own forward pass is made with the old weights
                self._optimise(part, run, lr, fresh=index == 0 and config.minibatches == 1)
        metrics = {**batch.metrics, **run.metrics(), "kl": self._kl(batch, run), "lr": lr}
        metrics["staleness_mean"] = float((self.step - batch.version).mean())
        self.step += 1
        metrics["learn_s"] = time.perf_counter() - started
        return metrics

    def _deal(self, batch: TrainingBatch, index: int) -> Iterable[list[Trainable]]:
        """The sequences of each optimiser step of pass `index`; those of one trajectory stay together."""
        if self.config.minibatches == 1:
            yield batch.sequences
            return
        order = np.random.default_rng([self.seed, 2, self.step, index]).permutation(max(batch.owner) + 1)
        for part in np.array_split(order, self.config.minibatches):
            mine = set(part.tolist())
            sequences = [s for s, owner in zip(batch.sequences, batch.owner, strict=True) if owner in mine]
            if sequences:
                yield sequences

    def _optimise(self, sequences: list[Trainable], run: _Step, lr: float, *, fresh: bool) -> None:
        config = self.config
        count = sum(len(s.at) for s in sequences)
        active = sequences
        if config.entropy_coef == 0 and losses.idle_without_advantage(self._loss):
            active = [s for s in sequences if run.active[s.first : s.first + len(s.at)].any()]
            if fresh and len(active) < len(sequences):
                kept = {s.first for s in active}
                self._measure([s for s in sequences if s.first not in kept], run)
        entropy: Entropy = "train" if config.entropy_coef else ("measure" if fresh else "skip")
        for row in self._rows(active):
            lp, spread = logprobs(self._parts, row, entropy=entropy)
            if fresh:
                run.old[row.where] = lp.detach()
                run.entropy[row.where] = spread.detach()
            old = run.old[row.where]
            sequence = torch.bucketize(row.at, row.ends, right=True)
            value, figures = self._loss(Tokens(lp, old, run.advantage[row.where], sequence), config)
            if config.importance == "tis":
                value = value * (old - run.rollout[row.where]).clamp(-20.0, 20.0).exp().clamp(max=config.tis_cap)
            loss = (value.sum() - config.entropy_coef * spread.sum()) / count
            loss.backward()  # type: ignore[no-untyped-call]
            run.add(loss, count, figures)
        # where no sequence has anything to teach there is no gradient, and AdamW leaves the weights as they are
        run.finish(self._optimiser.step(lr), count)

    @torch.no_grad()
    def _measure(self, sequences: list[Trainable], run: _Step) -> None:
        for row in self._rows(sequences):
            run.old[row.where], run.entropy[row.where] = logprobs(self._parts, row, entropy="measure")

    @torch.no_grad()
    def _kl(self, batch: TrainingBatch, run: _Step) -> float:
        """KL(old ‖ new) after the step, k3 over about one micro-batch of the sequences (Schulman, "Approximating KL
        divergence", 2020; the samples are of the old policy, so r = new / old)."""
        order = np.random.default_rng([self.seed, 3, self.step]).permutation(len(batch.sequences))
        chosen: list[Trainable] = []
        room = self.config.tokens_per_micro_batch
        for i in order:
            sequence = batch.sequences[i]
            if chosen and len(sequence.tokens) > room:
                break
            room -= len(sequence.tokens)
            chosen.append(sequence)
        total, count = 0.0, 0
        for row in self._rows(chosen):
            lp, _ = logprobs(self._parts, row)
            log_ratio = (lp - run.old[row.where]).clamp(-20.0, 20.0)
            total += (log_ratio.exp() - 1 - log_ratio).sum().item()
            count += len(log_ratio)
        return total / count

    def _rows(self, sequences: Sequence[Trainable]) -> Iterable[Row]:
        return rows_of(sequences, self.config.tokens_per_micro_batch, self._device)

    def _check_sequences(self, sequences: Iterable[Trainable]) -> None:
        for s in sequences:
            low, high = int(s.tokens.min()), int(s.tokens.max())
            if low < 0 or high >= self._limits.vocab_size:
                raise BatchError(
                    f"token id {low if low < 0 else high} is outside of the model's vocabulary of "
                    f"{self._limits.vocab_size}: was the text encoded with another tokenizer?"
                )
            if len(s.tokens) > self._limits.max_position_embeddings:
                raise BatchError(
                    f"a sequence of {len(s.tokens)} tokens is longer than the model's context of "
                    f"{self._limits.max_position_embeddings}: lower the episode's token limit"
                )

    # -- weights and checkpoints -------------------------------------------------------------------------------------

    def tensors(self) -> Tensors:
        """A snapshot of what is published to generators (see `learner.model.tensors_of`)."""
        return {name: array.copy() for name, array in tensors_of(self.model).items()}

    def save(self, folder: str | Path) -> None:
        """Writes a checkpoint, which replaces `folder` at once when it is complete."""
        checkpoint.write(
            Path(folder),
            self.model,
            Path(self.model_config.path),
            optimiser=self._optimiser.state_dict(),
            step=self.step,
            seed=self.seed,
        )

    def restore(self, folder: str | Path) -> None:
        """Takes over weights, optimiser and step. Raises CheckpointError, and this trainer is then of no more use."""
        state = checkpoint.read(Path(folder), self.model, seed=self.seed)
        self._optimiser.load_state_dict(state.optimiser)
        self.step = state.step


class _Step:
    """Per-token tensors and running sums of one training step."""

    def __init__(self, batch: TrainingBatch, device: torch.device) -> None:
        self.active = batch.advantage != 0
        self.advantage = torch.from_numpy(batch.advantage).to(device)
        self.rollout = torch.from_numpy(batch.rollout).to(device)
        self.old = torch.zeros_like(self.rollout)
        self.entropy = torch.zeros_like(self.rollout)
        self._loss: list[float] = [0.0]
        self._norms: list[float] = []
        self._tokens = 0
        self._figures: dict[str, float] = {"clip_fraction": 0.0}

    def add(self, loss: torch.Tensor, count: int, figures: dict[str, torch.Tensor]) -> None:
        value = loss.item()
        if not math.isfinite(value):
            raise Diverged(f"the loss is {value}: lower the learning rate, or look for a broken reward or logprob")
        self._loss[-1] += value
        for name, figure in figures.items():
            self._figures[name] = self._figures.get(name, 0.0) + figure.sum().item()

    def finish(self, norm: float, count: int) -> None:
        self._norms.append(norm)
        self._loss.append(0.0)
        self._tokens += count

    def metrics(self) -> dict[str, float]:
        gap = (self.old - self.rollout).abs()
        return {
            "entropy": self.entropy.mean().item(),
            "lp_gap_mean": gap.mean().item(),
            "lp_gap_max": gap.max().item(),
            "loss": sum(self._loss) / len(self._norms),
            "grad_norm": sum(self._norms) / len(self._norms),
            **{name: total / self._tokens for name, total in self._figures.items()},
        }
