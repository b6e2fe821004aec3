"""The learner itself: supervised cold start, policy-gradient steps, checkpoints. Runs alone on a bare machine.

Promises:
- gradients depend on the trajectories alone: not on packing, micro-batch size or order (law 5), to float32 rounding;
- all chance comes from (seed, step), so there is no generator to save: restoring a checkpoint and going on is
  bit-identical to never having stopped (law 7), given the same number of threads;
- a checkpoint folder is complete or absent;
- a batch that must not be trained on raises BatchError before anything changes.

Where this process is one of several `ranks`, all of them make the same calls with the same arguments, and each holds and does
its share. All get the same results and errors; weights and checkpoints come from the first.
"""

from __future__ import annotations

import math
import sys
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F

from troupe.learner import advantages, checkpoint, composition, losses, ranks
from troupe.learner.aggregate import aggregate
from troupe.learner.agreement import agreement
from troupe.learner.batch import TrainingBatch, assemble, credit
from troupe.learner.config import LearnerConfig, ModelConfig
from troupe.learner.correct import importance, over_sequences
from troupe.learner.critic import Critic
from troupe.learner.errors import BatchError, Diverged
from troupe.learner.health import signals
from troupe.learner.kl import divergence
from troupe.learner.losses import Tokens
from troupe.learner.model import Tensors, base_of, load, parameters_of, tensors_of
from troupe.learner.optimiser import Optimiser
from troupe.learner.packing import Entropy, Parts, Row, Trainable, logprobs, prepare, rows_of, trainable
from troupe.learner.preferences import dpo, pairs_of
from troupe.learner.reach import reach
from troupe.learner.reference import Reference
from troupe.learner.running import Running
from troupe.learner.schedule import cold_start_rate, learning_rate
from troupe.learner.staleness import staleness
from troupe.protocol.checksum import checksum_of
from troupe.protocol.errors import CheckpointError, ConfigError
from troupe.protocol.messages import Span
from troupe.protocol.spans import SpanLog
from troupe.protocol.trajectory import Trajectory

ADJUSTABLE = ("filter", "filter_value", "clip_high", "entropy_coef", "lr")
"""Keys of [learner] that remedies change while a run goes on."""

Progress = Callable[[int, int, float], None]
"""Called with (steps done, steps in all, loss of the step)."""


class Trainer:
    """Owns the policy's weights and their optimiser.

    step: finished training steps, which is the weights' version. base: with LoRA the checksum of the frozen weights.
    """

    def __init__(self, config: LearnerConfig, model: ModelConfig, *, seed: int) -> None:
        """Loads the model. Raises ConfigError for a model that cannot be used, or parts that do not fit together."""
        composition.check(config, model)
        if config.ranks not in (1, ranks.size()):
            raise ConfigError(
                f"learner.ranks = {config.ranks}, but {ranks.size()} of them came: use `learner.ranked`, or start them with "
                f"torchrun --nproc-per-node {config.ranks}"
            )
        self.config = self._given = config
        self.model_config = model
        self.seed = seed
        self.step = 0
        self._log = SpanLog()
        self._estimator = advantages.find(config.advantage)
        self._loss = losses.find(config.loss)
        self._loss_traits = losses.traits(self._loss)
        torch.set_num_threads(config.threads)
        self._device = ranks.device(config.device)
        with ranks.together():
            self.model = load(model, seed=seed)
        self.base = checksum_of(base_of(self.model)) if model.lora is not None else ""
        self._parts = prepare(self.model, device=self._device, checkpointing=config.activation_checkpointing)
        self._limits: Any = getattr(self.model, "config")  # noqa: B009  (torch types attributes of modules as tensors)
        self._reach = reach(self._limits) or sys.maxsize
        self._optimiser = Optimiser(
            parameters_of(self.model).values(),
            betas=config.betas,
            weight_decay=config.weight_decay,
            max_grad_norm=config.max_grad_norm,
        )

        compares = config.kl is not None or config.objective == "preference"
        self._reference = self._refer() if compares else None
        self._teacher = self._taught_by(config.teacher) if "teacher" in advantages.traits(self._estimator).needs else None
        self._critic: Critic | None = None
        if "values" in advantages.traits(self._estimator).needs:
            self._critic = Critic(self._parts, config, model, seed=seed, device=self._device)

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
        ranks.same("set of demonstrations", *(s.tokens for s in demos), *(s.at for s in demos))
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
            self._optimiser.clear()
            for row in self._rows(chosen):
                lp, _ = logprobs(self._parts, row)
                loss = -lp.sum() / count
                loss.backward()  # type: ignore[no-untyped-call]
                total += loss.item()
            total = ranks.total([total])[0]
            self._optimiser.step(cold_start_rate(self.config, step, steps))
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

    # -- reinforcement -----------------------------------------------------------------------------------------------

    def train(self, trajectories: list[Trajectory], teacher: Mapping[str, Any] | None = None) -> dict[str, float]:
        """One training step on completed trajectories of whole groups: `passes` × `minibatches` optimiser steps, or with
        objective = "preference" what `prefer` does.

        The loss is Σ w·ℓ over all policy tokens of an optimiser step, w being the importance weight (`correct`), made one
        number by `aggregate`. teacher: for distillation, logprobs [policy tokens, in node order] by id of trajectory,
        instead of those of the configured teacher.
        Returns metrics; per-token means are over the policy tokens of the groups that train:
        - of the whole batch, before the filter: `health.signals`, success, turns, kept_groups (share that the filter kept);
        - of the policy before the step: entropy (nats), lp_gap_* (see `agreement`), staleness_* (versions between
          sampling and now: see `staleness`), kl_reference;
        - of the step: loss, clip_fraction (and other figures of the loss), grad_norm (before clipping, mean over
          optimiser steps), kl (old ‖ new, on a part of the batch), value_loss and value_explained (share of the targets'
          variance, before the step) with a critic, lr, policy_tokens, tokens, learn_s.

        Raises BatchError before anything changes, and Diverged at the first optimiser step that would not be finite.
        """
        if self.config.objective == "preference":
            return self.prefer(trajectories)
        started = time.perf_counter()
        config = self.config
        batch = self._assemble(trajectories, config)
        lr = learning_rate(config, self.step)
        run = Running(batch, self._device)
        told = self._look(batch, run, teacher)
        for index in range(config.passes):
            for part in self._deal(batch, index):
                # with one optimiser step a pass, its own forward pass is made with the old weights
                self._optimise(part, run, lr, fresh=index == 0 and not self._looks_first)
        age = self.step - batch.version
        metrics = {**signals(trajectories), **batch.metrics, **told, **run.metrics()}
        metrics |= agreement(run.old, run.rollout, age)
        with self._log.of("kl"):
            metrics["kl"] = self._kl(batch, run)
        metrics |= {"lr": lr, **staleness(age)}
        if config.kl is not None:
            metrics["kl_reference"] = divergence(run.old, run.reference, config.kl.estimator).mean().item()
        self.step += 1
        metrics["learn_s"] = time.perf_counter() - started
        return metrics

    def prefer(self, trajectories: list[Trajectory]) -> dict[str, float]:
        """`passes` steps of direct preference optimisation on (successful, failed) pairs of one task (see `preferences`).

        Without any pair nothing is learned. Returns what `train` tells of the batch, and of the pairs, before the last step:
        dpo_loss, dpo_accuracy (share told apart the right way), dpo_margin; pairs, grad_norm (mean), lr, learn_s. Raises
        BatchError and Diverged.
        """
        started = time.perf_counter()
        batch = self._assemble(trajectories, self.config.model_copy(update={"filter": "all"}))
        pairs = pairs_of(batch.trajectories)
        lr = learning_rate(self.config, self.step)
        told = {"dpo_loss": 0.0, "dpo_accuracy": 0.0, "dpo_margin": 0.0}
        norms = [0.0]
        paired = {i for pair in pairs for i in pair}
        sequences = [s for s, owner in zip(batch.sequences, batch.owner, strict=True) if owner in paired]
        run = Running(batch, self._device)
        self._reference = self._reference or self._refer()
        self._follow()
        if pairs:
            with self._log.of("reference logprobs"), self._reference.parts() as parts:
                self._measure(sequences, run.reference, parts=parts)
                ranks.merge(run.reference)
            norms = []
        for _ in range(self.config.passes if pairs else 0):
            run.old.zero_()
            with self._log.of("old logprobs"):
                self._measure(sequences, run.old)
                ranks.merge(run.old)
            sums = torch.zeros(len(batch.trajectories), dtype=torch.float64, device=self._device)
            lp, ref = (sums.index_add(0, run.trajectory, x.double()) for x in (run.old, run.reference))
            margin, weight = dpo(lp, ref, pairs, self.config.dpo_beta)
            weight = weight.float()[run.trajectory]
            self._optimiser.clear()
            with self._log.of("forward-backward"):
                for row in self._rows(sequences):
                    now, _ = logprobs(self._parts, row)
                    (now * weight[row.where]).sum().backward()  # type: ignore[no-untyped-call]
            with self._log.of("optimiser"):
                norms.append(self._optimiser.step(lr))
            told = {
                "dpo_loss": -F.logsigmoid(margin).mean().item(),
                "dpo_accuracy": (margin > 0).double().mean().item(),
                "dpo_margin": margin.mean().item(),
            }
        age = self.step - batch.version
        self.step += 1
        return {
            **signals(trajectories),
            **batch.metrics,
            **told,
            "pairs": float(len(pairs)),
            "grad_norm": sum(norms) / len(norms),
            "lr": lr,
            **staleness(age),
            "learn_s": time.perf_counter() - started,
        }

    def _assemble(self, trajectories: list[Trajectory], config: LearnerConfig) -> TrainingBatch:
        with self._log.of("pack"), ranks.together():
            batch = assemble(trajectories, config)
            self._check_sequences(batch.sequences)
        ranks.same("batch", *(s.tokens for s in batch.sequences), batch.rollout, np.array([*batch.metrics.values()]))
        return batch

    def _look(self, batch: TrainingBatch, run: Running, teacher: Mapping[str, Any] | None) -> dict[str, float]:
        """All that is computed with the weights before the step, and from it each token's credit; returns its metrics."""
        config, told = self.config, {}
        if self._looks_first:
            with self._log.of("old logprobs"):
                self._measure(batch.sequences, run.old, run.entropy)
                ranks.merge(run.old, run.entropy)
        if config.correct_level == "sequence":
            run.importance = importance(
                over_sequences(run.old, run.trajectory), over_sequences(run.rollout, run.trajectory), config
            )
        penalty = values = None
        if config.kl is not None and self._reference is not None:
            self._follow()
            with self._log.of("reference logprobs"), self._reference.parts() as parts:
                self._measure(batch.sequences, run.reference, parts=parts)
                ranks.merge(run.reference)
            if config.kl.where == "reward":
                kl = divergence(run.old, run.reference, config.kl.estimator)
                penalty = (-config.kl.coef * kl).double().cpu().numpy()
        if self._critic is not None:
            with self._log.of("values"), torch.no_grad():
                for row in self._rows(batch.sequences):
                    run.value[row.where] = self._critic.values(row)
            ranks.merge(run.value)
            values = run.value.double().cpu().numpy()
        old = run.old.double().cpu().numpy() if self._looks_first else None
        if self._teacher is not None and teacher is None:
            graded = torch.zeros_like(run.old)
            with self._log.of("teacher logprobs"):
                self._measure(batch.sequences, graded, parts=self._teacher)
                ranks.merge(graded)
            per_trajectory = batch.in_node_order(graded.double().cpu().numpy())
            teacher = {t.id: lp for t, lp in zip(batch.trajectories, per_trajectory, strict=True)}
        now = config.at(self.step + 1)
        with self._log.of("advantages"):
            given = credit(batch, self._estimator, now, values=values, old=old, penalty=penalty, teacher=teacher)
        run.credit(ranks.of_first(given.advantage))
        if self._critic is not None and values is not None:
            run.target = torch.from_numpy(ranks.of_first(given.target)).to(self._device)
            spread = float(given.target.var())
            told["value_explained"] = 1 - float((given.target - values).var()) / spread if spread else 0.0
        return told

    @property
    def _looks_first(self) -> bool:
        """Whether the old logprobs must be known before the first gradient of a step."""
        config = self.config
        return (
            config.minibatches > 1
            or "old" in advantages.traits(self._estimator).needs
            or (config.kl is not None and config.kl.where == "reward")
            or (config.correct_level == "sequence" and config.correct != "none")
        )

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

    def _optimise(self, sequences: list[Trainable], run: Running, lr: float, *, fresh: bool) -> None:
        config = self.config
        weight, divisor = self._aggregated(sequences, run)
        price = config.kl if config.kl is not None and config.kl.where == "loss" else None
        active = sequences
        if config.entropy_coef == 0 and price is None and self._loss_traits.idle_without_advantage:
            active = [s for s in sequences if run.active[s.where].any()]
            if fresh and len(active) < len(sequences):
                kept = {s.first for s in active}
                with self._log.of("old logprobs"):
                    self._measure([s for s in sequences if s.first not in kept], run.old, run.entropy)
        self._optimiser.clear()  # of a step that an error cut off
        entropy: Entropy = "train" if config.entropy_coef else ("measure" if fresh else "skip")
        with self._log.of("forward-backward"):
            for row in self._rows(active):
                lp, spread = logprobs(self._parts, row, entropy=entropy)
                if fresh:
                    run.old[row.where] = lp.detach()
                    run.entropy[row.where] = spread.detach()
                old, rollout = run.old[row.where], run.rollout[row.where]
                start = rollout if config.ratio == "rollout" else old
                value, figures = self._loss(Tokens(lp, start, run.advantage[row.where], row.sequence), config)
                if config.correct_level == "sequence":
                    value = value * run.importance[row.where]
                elif config.correct != "none":
                    value = value * importance(old, rollout, config)
                if price is not None:
                    kl = divergence(lp, run.reference[row.where], price.estimator)
                    value = value + price.coef * kl
                mine = weight[row.where]
                loss = ((value * mine).sum() - config.entropy_coef * (spread * mine).sum()) / divisor
                loss.backward()  # type: ignore[no-untyped-call]
                run.add(loss, figures)
        if fresh:
            ranks.merge(run.old, run.entropy)
        if not math.isfinite(whole := run.sum_loss()):
            self._optimiser.clear()
            raise Diverged(f"the loss is {whole}: lower the learning rate, or look for a broken reward or logprob")
        # where no sequence has anything to teach there is no gradient, and AdamW leaves the weights as they are
        count = sum(len(s.at) for s in sequences)
        if self._critic is not None:  # first, so that one that diverges leaves the policy as it was
            with self._log.of("critic"):
                run.value_losses.append(self._critic.learn(self._rows(sequences), run.value, run.target, count))
        with self._log.of("optimiser"):
            run.finish(self._optimiser.step(lr), count)

    def _aggregated(self, sequences: list[Trainable], run: Running) -> tuple[torch.Tensor, float]:
        """Weights of all tokens in an optimiser step on `sequences`, and what their sum is divided by."""
        kind = self._loss_traits.aggregate if self.config.aggregate == "auto" else self.config.aggregate
        at = np.concatenate([np.arange(s.where.start, s.where.stop) for s in sequences])
        mine, divisor = aggregate(kind, run.owner[at], self.config.aggregate_length)
        weight = np.ones(len(run.owner), np.float32)
        weight[at] = mine
        return torch.from_numpy(weight).to(self._device), divisor

    @torch.no_grad()
    def _measure(
        self,
        sequences: Sequence[Trainable],
        lp: torch.Tensor,
        entropy: torch.Tensor | None = None,
        *,
        parts: Parts | None = None,
    ) -> None:
        """Writes logprobs (and entropies) into flat tensors; of the policy, unless other `parts` are given."""
        for row in self._rows(sequences):
            found, spread = logprobs(parts or self._parts, row, entropy="skip" if entropy is None else "measure")
            lp[row.where] = found
            if entropy is not None:
                entropy[row.where] = spread

    def _taught_by(self, folder: str) -> Parts | None:
        """The frozen teacher in `folder`; None if there is none, and its logprobs come with each batch."""
        if not folder:
            return None
        model = load(ModelConfig(path=folder, dtype=self.model_config.dtype), seed=self.seed).requires_grad_(False)
        theirs: Any = getattr(model, "config")  # noqa: B009
        if theirs.vocab_size != self._limits.vocab_size:
            raise ConfigError(
                f"learner.teacher '{folder}' has {theirs.vocab_size} tokens and the policy {self._limits.vocab_size}: "
                "name a model of the same tokenizer"
            )
        return prepare(model, device=self._device)

    def _follow(self) -> None:
        """Lets the reference become the policy if it is time, and the optimiser start anew with it if that is wanted."""
        kl = self.config.kl
        if self._reference is not None and self._reference.follow(self.step) and kl is not None and kl.reset_optimiser:
            self._optimiser.forget()

    def _refer(self) -> Reference:
        reset_every = self.config.kl.reset_every if self.config.kl is not None else 0
        return Reference(self.model, self._parts, self.model_config, reset_every=reset_every, seed=self.seed)

    @torch.no_grad()
    def _kl(self, batch: TrainingBatch, run: Running) -> float:
        """KL(old ‖ new) after the step, k3 over about an eighth of the tokens, at most a micro-batch (Schulman, "Approximating
        KL divergence", 2020; the samples are of the old policy, so r = new / old)."""
        order = np.random.default_rng([self.seed, 3, self.step]).permutation(len(batch.sequences))
        chosen: list[Trainable] = []
        room = min(self.config.tokens_per_micro_batch, sum(len(s.tokens) for s in batch.sequences) // 8)
        for i in order:
            sequence = batch.sequences[i]
            if chosen and len(sequence.tokens) > room:
                break
            room -= len(sequence.tokens)
            chosen.append(sequence)
        total, count = 0.0, 0.0
        for row in self._rows(chosen):
            lp, _ = logprobs(self._parts, row)
            log_ratio = (lp - run.old[row.where]).clamp(-20.0, 20.0)
            total += (log_ratio.exp() - 1 - log_ratio).sum().item()
            count += len(log_ratio)
        total, count = ranks.total([total, count])
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
            if len(s.tokens) > self._reach:
                raise BatchError(
                    f"a sequence of {len(s.tokens)} tokens is longer than the model's context of {self._reach}: "
                    "lower the episode's token limit"
                )

    def timings(self) -> list[Span]:
        """What it did when since it was last asked, the newest of it."""
        return self._log.take()

    # -- weights and checkpoints -------------------------------------------------------------------------------------

    def tensors(self) -> Tensors:
        """A snapshot of what is published to generators (see `learner.model.tensors_of`); empty on other ranks than the
        first."""
        return {name: array.copy() for name, array in tensors_of(self.model).items()}

    def save(self, folder: str | Path) -> None:
        """Writes a checkpoint, which replaces `folder` at once when it is complete."""
        checkpoint.write(
            Path(folder),
            self.model,
            Path(self.model_config.path),
            optimiser={
                **self._optimiser.state_dict(),
                **({"critic": self._critic.state_dict()} if self._critic is not None else {}),
                **({"reference": self._reference.state_dict()} if self._reference is not None else {}),
            },
            step=self.step,
            seed=self.seed,
        )

    def restore(self, folder: str | Path) -> None:
        """Takes over weights, optimiser and step. Raises CheckpointError, and this trainer is then of no more use."""
        state = checkpoint.read(Path(folder), self.model, seed=self.seed)
        try:
            self._optimiser.load_state_dict(state.optimiser)
            if self._critic is not None and "critic" in state.optimiser:
                self._critic.load_state_dict(state.optimiser["critic"])
            if self._reference is not None:
                self._reference.load_state_dict(state.optimiser.get("reference", {}))
        except (RuntimeError, ValueError, KeyError) as error:
            reason = str(error).strip().splitlines()[0]
            raise CheckpointError(f"'{folder}' is of another [learner] or [model]: {reason}") from error
        self.step = state.step

    # -- remedies ----------------------------------------------------------------------------------------------------

    def adjust(self, changes: Mapping[str, Any]) -> None:
        """Trains with `changes` of ADJUSTABLE keys of [learner] from here on, in place of those of an earlier call.

        Raises ConfigError for other keys, and for values that do not fit.
        """
        if fixed := sorted(set(changes) - set(ADJUSTABLE)):
            raise ConfigError(f"learner.{fixed[0]} cannot change during a run; these can: {', '.join(ADJUSTABLE)}")
        try:
            config = LearnerConfig.model_validate({**self._given.model_dump(), **changes})
        except ValueError as error:
            raise ConfigError(f"[learner] cannot be adjusted to {dict(changes)}: {error}") from error
        composition.check(config, self.model_config)
        self.config = config

    def roll_back(self, folder: str | Path) -> None:
        """Takes over weights and optimiser of a checkpoint, but no step: the next one goes on with the count."""
        step = self.step
        self.restore(folder)
        self.step = step
