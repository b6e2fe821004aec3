"""`troupe eval`: how good is a policy, on tasks that it has not been trained on?"""

from __future__ import annotations

import shutil
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer

from troupe.cluster.paths import from_here

_COUNT = 50
"""Tasks if the recipe evaluates none."""


def register(app: typer.Typer) -> None:
    """Adds the command to the `troupe` command."""

    @app.command("eval")
    def eval_(
        run: Annotated[str | None, typer.Argument(help="run folder", show_default=False)] = None,
        checkpoint: Annotated[str | None, typer.Option(help="step-N, or a checkpoint folder (default: the newest)")] = None,
        model: Annotated[str | None, typer.Option(help="without a run: a model's folder, or a fetched one's name")] = None,
        env: Annotated[str | None, typer.Option(help="world (default: the run's)")] = None,
        tasks: Annotated[str, typer.Option(help="held-out, train (what RUN trained on), or a JSONL file")] = "held-out",
        count: Annotated[int | None, typer.Option(help="tasks (default: the run's eval.tasks; of a file: all)")] = None,
        trials: Annotated[int | None, typer.Option(help="episodes of each task (default: the run's eval.trials)")] = None,
        k: Annotated[
            str | None, typer.Option(help="ks of pass@k and pass^k: 1,2,4 (default: powers of 2 up to trials)")
        ] = None,
        temperature: Annotated[float | None, typer.Option(help="0: greedy (default: the run's eval.temperature)")] = None,
        top_p: Annotated[float, typer.Option(help="nucleus sampling; 1: off")] = 1.0,
        top_k: Annotated[int, typer.Option(help="top-k sampling; 0: off")] = 0,
        max_tokens: Annotated[int | None, typer.Option(help="tokens a turn (default: the run's rollout.max_tokens)")] = None,
        seed: Annotated[int | None, typer.Option(help="seed of what is sampled (default: the run's)")] = None,
        output: Annotated[str | None, typer.Option("--output", "-o", help="JSON file (default: RUN/evals/NAME.json)")] = None,
        format: Annotated[str, typer.Option(help="table or json, on the terminal")] = "table",
        all_: Annotated[bool, typer.Option("--all", help="every task in the table, not the worst 20")] = False,
        force: Annotated[bool, typer.Option("--force", help="also tasks that were trained on; they are marked")] = False,
        set_: Annotated[list[str] | None, typer.Option("--set", help="override a key of the recipe: section.key=value")] = None,
    ) -> None:
        """Scores a policy: success, avg@n, pass@k and pass^k with intervals, turns, tokens, task by task.

        troupe eval runs/frozen_lake-… --trials 8

        troupe eval --model smollm2-135m --env guess --count 20
        """
        from troupe.cluster import eval_report, eval_tasks
        from troupe.cluster.evaluating import Plan, evaluate, prepared
        from troupe.envs import registry
        from troupe.protocol.errors import ConfigError
        from troupe.protocol.messages import Sampling

        if format not in ("table", "json"):
            raise ConfigError(f"unknown format '{format}', known: table, json")
        config, policy = _policy(run, checkpoint, model, env, set_ or [])
        trials = config.eval.trials if trials is None else trials
        ks = _ks(k, trials)
        from_file = tasks not in (eval_tasks.HELD_OUT, "heldout", eval_tasks.TRAIN)
        count = (0 if from_file else config.eval.tasks or _COUNT) if count is None else _at_least_one("--count", count)
        config = prepared(config, policy)
        sampling = Sampling(
            temperature=config.eval.temperature if temperature is None else temperature,
            top_p=top_p,
            top_k=top_k,
            max_tokens=config.rollout.max_tokens if max_tokens is None else max_tokens,
            stop=list(config.rollout.stop),
        )
        _check(sampling)
        if sampling.temperature == 0 and trials > 1:
            raise ConfigError(
                f"--trials {trials} at temperature 0 would play the same episode {trials} times: leave out --trials, or set a "
                "--temperature above 0"
            )
        history = eval_tasks.history_of(policy.weights)
        chosen = eval_tasks.choose(tasks, count, registry.find(config.env.name), history)
        contaminated = eval_tasks.guard(chosen, history, force)
        if len(chosen) < count:
            print(f"there are only {len(chosen)} such tasks of the {count} that were asked for", file=sys.stderr)
        folder = _folder(policy.run, f"step-{policy.version}" if policy.checkpoint else policy.folder.name)
        file = Path(output) if output else folder.with_suffix(".json")
        if not file.parent.is_dir() and output:
            raise ConfigError(f"--output '{output}': there is no folder '{file.parent}'")
        plan = Plan(folder, config, policy, chosen, trials, sampling, config.seed if seed is None else seed)
        began = time.time()
        try:
            with _progress(plan.episodes) as show:
                checksum, episodes = evaluate(plan, show)
        except KeyboardInterrupt:
            print("Stopped; nothing is kept of this evaluation.", file=sys.stderr)
            raise typer.Exit(130) from None
        found = eval_report.document(
            plan,
            episodes,
            ks,
            checksum=checksum,
            contaminated=contaminated,
            chosen=tasks,
            at=time.strftime("%Y-%m-%dT%H:%M:%S%z", time.localtime(began)),
            seconds=time.time() - began,
        )
        text = eval_report.text_of(found)
        try:
            file.write_text(text, encoding="utf-8")
        except OSError as error:
            raise ConfigError(f"cannot write '{file}': {error.strerror}; the episodes are in {from_here(folder)}") from error
        if format == "json":
            print(text, end="")
        else:
            print(eval_report.page(found, shutil.get_terminal_size((120, 50)).columns, all_), end="")
            kept = from_here(folder)
            print(f"All of it: {from_here(file)}\nThe episodes: troupe trace {kept}, troupe query {kept} SQL")
        if not found["scores"]["all"]["trials"]:
            raise typer.Exit(1)


def _policy(run: str | None, checkpoint: str | None, model: str | None, env: str | None, overrides: list[str]) -> Any:
    """The recipe and the policy that the flags name. Raises a TroupeError."""
    import json

    from troupe.cluster import config as recipes
    from troupe.cluster import launch
    from troupe.cluster.evaluating import Policy
    from troupe.protocol.errors import ConfigError

    if (run is None) == (model is None):
        raise ConfigError("name a run (troupe eval runs/…) or a model (--model NAME --env WORLD), one of them")
    if run is None:
        if env is None:
            raise ConfigError("--model needs a world to be evaluated in: --env frozen_lake, or file.py:Class")
        if checkpoint is not None:
            raise ConfigError("--checkpoint is one of a run: leave it out, or name the run")
        config = recipes.from_flags(env, [f"model.path={json.dumps(model)}", "model.lora=", *overrides])
        folder = launch.prepare_model(config, Path())
        return config, Policy(config.model_settings(str(folder)), folder)
    from troupe.serve import checkpoints

    folder, config = launch.known_folder(run)
    if env is not None and env != config.env.name:  # another world: with its own options and number of turns
        overrides = [f"env.name={json.dumps(env)}", "env.options=", "env.max_turns=", *overrides]
    config = recipes.read(str(folder / "config.toml"), overrides)
    found = checkpoints.find(folder, checkpoint)
    made = launch.prepare_model(config, folder)
    return config, Policy(config.model_settings(str(made)), made, found, folder)


def _ks(text: str | None, trials: int) -> list[int]:
    from troupe.protocol.errors import ConfigError

    _at_least_one("--trials", trials)
    if text is None:
        return [k for k in (2**i for i in range(31)) if k <= trials]
    try:
        ks = sorted({int(part) for part in text.split(",")})
    except ValueError:
        raise ConfigError(f"--k '{text}': write whole numbers with commas between them, for example --k 1,2,4") from None
    _at_least_one("--k", ks[0])
    if ks[-1] > trials:
        raise ConfigError(f"--k {ks[-1]} needs as many trials of a task, and there are {trials}: raise --trials or lower --k")
    return ks


def _at_least_one(flag: str, value: int) -> int:
    from troupe.protocol.errors import ConfigError

    if value < 1:
        raise ConfigError(f"{flag} is {value}: it must be 1 or more")
    return value


def _check(sampling: Any) -> None:
    from troupe.actors.engines.sampling import check

    check(sampling)


def _folder(run: Path | None, what: str) -> Path:
    """A new place for an evaluation, below the run's `evals/`, or here."""
    home = (run or Path.cwd()) / "evals"
    stem = f"{what}-{time.strftime('%Y%m%d-%H%M%S')}"
    names = (stem if n == 1 else f"{stem}-{n}" for n in range(1, 1000))
    return next(home / name for name in names if not (home / name).exists() and not (home / f"{name}.json").exists())


@contextmanager
def _progress(total: int) -> Iterator[Callable[[int, list[str]], None]]:
    """A bar on a terminal; what happens is told on any, beside the results."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

    console = Console(stderr=True, highlight=False, markup=False, emoji=False)
    columns = (TextColumn("evaluating"), BarColumn(), MofNCompleteColumn(), TextColumn("episodes"), TimeRemainingColumn())
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        task = progress.add_task("", total=total)
        if not console.is_terminal:
            console.print(f"evaluating {total} episodes")

        def show(done: int, said: list[str]) -> None:
            progress.update(task, completed=done)
            for sentence in said:
                console.print(f" · {sentence}", soft_wrap=True)

        yield show
