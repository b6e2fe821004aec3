"""`python -m troupe.learner.train`: the learner alone, on stored trajectories. No Ray, no actor.

Owns the command: what it is given, what it prints, where it saves. Promises:
- the same data, model, recipe and device give the same weights, to the byte; their checksum is printed after each step;
- a replayed step of a run is compared with what the run recorded, without tolerance; exit code 1 if it differs;
- nothing is written but `--output`, which must not be there yet;
- an error is one line, never a traceback.
"""

from __future__ import annotations

import itertools
import json
import os
import sys
from collections.abc import Iterable
from contextlib import suppress
from importlib import metadata
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NoReturn

import typer
from rich.console import Console
from rich.markup import escape

from troupe.learner import recipe
from troupe.learner.data import Batches, read, trajectories
from troupe.learner.health import in_force
from troupe.learner.recipe import Recipe
from troupe.learner.replay import Difference, Past, Version, differences
from troupe.protocol.checksum import checksum_of
from troupe.protocol.errors import ConfigError, TroupeError

if TYPE_CHECKING:
    import pyarrow as pa

    from troupe.learner.ranked import RankedTrainer
    from troupe.learner.trainer import Trainer

app = typer.Typer(add_completion=False, pretty_exceptions_enable=False, rich_markup_mode="rich")

_SHOWN = {
    "loss": ".4f",
    "dpo_loss": ".4f",
    "dpo_accuracy": ".2f",
    "reward_mean": ".3f",
    "success": ".2f",
    "grad_norm": ".3f",
    "entropy": ".3f",
    "kl": ".4f",
}


@app.command(no_args_is_help=True)
def train(
    run: Annotated[str | None, typer.Option(help="take a step of this run folder again")] = None,
    step: Annotated[int | None, typer.Option(min=1, help="with --run: which (default: the last one recorded)")] = None,
    data: Annotated[str | None, typer.Option(help="train on this: RUN/trajectories, or an Arrow or Parquet file")] = None,
    objective: Annotated[
        Literal["rl", "sft", "dpo"],
        typer.Option(help="with --data. rl: a training step a batch; sft: imitate successes; dpo: prefer them to failures"),
    ] = "rl",
    model: Annotated[str | None, typer.Option(help="model folder in Hugging Face layout")] = None,
    config: Annotated[str | None, typer.Option(help="with --data: recipe whose learner, model and seed are taken")] = None,
    set_: Annotated[list[str] | None, typer.Option("--set", help="override a key: learner.lr=1e-4 (repeatable)")] = None,
    seed: Annotated[int | None, typer.Option(min=0, help="with --data: seed of all that is drawn")] = None,
    from_: Annotated[str | None, typer.Option("--from", help="checkpoint folder to go on from, optimiser included")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="with --data: steps at most (default: all batches)")] = None,
    epochs: Annotated[int, typer.Option(min=1, help="with --data: how many times all of it is taken")] = 1,
    batch: Annotated[int, typer.Option(min=1, help="with sft: demonstrations a step")] = 32,
    only_success: Annotated[
        bool, typer.Option("--only-success/--all", help="with sft: whether failed trajectories are left out")
    ] = True,
    output: Annotated[str | None, typer.Option("--output", "-o", help="checkpoint folder to make; its model/ loads")] = None,
    json_: Annotated[bool, typer.Option("--json", help="one JSON object a step on standard output")] = False,
) -> None:
    """Trains on stored trajectories, without Ray: any step of a run again, or data of your choice.

    Step 12 of a run again, to the byte:

    python -m troupe.learner.train --run runs/frozen_lake-… --step 12

    The same with another learning rate, to see what changes:

    python -m troupe.learner.train --run runs/frozen_lake-… --step 12 --set learner.lr=1e-3

    On stored data, each training step in it being one batch:

    python -m troupe.learner.train --data RUN/trajectories --model RUN/checkpoints/step-0/model --config RUN/config.toml -o out

    Imitate what succeeded:

    python -m troupe.learner.train --data some.arrow --model smollm2 --objective sft --epochs 3 -o out
    """
    tell = _Teller(json_)
    _check_output(output)
    equal = True
    if run is not None and data is None:
        if config or steps or epochs > 1 or objective != "rl" or seed is not None:
            fix = "leave out --config, --objective, --steps, --epochs and --seed"
            raise ConfigError(f"--run takes recipe, seed and data from the run: {fix}")
        trainer, equal = _replay(Past(run), step, from_, model, set_ or [], tell)
    elif data is not None and run is None:
        if step is not None:
            raise ConfigError("--step is of --run; with --data, --steps says how many steps to take")
        made, _ = recipe.read(config, [*(set_ or []), *([f"seed={seed}"] if seed is not None else [])])
        tell.note(f"settings: [learner], [model] and seed of {config}" if config else "settings: the defaults; see --config")
        stored = read(data)
        for reason, count in stored.left_out.items():
            tell.note(f"{count} trajectories left out: {reason}")
        if objective == "dpo":
            made.learner = made.learner.model_copy(update={"objective": "preference"})
        trainer = _trainer(made, model or made.model.path, from_)
        from troupe.learner.model import has_weights

        if from_ is None and not has_weights(model or made.model.path):
            tell.note(f"'{model or made.model.path}' has no weights: they are drawn from the seed")
        if objective == "sft":
            _imitate(trainer, stored, tell, steps=steps, epochs=epochs, batch=batch, only_success=only_success)
        else:
            tables = itertools.chain.from_iterable(itertools.repeat(list(stored.by_step.values()), epochs))
            (_prefer if objective == "dpo" else _reinforce)(trainer, tables, tell, steps)
    else:
        raise ConfigError("say what to train on: either --run RUN, to take a step of it again, or --data for stored data")
    if output is not None:
        try:
            trainer.save(output)
        except OSError as error:
            raise ConfigError(f"cannot write '{output}': {error.strerror}") from error
        tell.result(f"saved to {output}; the model that others load is {Path(output) / 'model'}")
    if not equal:
        raise typer.Exit(1)


# -- a step of a run -------------------------------------------------------------------------------------------------


def _replay(
    past: Past, step: int | None, checkpoint: str | None, model: str | None, overrides: list[str], tell: _Teller
) -> tuple[Trainer | RankedTrainer, bool]:
    """Takes the steps from a checkpoint up to `step` again; also says whether all of them equal the run's."""
    made, whole = recipe.read(past.recipe, overrides)
    try:
        groups, cold = int(whole["rollout"]["groups_per_step"]), bool(whole["cold_start"]["steps"])
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"'{past.recipe}' is no run's resolved recipe: it says nothing of {error}") from error
    last = step or max(past.metrics, default=0)
    if not last:
        raise ConfigError(f"'{past.folder}' has recorded no step yet: name one with --step")
    past.batch(last, groups)  # is it there? said before a model is loaded
    begin = Path(checkpoint) if checkpoint else past.checkpoint(last, cold_started=cold)
    known = past.versions.get(last)
    if known is not None and known.device and made.learner.device == "auto":
        made.learner.device = known.device
    trainer = _trainer(made, model or past.model(made.model.path), begin)
    if trainer.step >= last:
        raise ConfigError(f"'{begin}' is of step {trainer.step}: step {last} needs a checkpoint from before it")
    weights = tell.begin(trainer)
    equal = True
    if (start := past.versions.get(trainer.step)) is not None and start.checksum != weights:
        equal = False
        tell.result(f"version {trainer.step}, where this begins, is not the run's: {weights} here, {start.checksum} there")
    while trainer.step < last:
        table = past.batch(trainer.step + 1, groups)
        changes, restart = in_force(past.remedies, trainer.step + 1)
        trainer.adjust(changes)
        if restart is not None:
            trainer.roll_back(past.folder / "checkpoints" / f"step-{restart}")
        metrics = trainer.train(trajectories(table))
        weights = _weights(trainer)
        found = differences(past, trainer.step, metrics, weights)
        differs = {d.name: [d.here, d.run] for d in found} if past.recorded(trainer.step) else None
        tell.step(trainer.step, metrics, weights, differs=differs)
        tell.result(_verdict(past, trainer, weights, found))
        equal = equal and not found
    return trainer, equal


def _verdict(past: Past, trainer: Trainer | RankedTrainer, weights: str, found: list[Difference]) -> str:
    step = trainer.step
    version = past.versions.get(step)
    if found:
        first, here = found[0], trainer.config
        also = f"; also {', '.join(d.name for d in found[1:])}" if len(found) > 1 else ""
        with_ = f"{here.device}, {here.threads} threads, {here.ranks} ranks, torch {metadata.version('torch')}"
        used = f"here {with_}; the run {_made_with(past, version)}"
        return f"step {step}: differs from the run: {first.name} {first.here} here, {first.run} there{also} ({used})"
    if version is not None:
        return f"step {step}: weights equal to the run's, to the byte ({weights})"
    if step in past.metrics:
        return f"step {step}: metrics equal to the run's, to the last digit; it announced no checksum of these weights"
    return f"step {step}: the run recorded nothing of it to compare with; weights {weights}"


def _made_with(past: Past, version: Version | None) -> str:
    device, torch = (version.device, version.torch) if version is not None else ("", "")
    theirs = recipe.read(past.recipe, [])[0].learner
    return f"{device or 'unknown'}, {theirs.threads} threads, {theirs.ranks} ranks, torch {torch or 'unknown'}"


# -- stored data -----------------------------------------------------------------------------------------------------


def _reinforce(trainer: Trainer | RankedTrainer, tables: Iterable[pa.Table], tell: _Teller, steps: int | None) -> None:
    """A training step a batch."""
    tell.begin(trainer)
    for table in itertools.islice(tables, steps):
        metrics = trainer.train(trajectories(table))
        tell.step(trainer.step, metrics, _weights(trainer))


def _prefer(trainer: Trainer | RankedTrainer, tables: Iterable[pa.Table], tell: _Teller, steps: int | None) -> None:
    """A step of preferences on each batch that has any. Raises BatchError if none has."""
    from troupe.learner.errors import BatchError
    from troupe.learner.preferences import pairs_of

    tell.begin(trainer)
    taken = skipped = 0
    for found in map(trajectories, tables):
        if taken == steps:
            break
        if not pairs_of(found):
            skipped += 1
            continue
        metrics = trainer.prefer(found)
        tell.step(trainer.step, metrics, _weights(trainer))
        taken += 1
    if not taken:
        raise BatchError("in no step has a task both a successful and a failed trajectory: there is nothing to prefer")
    if skipped:
        tell.note(f"{skipped} batches passed over: no task in them has both a success and a failure")


def _imitate(
    trainer: Trainer | RankedTrainer,
    stored: Batches,
    tell: _Teller,
    *,
    steps: int | None,
    epochs: int,
    batch: int,
    only_success: bool,
) -> None:
    """Supervised steps on what the policy said. Raises ConfigError if nothing succeeded."""
    from troupe.learner.success import succeeded

    seen = [t for table in stored.by_step.values() for t in trajectories(table)]
    chosen = [t for t in seen if succeeded(t) or not only_success]
    if not chosen:
        raise ConfigError(f"none of {len(seen)} trajectories succeeded: --all imitates failed ones too")
    tell.note(f"{len(chosen)} of {len(seen)} trajectories are imitated")
    samples = [sample for t in chosen for sample in t.samples() if sample.mask.any()]
    wanted = epochs * -(-len(samples) // batch)
    alone = trainer.config.ranks == 1  # several have no time to be asked in between
    tell.begin(trainer)
    trainer.cold_start(
        [sample.tokens for sample in samples],
        [sample.mask for sample in samples],
        steps=wanted if steps is None else min(wanted, steps),
        batch=batch,
        progress=lambda done, of, loss: tell.step(done, {"loss": loss}, _weights(trainer) if alone else ""),
    )


# -- helpers ---------------------------------------------------------------------------------------------------------


def _trainer(made: Recipe, model: str, checkpoint: str | Path | None) -> Trainer | RankedTrainer:
    if not model:
        raise ConfigError("name the model with --model: a folder in Hugging Face layout, for example RUN/model")
    import torch
    import transformers

    from troupe.learner.ranked import RankedTrainer
    from troupe.learner.trainer import Trainer

    device = made.learner.device
    try:
        sees_it = device == "auto" or torch.device(device).type != "cuda" or torch.cuda.is_available()
    except RuntimeError as error:
        raise ConfigError(f"learner.device = '{device}' is no device of torch: cpu, cuda or auto") from error
    if not sees_it:
        raise ConfigError(f"learner.device = '{device}', but no GPU is seen here; close, not equal: --set learner.device=cpu")
    transformers.utils.logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    kind = Trainer if made.learner.ranks == 1 else RankedTrainer
    trainer = kind(made.learner, made.model.model_copy(update={"path": model}), seed=made.seed)
    if checkpoint is not None:
        trainer.restore(checkpoint)
    return trainer


def _weights(trainer: Trainer | RankedTrainer) -> str:
    return checksum_of(trainer.tensors())


def _check_output(output: str | None) -> None:
    """Found out before hours of training, not after."""
    if output is None:
        return
    if os.path.lexists(output):
        raise ConfigError(f"'{output}' exists already and is not written over: name another --output")
    folder = Path(output).absolute()
    made = [folder, *(above for above in folder.parents if not above.exists())]
    try:
        folder.mkdir(parents=True)  # may be read-only, full, below a file, of a name too long: only trying tells
    except OSError as error:
        raise ConfigError(f"cannot write '{output}': {error.strerror}") from error
    finally:
        for one in made:
            with suppress(OSError):
                one.rmdir()


class _Teller:
    """What the user is told: steps and notes on standard error and results on standard output; with `as_json` steps as
    JSON on standard output and all else on standard error."""

    def __init__(self, as_json: bool) -> None:
        self._json = as_json
        self._before = ""

    def note(self, text: str) -> None:
        self._print(text, aside=True)

    def result(self, text: str) -> None:
        self._print(text, aside=self._json)

    def begin(self, trainer: Trainer | RankedTrainer) -> str:
        """Says, and returns, the checksum of the weights that there are before any step."""
        self._before = _weights(trainer)
        self.note(f"step {trainer.step}   weights {self._before}")
        return self._before

    def step(self, step: int, metrics: dict[str, float], weights: str, **more: Any) -> None:
        if self._json:
            row = {"step": step, **metrics, "weights_before": self._before, "weights": weights, **more}
            print(json.dumps(row), flush=True)
        else:
            figures = "   ".join(f"{name} {metrics[name]:{form}}" for name, form in _SHOWN.items() if name in metrics)
            self.note(f"step {step}   {figures}   weights {weights}")
        self._before = weights

    def _print(self, text: str, *, aside: bool) -> None:
        print(text, file=sys.stderr if aside else sys.stdout, flush=True)


def main() -> None:
    """An error becomes one line and an exit code, wrong flags too."""
    try:
        code = app(prog_name="python -m troupe.learner.train", standalone_mode=False)
    except TroupeError as error:
        _fail(str(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except Exception as error:
        if not hasattr(error, "format_message"):  # typer's own errors have it
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()  # type: ignore[attr-defined]
            sys.exit(2)
        _fail(f"{error.format_message().rstrip('.')}. See: python -m troupe.learner.train --help", 2)
    sys.exit(code if isinstance(code, int) else 0)


def _fail(message: str, code: int) -> NoReturn:
    Console(stderr=True, highlight=False, soft_wrap=True, emoji=False).print(f"[red]troupe:[/red] {escape(message)}")
    sys.exit(code)


if __name__ == "__main__":
    main()
