"""How soon the main job's agent is good, beside TRL's GRPOTrainer on the same world, from the same cold-started weights.

    python bench/train.py [--quick] [--seed N] [--budget SECONDS] [--trl-threads N]

One JSON line a case: {"name", "value", "unit", "compared_with", "context"}. The value is Troupe's; TRL's is in the context.

seconds_to_success_0.6: wall-clock seconds from the start of the process, its cold start included, until the success on
200 held-out lakes (temperature 1) first reaches 0.6; null if it does not within the budget. Both sides are scored every
`EVERY` steps by the same engine, loop, tasks and sampling seeds. Troupe's clock runs on while it evaluates; TRL's is
stopped for that, and starts at the seconds that Troupe's cold start took, whose weights it is given.
seconds_per_step: the median of a whole training step: 64 episodes, two passes over them, and new weights for sampling.

What is not equal is said in `NOT_EQUAL` and printed with the figures. Progress goes to stderr.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import json
import multiprocessing
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import typer

from troupe.actors import rendering
from troupe.actors.rendering import Message, Rendering
from troupe.actors.settings import RunConfig
from troupe.cluster import config as recipes
from troupe.envs import registry
from troupe.envs.base import InvalidAction, Task, rng_of

TARGET = 0.6
RECIPE = Path(__file__).parent.parent / "recipes" / "frozen_lake.toml"
EVERY = 2
"""Steps between two evaluations: the target is near, and a coarser look would tell little but the cold start."""
STEPS = 300
"""More than either side can take within a sensible budget: the budget ends a run, not its steps."""

FULL = [f"steps={STEPS}", f"eval.every={EVERY}", "keep_checkpoints=1000"]
QUICK = ["steps=2", "eval.every=1", "eval.tasks=16", "cold_start.steps=30", "cold_start.demonstrations=200"]

NOT_EQUAL = [
    "Troupe's seconds include its evaluations; TRL's exclude them",
    "TRL is charged Troupe's cold start as measured (demonstrations and supervised steps) and its own imports and set-up",
    "Troupe samples the next step's episodes while it learns: up to one version stale, with a truncated importance weight; "
    "TRL is synchronous and on-policy",
    "Troupe: one sampling thread, the recipe's learning threads and two environment processes, all at once; "
    "TRL: one process that samples with as many threads as Troupe, then learns with `trl_threads`",
    "Troupe keeps the keys and values between turns; TRL's rollout function calls transformers' generate on the whole "
    "conversation each turn, all live episodes as one left-padded batch",
    "TRL pads and measures old logprobs in a forward pass of its own; Troupe packs, takes them from the first pass and "
    "leaves out episodes without an advantage",
    "Troupe stores every trajectory and writes a checkpoint each ten steps; TRL writes nothing",
    "the same tasks in the same order, but other random numbers when sampling; GRPO's epsilon is 1e-6 in Troupe, 1e-4 in TRL",
]


@dataclass(slots=True)
class Learned:
    """How one side did. Seconds are since its process was started, unless they are said to be of something.

    curve: (seconds, steps, success) of each evaluation. starting_s: until the cold start could begin (Troupe) or the
    first step could (TRL). step_s: each training step, without evaluations. rollout_s: of each, playing (TRL only:
    Troupe plays beside learning).
    """

    seconds: float | None = None
    curve: list[tuple[float, int, float]] = field(default_factory=list)
    starting_s: float = 0.0
    cold_start_s: float = 0.0
    evaluation_s: float = 0.0
    step_s: list[float] = field(default_factory=list)
    rollout_s: list[float] = field(default_factory=list)

    def score(self, seconds: float, step: int, success: float) -> None:
        """Takes an evaluation down."""
        self.curve.append((round(seconds, 1), step, round(success, 3)))
        if self.seconds is None and success >= TARGET:
            self.seconds = round(seconds, 1)

    def pace(self) -> float | None:
        """Mean seconds a step from the first evaluation to the last, on this side's clock."""
        if len(self.curve) < 2:
            return None
        (began, _, _), (ended, steps, _) = self.curve[0], self.curve[-1]
        return round((ended - began) / steps, 3)

    def about(self, clock_runs_on: bool) -> dict[str, Any]:
        """For the context of a line. training_s: what of `seconds` is neither start, cold start nor evaluation."""
        before = self.starting_s + self.cold_start_s + (self.evaluation_s if clock_runs_on else 0.0)
        return {
            "seconds": self.seconds,
            "training_s": round(self.seconds - before, 1) if self.seconds else None,
            "steps": self.curve[-1][1] if self.curve else 0,
            "best_success": max((success for _, _, success in self.curve), default=None),
            "starting_s": round(self.starting_s, 1),
            "cold_start_s": round(self.cold_start_s, 1),
            "evaluation_s": round(self.evaluation_s, 1),
            "curve": self.curve,
        }


def main(
    quick: bool = typer.Option(False, help="a few steps, to see that it works"),
    seed: int = typer.Option(0, help="seed of both runs"),
    budget: float = typer.Option(480.0, help="seconds that each side may take"),
    trl_threads: int = typer.Option(2, help="torch threads of TRL while it learns: nothing else runs then, so both cores"),
) -> None:
    if any(importlib.util.find_spec(name) is None for name in ("trl", "datasets")):
        print("bench/train.py compares with TRL, which is not installed: pip install -e .[bench]", file=sys.stderr)
        raise typer.Exit(2)
    load = os.getloadavg()[0]
    with tempfile.TemporaryDirectory(prefix="troupe-bench-") as temporary:
        run = Path(temporary) / "run"
        ours = with_troupe(run, QUICK if quick else FULL, seed, budget)
        # A process of its own, as a user's would be; spawned, so that it inherits nothing that is loaded here.
        with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as process:
            theirs = process.submit(with_trl, str(run), ours.cold_start_s, budget, time.time(), trl_threads).result()
    from importlib.metadata import version

    about = {
        "quick": quick,
        "seed": seed,
        "budget_s": budget,
        "trl_threads": trl_threads,
        "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "load_before": round(load, 1),
    }
    compared = f"TRL {version('trl')} GRPOTrainer, rollout_func"
    reached = ours.seconds and theirs.seconds
    _print(
        name=f"seconds_to_success_{TARGET}",
        value=ours.seconds,
        unit="s",
        compared_with=compared,
        context={
            "trl_over_troupe": round(theirs.seconds / ours.seconds, 2) if reached else None,
            "troupe": ours.about(clock_runs_on=True),
            "trl": theirs.about(clock_runs_on=False),
            "not_equal": NOT_EQUAL,
            **about,
        },
    )
    mine, other = _median(ours.step_s), _median(theirs.step_s)
    _print(
        name="seconds_per_step",
        value=mine,
        unit="s",
        compared_with=compared,
        context={
            "trl_over_troupe": round(other / mine, 2) if mine and other else None,
            "trl": other,
            "steps": {"troupe": len(ours.step_s), "trl": len(theirs.step_s)},
            "trl_rollout": _median(theirs.rollout_s),
            # what a step came to over the whole training: Troupe's evaluations too, in which it samples ahead
            "mean_over_all": {"troupe": ours.pace(), "trl": theirs.pace()},
            **about,
        },
    )


# -- Troupe ------------------------------------------------------------------------------------------------------------


def with_troupe(run: Path, overrides: list[str], seed: int, budget: float) -> Learned:
    """`troupe train` on the recipe, watched through its run folder, and stopped at the target or the budget's end."""
    from troupe.actors import journal
    from troupe.actors.evaluator import read_evaluations

    learned, began = Learned(), time.time()
    sets = [part for override in overrides for part in ("--set", override)]
    command = [sys.executable, "-m", "troupe", "train", str(RECIPE), "--run-dir", str(run), "--seed", str(seed), *sets]
    with _running(command, run.parent / "log") as process:
        over = False
        while not over:
            over = process.poll() is not None or time.time() - began > budget
            for score in read_evaluations(str(run / "evals.jsonl"))[len(learned.curve) :]:
                learned.score(time.time() - began, score.version, score.success)
                learned.evaluation_s += score.seconds
                _tell("troupe", learned)
            over = over or learned.seconds is not None
            time.sleep(0.1)
        if process.poll():
            raise SystemExit(f"troupe train failed:\n{(run.parent / 'log').read_text()[-2000:]}")
    events = journal.read(str(run / "journal.jsonl"))
    cold = next((row["time"] for row in events if row["event"] == "cold_started"), None)
    if cold is None:
        raise SystemExit(f"troupe train did not end its cold start within {budget:g} s: give a larger --budget")
    gathered = max(row["time"] for row in events if row["event"] == "started" and row["time"] < cold)
    learned.starting_s, learned.cold_start_s = gathered - began, cold - gathered
    learned.step_s = [row["seconds"] for row in journal.read(str(run / "metrics.jsonl"))]
    return learned


@contextlib.contextmanager
def _running(command: list[str], log: Path) -> Iterator[subprocess.Popen[bytes]]:
    """The command while the block lasts; then it is interrupted, as by Ctrl-C, and awaited."""
    with open(log, "wb") as output, subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT) as process:
        try:
            yield process
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
            try:
                process.wait(90)
            except subprocess.TimeoutExpired:
                process.kill()


# -- TRL ---------------------------------------------------------------------------------------------------------------


def with_trl(run: str, cold_start_s: float, budget: float, began: float, threads: int) -> Learned:
    """GRPOTrainer with the settings of the run in the folder `run`, from its cold-started weights. `began`: when the
    process was started (seconds since the epoch). threads: of torch while it learns. Runs in a process of its own."""
    os.environ["HF_HUB_OFFLINE"] = "1"
    os.environ["TRL_EXPERIMENTAL_SILENCE"] = "1"  # rollout_func is experimental, and says so
    import torch
    from datasets import Dataset
    from transformers import AutoModelForCausalLM, AutoTokenizer, PrinterCallback, TrainerCallback
    from transformers.utils.logging import disable_progress_bar
    from trl import GRPOConfig, GRPOTrainer

    config = recipes.read(str(Path(run) / "config.toml"))
    folder = str(Path(run) / "checkpoints" / "step-0" / "model")
    learner, rollout = config.learner, config.rollout
    torch.set_num_threads(threads)
    disable_progress_bar()
    lakes = Lakes(config, folder)
    learned = Learned(cold_start_s=cold_start_s)

    def clock() -> float:
        return time.time() - began - learned.evaluation_s + cold_start_s

    class Watch(TrainerCallback):
        """Takes the time of steps, evaluates between them, and stops at the target or the budget's end."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            learned.starting_s = clock() - cold_start_s
            self.evaluate(0)
            self.last = clock()

        def on_step_end(self, args: Any, state: Any, control: Any, **_: Any) -> None:
            step, rest = divmod(state.global_step, learner.passes)  # TRL's step is one pass
            if rest:
                return
            learned.step_s.append(clock() - self.last)
            if step % config.eval.every == 0:
                self.evaluate(step)
            control.should_training_stop = learned.seconds is not None or clock() > budget
            self.last = clock()

        def evaluate(self, step: int) -> None:
            seconds, paused = clock(), time.time()
            success = asyncio.run(held_out(config, folder, trainer.model))
            torch.set_num_threads(threads)  # the engine has set its own number
            learned.evaluation_s += time.time() - paused
            learned.score(seconds, step, success)
            _tell("trl", learned)

    tokenizer = AutoTokenizer.from_pretrained(folder, padding_side="left")
    with tempfile.TemporaryDirectory() as output, contextlib.redirect_stdout(sys.stderr):
        trainer = GRPOTrainer(
            model=AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32),
            processing_class=tokenizer,
            train_dataset=Dataset.from_dict({"prompt": lakes.prompts()}),
            reward_funcs=lambda completions, earned, **_: earned,
            rollout_func=lakes.play,
            callbacks=[Watch()],
            args=GRPOConfig(
                output_dir=output,
                use_cpu=True,
                bf16=False,
                seed=config.seed,
                max_steps=config.steps * learner.passes,
                # a step's episodes are one batch, used `passes` times, in the order of the data set
                per_device_train_batch_size=rollout.groups_per_step * rollout.group_size,
                gradient_accumulation_steps=1,
                num_generations=rollout.group_size,
                num_iterations=learner.passes,
                shuffle_dataset=False,
                # the same loss and optimiser
                beta=0.0,
                epsilon=learner.clip_low,
                epsilon_high=learner.clip_high,
                delta=learner.dual_clip,
                loss_type="dapo",  # the mean over the batch's tokens
                scale_rewards="group",
                learning_rate=learner.lr,
                lr_scheduler_type="constant",
                adam_beta1=learner.betas[0],
                adam_beta2=learner.betas[1],
                weight_decay=learner.weight_decay,
                max_grad_norm=learner.max_grad_norm,
                # the same sampling
                temperature=rollout.temperature,
                top_p=rollout.top_p,
                top_k=rollout.top_k,
                generation_kwargs={"max_new_tokens": rollout.max_tokens},
                # nothing that costs time and is not needed here
                gradient_checkpointing=False,
                dataloader_pin_memory=False,
                report_to="none",
                save_strategy="no",
                logging_strategy="no",
                disable_tqdm=True,
            ),
        )
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    learned.rollout_s = lakes.seconds
    return learned


class Lakes:
    """The run's training tasks as TRL wants them: a data set of prompts, and a function that plays them."""

    def __init__(self, config: RunConfig, folder: str) -> None:
        self._config = config
        self._chat = rendering.load(folder)
        self._kind = registry.find(config.env.name)
        self._turns = config.env.max_turns or self._kind.max_turns
        self._tasks: dict[str, Task] = {}
        self.seconds: list[float] = []
        """What each call of `play` took."""

    def prompts(self) -> list[list[dict[str, str]]]:
        """The first observations of the tasks that the dispatcher deals in steps 1, 2, …, in its order."""
        config, found = self._config, []
        for step in range(1, config.steps + 1):
            for ordinal in range(config.rollout.groups_per_step):
                task = self._kind.task("train", config.seed * 10_000_000_000 + step * 10_000 + ordinal)
                world = registry.make(self._kind, config.env.options)
                world.rng = rng_of(task)
                observation = world.reset(task)
                self._tasks[observation] = task  # rollout_func is given prompts, and nothing else of a row
                found.append([{"role": "user", "content": observation}])
        return found

    def play(self, prompts: list[list[dict[str, str]]], trainer: Any) -> dict[str, Any]:
        """A rollout_func: one episode a prompt, a turn of all live ones at a time. env_mask is 1 where the policy spoke."""
        import torch

        began = time.perf_counter()
        # One thread as in Troupe's generator: a step of so small a model is too short to be worth sharing.
        learning = torch.get_num_threads()
        torch.set_num_threads(self._config.generator.threads)
        model = trainer.accelerator.unwrap_model(trainer.model)
        episodes = [self._episode(prompt[0]["content"]) for prompt in prompts]
        model.eval()
        for _ in range(self._turns):
            live = [episode for episode in episodes if not episode.done]
            if not live:
                break
            contexts = [episode.listen() for episode in live]
            width = max(map(len, contexts))
            ids = torch.zeros(len(live), width, dtype=torch.int64)
            mask = torch.zeros_like(ids)
            for row, context in enumerate(contexts):
                ids[row, width - len(context) :] = torch.tensor(context)
                mask[row, width - len(context) :] = 1
            with torch.no_grad():
                new = model.generate(input_ids=ids, attention_mask=mask, generation_config=trainer.generation_config)
            for episode, said in zip(live, new[:, width:].tolist(), strict=True):
                episode.act(said)
        model.train()
        torch.set_num_threads(learning)
        self.seconds.append(time.perf_counter() - began)
        return {
            "prompt_ids": [episode.prompt for episode in episodes],
            "completion_ids": [episode.completion for episode in episodes],
            "env_mask": [episode.mask for episode in episodes],
            "logprobs": None,
            "earned": [episode.earned for episode in episodes],
        }

    def _episode(self, observation: str) -> _Episode:
        return _Episode(registry.make(self._kind, self._config.env.options), self._tasks[observation], self._chat)


class _Episode:
    """What `actors/loops/text.py` and the recorder do, one turn at a time."""

    def __init__(self, world: Any, task: Task, chat: Rendering) -> None:
        self.prompt: list[int] = []
        self.completion: list[int] = []
        self.mask: list[int] = []
        self.earned = 0.0
        self.done = False
        self._world, self._chat = world, chat
        world.rng = rng_of(task)
        self._heard: Message = {"role": "user", "content": world.reset(task)}
        self._said: list[int] = []

    def listen(self) -> list[int]:
        """Takes in what came back; the context for the next turn."""
        if not self.prompt:
            self.prompt = [id_ for part in self._chat.opening([self._heard]) for id_ in part.ids]
        else:
            context = self.prompt + self.completion
            before = context[: len(context) - len(self._said)]
            heard = [id_ for part in self._chat.extension(before, self._said, [self._heard]) or [] for id_ in part.ids]
            self.completion += heard
            self.mask += [0] * len(heard)
        return self.prompt + self.completion

    def act(self, said: list[int]) -> None:
        """Acts on what was sampled (padding after its end included)."""
        end = self._chat.stop_ids[0]
        said = said[: said.index(end) + 1] if end in said else said
        self.completion += said
        self.mask += [1] * len(said)
        try:
            turn = self._world.step(self._chat.parse(said).text)
        except (InvalidAction, ValueError) as error:
            observation = f"Invalid action: {error}"
        else:
            self.earned += turn.reward
            self.done, observation = turn.done, turn.text
        self._said, self._heard = said, {"role": "user", "content": observation}


# -- the same examination for both -------------------------------------------------------------------------------------


async def held_out(config: RunConfig, folder: str, model: Any) -> float:
    """Success of `model` on the run's held-out tasks, as the run's evaluator measures it: the same engine, loop, tasks,
    limits and sampling seeds. `folder` holds model and tokenizer."""
    from troupe.actors.factories import make_engine
    from troupe.actors.groups import seed_of
    from troupe.actors.loops.base import Outcome, Stage
    from troupe.actors.loops.text import text
    from troupe.actors.recorder import Recorder
    from troupe.envs.drive import Driver
    from troupe.learner.model import tensors_of
    from troupe.protocol.messages import Limits, RunEpisode, Sampling

    world, chat, rollout = registry.find(config.env.name), rendering.load(folder), config.rollout
    limits = Limits(config.env.max_turns or world.max_turns, rollout.max_episode_tokens)
    sampling = Sampling(temperature=config.eval.temperature, max_tokens=rollout.max_tokens)
    engine = make_engine("evaluation", config.generator, config.model_settings(folder), config.seed)
    places = asyncio.Semaphore(config.env.actors * config.env.slots)

    async def episode(index: int) -> bool:
        task, seed = world.task("heldout", index), seed_of(config.seed, index, 0)
        message = RunEpisode(str(index), 0, index, 0, "eval", 0, task, sampling, limits, seed)
        async with places:
            outcome = Outcome()
            driver = Driver(registry.make(world, config.env.options))
            try:
                await text(Stage(driver, world.system, task, Recorder(message, chat, engine), limits, outcome))
            finally:
                await driver.close()
                await engine.end_session(f"{index}/0")
        return bool(outcome.success)

    await engine.start()
    try:
        await engine.load_weights(0, tensors_of(model))
        return statistics.mean(await asyncio.gather(*(episode(index) for index in range(config.eval.tasks))))
    finally:
        await engine.close()


def _median(seconds: list[float]) -> float | None:
    return round(statistics.median(seconds), 3) if seconds else None


def _tell(who: str, learned: Learned) -> None:
    seconds, step, success = learned.curve[-1]
    print(f"{who:>6}  {seconds:6.1f} s  step {step:3}  held-out success {success:.3f}", file=sys.stderr, flush=True)


def _print(**line: Any) -> None:
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    typer.run(main)
