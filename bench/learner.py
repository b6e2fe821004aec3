"""How fast a learner step is on a batch of unequal lengths (1:10), beside TRL's GRPOTrainer and bare forward + backward.

    python bench/learner.py [--model FOLDER] [--quick] [--threads N]

One JSON line a case: {"name", "value", "unit", "compared_with", "context"}. All sides get the same weights, tokens, advantages
and threads, in one process, taking turns; a figure is the median over the rounds. tokens/s counts prompt and completion.

speedup_vs_trl_ragged: seconds of TRL's step (from on_step_begin to on_step_end, its generation replaced by the fixed batch)
over seconds of `Trainer.train` on the same trajectories: checks, credit, gradients, clipping, AdamW and all metrics.
fraction_of_bare_forward_backward: seconds of plain forward + loss + backward of the same tokens over those of `Trainer.train`.
Bare is the fastest of several layouts: one sequence at a time, and rows packed through transformers' position ids.
"""

from __future__ import annotations

import json
import math
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("TRL_EXPERIMENTAL_SILENCE", "1")

import numpy as np
import torch
import torch.nn.functional as F
import typer

from troupe.learner.config import LearnerConfig, ModelConfig
from troupe.learner.packing import pack
from troupe.learner.tiny import make_tiny
from troupe.learner.trainer import Trainer
from troupe.protocol.trajectory import ENVIRONMENT, POLICY, Node, Step, Task, Trajectory

BATCH, GROUP, PROMPT, SHORTEST, LONGEST = 32, 8, 48, 32, 320
ROW = 8192
"""Of ours: tokens of a packed row. All of the batch in one pass, as TRL has it with its micro-batch of 32."""
LAYOUTS = (0, 512, 1024, 2048)
"""Of bare: tokens of a packed row; 0: one sequence at a time."""


@dataclass(frozen=True, slots=True)
class Ragged:
    """prompts [BATCH, PROMPT], completions of unequal length, and the advantage of each."""

    prompts: np.ndarray[Any, Any]
    completions: list[np.ndarray[Any, Any]]
    rewards: np.ndarray[Any, Any]
    advantages: np.ndarray[Any, Any]

    @property
    def tokens(self) -> int:
        return self.prompts.size + sum(map(len, self.completions))


def ragged(vocabulary: int) -> Ragged:
    """Lengths are log-uniform at evenly spaced quantiles, shuffled."""
    dice = np.random.default_rng(0)
    quantiles = (np.arange(BATCH) + 0.5) / BATCH
    lengths = np.exp(math.log(SHORTEST) + quantiles * math.log(LONGEST / SHORTEST)).round().astype(int)
    lengths[0], lengths[-1] = SHORTEST, LONGEST
    rewards = dice.normal(size=(BATCH // GROUP, GROUP))
    centred = (rewards - rewards.mean(1, keepdims=True)) / (rewards.std(1, keepdims=True, ddof=1) + 1e-6)
    return Ragged(
        prompts=dice.integers(10, vocabulary, (BATCH, PROMPT)),
        completions=[dice.integers(10, vocabulary, n) for n in dice.permutation(lengths)],
        rewards=rewards.ravel(),
        advantages=centred.ravel(),
    )


def trajectories(batch: Ragged) -> list[Trajectory]:
    """The batch as a run's learner gets it."""
    made = []
    for i, (prompt, completion) in enumerate(zip(batch.prompts, batch.completions, strict=True)):
        n = len(completion)
        given = Node(-1, "user", 0, prompt.astype(np.int32), np.full(PROMPT, ENVIRONMENT, np.uint8), _none(), _none(np.int32))
        said = Node(
            parent=0,
            role="assistant",
            step=0,
            tokens=completion.astype(np.int32),
            provenance=np.full(n, POLICY, np.uint8),
            logprobs=np.full(n, -math.log(512), np.float32),
            versions=np.zeros(n, np.int32),
        )
        reward = float(batch.rewards[i])
        made.append(
            Trajectory(
                id=f"e{i:03}",
                attempt=0,
                group=i // GROUP,
                member=i % GROUP,
                kind="train",
                step=1,
                task=Task(f"t{i // GROUP}", "bench", "train", i // GROUP),
                status="completed",
                stop="terminated",
                nodes=[given, said],
                steps=[Step(reward=reward)],
                reward=reward,
                success=reward > 0,
                sampling={"temperature": 1.0},
            )
        )
    return made


def _none(dtype: Any = np.float32) -> np.ndarray[Any, Any]:
    return np.zeros(0, dtype)


def ours(batch: Ragged, model: ModelConfig, threads: int) -> Callable[[], float]:
    """Seconds of one `Trainer.train`."""
    config = LearnerConfig(lr=1e-6, threads=threads, device="cpu", correct="none", dual_clip=1e9, tokens_per_micro_batch=ROW)
    trainer, given = Trainer(config, model, seed=0), trajectories(batch)

    def step() -> float:
        started = time.perf_counter()
        trainer.train(given)
        return time.perf_counter() - started

    return step


def bare(batch: Ragged, load: Callable[[], Any], size: int) -> Callable[[], float]:
    """Seconds of forward, loss and backward, without any optimiser; packed rows of at most `size` tokens."""
    model = load().train()
    lengths = [PROMPT + len(c) for c in batch.completions]
    useful = sum(map(len, batch.completions))
    rows = []
    for members in pack(lengths, size) if size else [[i] for i in range(BATCH)]:
        ids = [np.concatenate([batch.prompts[i], batch.completions[i]]) for i in members]
        starts = np.cumsum([0, *map(len, ids[:-1])])
        at = [np.arange(s + PROMPT - 1, s + len(x) - 1) for s, x in zip(starts, ids, strict=True)]
        weight = np.concatenate([np.full(len(batch.completions[i]), batch.advantages[i], np.float32) for i in members])
        positions = np.concatenate([np.arange(len(x)) for x in ids])
        rows.append(tuple(map(torch.from_numpy, (np.concatenate(ids)[None], positions[None], np.concatenate(at), weight))))

    def step() -> float:
        started = time.perf_counter()
        for ids, positions, at, weight in rows:
            packed = {"position_ids": positions} if size else {}
            hidden = model.model(input_ids=ids, use_cache=False, **packed).last_hidden_state[0].index_select(0, at)
            loss = F.cross_entropy(model.lm_head(hidden).float(), ids[0, at + 1], reduction="none")
            ((loss * weight).sum() / useful).backward()
        seconds = time.perf_counter() - started
        model.zero_grad()
        return seconds

    return step


def trl(batch: Ragged, load: Callable[[], Any], folder: str, micro: int, steps: int) -> Iterator[float]:
    """Seconds of each of `steps` training steps of TRL, taken one at a time."""
    import threading
    from queue import Queue

    from datasets import Dataset
    from transformers import AutoTokenizer, PrinterCallback, TrainerCallback
    from trl import GRPOConfig, GRPOTrainer

    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    tokenizer.pad_token = tokenizer.pad_token or tokenizer.eos_token
    longest = max(map(len, batch.completions))
    mask = torch.tensor([[1] * len(c) + [0] * (longest - len(c)) for c in batch.completions], dtype=torch.int32)
    padded = torch.tensor([[*c, *[tokenizer.pad_token_id] * (longest - len(c))] for c in batch.completions])
    prompts = torch.from_numpy(batch.prompts)
    given = {
        "prompt_ids": prompts,
        "prompt_mask": torch.ones_like(prompts),
        "completion_ids": padded,
        "completion_mask": mask,
        "advantages": torch.tensor(batch.advantages, dtype=torch.float32),
        "num_items_in_batch": mask.sum().float(),
    }

    class Fixed(GRPOTrainer):  # type: ignore[misc]
        def _generate_and_score_completions(self, inputs: Any) -> Any:
            return dict(given)

    go: Queue[bool] = Queue()
    done: Queue[float | BaseException] = Queue()

    class Clock(TrainerCallback):  # type: ignore[misc]
        def on_step_begin(self, *_: Any, **__: Any) -> None:
            go.get()
            self.started = time.perf_counter()

        def on_step_end(self, *_: Any, **__: Any) -> None:
            done.put(time.perf_counter() - self.started)

    def train() -> None:
        try:
            with tempfile.TemporaryDirectory() as output:
                arguments = GRPOConfig(
                    output_dir=output,
                    use_cpu=True,
                    bf16=False,
                    report_to="none",
                    save_strategy="no",
                    logging_steps=1,
                    disable_tqdm=True,
                    per_device_train_batch_size=micro,
                    gradient_accumulation_steps=BATCH // micro,
                    num_generations=GROUP,
                    max_completion_length=longest,
                    max_steps=steps,
                    beta=0.0,
                    gradient_checkpointing=False,
                    learning_rate=1e-6,
                    dataloader_pin_memory=False,
                )
                trainer = Fixed(
                    model=load(),
                    args=arguments,
                    processing_class=tokenizer,
                    reward_funcs=lambda completions, **_: [0.0] * len(completions),
                    train_dataset=Dataset.from_dict({"prompt": ["x"] * 64}),
                    callbacks=[Clock()],
                )
                trainer.remove_callback(PrinterCallback)  # standard output is for the figures
                trainer.train()
        except BaseException as error:
            done.put(error)

    threading.Thread(target=train, daemon=True).start()  # it only moves when asked, so no two sides run at once
    for _ in range(steps):
        go.put(True)
        seconds = done.get(timeout=600)
        if isinstance(seconds, BaseException):
            raise seconds
        yield seconds


def main(
    model: str = typer.Option("", help="model folder in Hugging Face layout; default: a tiny one of our own"),
    dtype: str = typer.Option("float32", help="dtype of the weights"),
    micro: int = typer.Option(32, help="completions of TRL's micro-batch"),
    threads: int = typer.Option(0, help="torch threads of all sides; 0: one for each core"),
    quick: bool = typer.Option(False, help="fewer rounds; the figures mean nothing"),
) -> None:
    from transformers import AutoModelForCausalLM

    rounds, warm = (2, 1) if quick else (9, 2)
    threads = threads or os.cpu_count() or 1
    torch.set_num_threads(threads)
    load_before = os.getloadavg()[0]
    with tempfile.TemporaryDirectory() as scratch:
        folder = model or str(make_tiny(Path(scratch) / "model", ["the quick brown fox"], context=2048))

        def load() -> Any:
            return AutoModelForCausalLM.from_pretrained(folder, dtype=getattr(torch, dtype), local_files_only=True)

        if not model:  # one set of weights for all
            from transformers import AutoConfig

            torch.manual_seed(0)
            AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder)).save_pretrained(folder)
        batch = ragged(load().config.vocab_size)
        sides: dict[str, Callable[[], float]] = {"ours": ours(batch, ModelConfig(path=folder, dtype=dtype), threads)}
        sides |= {f"bare {size or 'one by one'}": bare(batch, load, size) for size in LAYOUTS}
        theirs = trl(batch, load, folder, micro, warm + rounds)
        sides["trl"] = lambda: next(theirs)
        seconds: dict[str, list[float]] = {name: [] for name in sides}
        for turn in range(warm + rounds):
            for name, step in sides.items():
                took = step()
                print(f"round {turn} {name}: {took:.3f} s", file=sys.stderr)
                if turn >= warm:
                    seconds[name].append(took)
    median = {name: statistics.median(values) for name, values in seconds.items()}
    best = min((name for name in median if name.startswith("bare")), key=median.__getitem__)
    context = {
        "tokens": batch.tokens,
        "tokens_per_s": {name: round(batch.tokens / value, 1) for name, value in median.items()},
        "seconds": {name: [round(min(v), 4), round(median[name], 4), round(max(v), 4)] for name, v in seconds.items()},
        "model": Path(model).name if model else "tiny",
        "dtype": dtype,
        "threads": threads,
        "rounds": rounds,
        "load_before": round(load_before, 2),
    }
    cases = [("speedup_vs_trl_ragged", "trl", "TRL GRPOTrainer"), ("fraction_of_bare_forward_backward", best, best)]
    for name, side, compared in cases:
        value = round(median[side] / median["ours"], 3)
        print(
            json.dumps({"name": name, "value": value, "unit": "x", "compared_with": compared, "context": context}), flush=True
        )


if __name__ == "__main__":
    typer.run(main)
