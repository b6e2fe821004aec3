"""The `troupe` command. Every command says what it does with `--help`; every error is one line that names the fix."""

from __future__ import annotations

import io
import json
import os
import sys
from typing import Annotated, Any, NoReturn

import typer
from rich.console import Console

from troupe.cluster.paths import from_here
from troupe.protocol.errors import TroupeError

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode="rich",
    help="Train LLM agents with reinforcement learning over whole multi-turn trajectories.",
)

RUN = Annotated[str, typer.Argument(help="run folder, for example runs/frozen_lake-20261129-1804", show_default=False)]
SET = Annotated[list[str] | None, typer.Option("--set", help="override a key: section.key=value (repeatable)")]
ADDRESS = Annotated[str | None, typer.Option(help="address of a running Ray cluster; default: one on this machine")]


@app.command()
def train(
    recipe: Annotated[str | None, typer.Argument(help="a recipe, for example recipes/frozen_lake.toml")] = None,
    resume: Annotated[str | None, typer.Option(help="go on with this run folder from its newest checkpoint")] = None,
    run_dir: Annotated[str | None, typer.Option(help="run folder to make (default: runs/RECIPE-TIME)")] = None,
    seed: Annotated[int | None, typer.Option(help="seed of the run")] = None,
    steps: Annotated[int | None, typer.Option(help="training steps")] = None,
    env: Annotated[str | None, typer.Option(help="world: a name, module:Class or file.py:Class")] = None,
    model: Annotated[str | None, typer.Option(help="model: a folder, or the name of a fetched one")] = None,
    env_actors: Annotated[int | None, typer.Option(help="environment pool actors")] = None,
    generators: Annotated[int | None, typer.Option(help="generator replicas")] = None,
    on_collapse: Annotated[
        list[str] | None,
        typer.Option(help="what the run may do when its health alarms: filter, clip_higher, roll_back, stop, … (repeatable)"),
    ] = None,
    serve: Annotated[bool, typer.Option(help="open the HTTP door while training")] = False,
    port: Annotated[int, typer.Option(help="port of the HTTP door")] = 8000,
    address: ADDRESS = None,
    set_: SET = None,
) -> None:
    """Trains an agent, live on the terminal.

    A new run:      troupe train recipes/frozen_lake.toml --set rollout.group_size=16

    Your own world: troupe train --env guess.py:Guess --model smollm2-135m

    After a stop:   troupe train --resume runs/frozen_lake-…
    """
    from troupe.cluster import config as recipes
    from troupe.cluster import launch
    from troupe.cluster.progress import Progress, closing
    from troupe.learner import composition
    from troupe.protocol.errors import ConfigError

    flags: dict[str, Any] = {"seed": seed, "steps": steps, "env.name": env, "model.path": model}
    flags |= {"env.actors": env_actors, "generator.replicas": generators, "health.on_collapse": on_collapse or None}
    overrides = [*(set_ or []), *(f"{key}={json.dumps(value)}" for key, value in flags.items() if value is not None)]
    if resume:
        if recipe or run_dir:
            raise ConfigError("--resume takes its recipe and folder from the run: leave out RECIPE and --run-dir")
        folder, _ = launch.known_folder(resume)
        config = recipes.read(str(folder / "config.toml"), overrides)
    elif recipe:
        config = recipes.read(recipe, overrides)
    elif env:
        config = recipes.from_flags(env, overrides)
    else:
        raise ConfigError("name a recipe (recipes/frozen_lake.toml), a world (--env), or a run to --resume")
    if resume and launch.is_finished(folder, config):
        raise ConfigError(f"'{resume}' is finished, at step {config.steps}. For more of it: --resume {resume} --steps N")
    if resume and (reached := launch.reached(folder)) > config.steps:
        raise ConfigError(
            f"'{resume}' is at step {reached} already, and {config.steps} is counted from the beginning of the run: give "
            f"--steps {reached} or more"
        )
    launch.check(config)
    for sentence in composition.unused(config.learner):
        print(f"note: {sentence}")
    beside = None
    if serve:
        from troupe.serve.app import door

        beside = door(port)
    if not resume:
        folder = launch.new_folder(config, run_dir)
    shown = from_here(folder)
    where = f"ray {address or os.environ.get('RAY_ADDRESS') or 'local'} · {os.cpu_count()} cores"
    if serve:
        print(f"The newest announced policy answers at http://127.0.0.1:{port}/v1 once training begins.")
    try:
        with Progress(config.name, folder.name, where) as progress:
            launch.train(config, folder, address=address, watch=progress, asked=_asked(config, overrides), beside=beside)
    except KeyboardInterrupt:
        begun = resume or not launch.discard_if_unused(folder)
        print(f"Stopped. Go on with: troupe train --resume {shown}" if begun else "Stopped before anything was done.")
        raise typer.Exit(130) from None
    except TroupeError as error:
        unused = not resume and launch.discard_if_unused(folder)
        if unused or isinstance(error, ConfigError):
            raise
        raise type(error)(f"{error}\nWhat is done so far is safe. Go on with: troupe train --resume {shown}") from error
    print(closing(json.loads((folder / "summary.json").read_text()), shown, config.env.name))


def _asked(config: Any, overrides: list[str]) -> dict[str, int]:
    """Numbers of actors that were given with the command."""
    given = {change.partition("=")[0].strip() for change in overrides}
    numbers = {"env.actors": ("env", config.env.actors), "generator.replicas": ("generator", config.generator.replicas)}
    return dict(number for key, number in numbers.items() if key in given)


@app.command()
def scale(
    run: RUN,
    pools: Annotated[
        int | None, typer.Option("--pools", "--env-actors", min=1, max=1000, help="environment pools, each a process")
    ] = None,
    generators: Annotated[int | None, typer.Option(min=1, max=1000, help="generator replicas")] = None,
    wait: Annotated[
        float, typer.Option(min=1, max=86_400, help="seconds to wait for it; the run goes on with it anyway")
    ] = 120.0,
) -> None:
    """Changes the number of actors of a live run.

    New pools take episodes as soon as they live. A pool that goes takes no new ones, finishes those it has (at most for
    env.drain_s) and is ended; none of them is lost. A run whose recipe has env.min_actors and env.max_actors scales by
    itself between them, and takes a number by hand within them. Generators come and go likewise: a new one takes work when it
    has proved the current weights.

    troupe scale runs/frozen_lake-… --pools 4
    """
    from troupe.cluster.scale import scale as change
    from troupe.protocol.messages import Scale

    print(change(run, Scale(pools, generators), wait))


@app.command()
def query(
    run: RUN,
    sql: Annotated[str, typer.Argument(help="SQL over the tables trajectories, steps and nodes", show_default=False)],
    format: Annotated[str, typer.Option(help="table, json, csv or arrow")] = "table",
    output: Annotated[str | None, typer.Option("--output", "-o", help="file to write (default: the terminal)")] = None,
) -> None:
    """Asks the trajectory store a question in SQL, also while the run is live.

    troupe query RUN "SELECT step, avg(reward), stddev(reward) FROM trajectories GROUP BY step ORDER BY step"
    """
    from troupe.cluster.query import render
    from troupe.cluster.run import Run

    render(Run(run).query(sql), format, output)


@app.command()
def trace(
    run: RUN,
    trajectory: Annotated[str | None, typer.Argument(help="an id, or a unique part of one; none: lists the latest")] = None,
    best: Annotated[bool, typer.Option("--best", help="the one of the highest reward")] = False,
    worst: Annotated[bool, typer.Option("--worst", help="the one of the lowest reward")] = False,
    failed: Annotated[bool, typer.Option("--failed", help="only those that broke")] = False,
    step: Annotated[int | None, typer.Option(help="only those of this training step")] = None,
    branch: Annotated[int | None, typer.Option(help="only this branch (default: all, what they share once)")] = None,
    tokens: Annotated[bool, typer.Option("--tokens/--no-tokens", help="also each token: id, logprob, version")] = False,
    json_: Annotated[bool, typer.Option("--json", help="one JSON object with everything")] = False,
    width: Annotated[int | None, typer.Option(min=40, max=1000, help="columns (default: the terminal's)")] = None,
) -> None:
    """Shows one trajectory: its turns, tool calls and rewards, and which tokens are trained. Also while the run is live.

    troupe trace RUN --best --tokens
    """
    from troupe.cluster.trace import show

    choice: dict[str, Any] = {"best": best, "worst": worst, "failed": failed, "step": step}
    show(run, trajectory, **choice, branch=branch, tokens=tokens, as_json=json_, width=width)


@app.command()
def timeline(run: RUN) -> None:
    """Shows where the time of a run goes, step by step: who was busy, what was waited for. Also while the run is live.

    troupe timeline RUN
    """
    from troupe.cluster.timeline import show

    show(run, Console(highlight=False, width=None if sys.stdout.isatty() else 160))


@app.command()
def config(
    recipe: Annotated[str, typer.Argument(help="a recipe or a run folder's config.toml")],
    set_: SET = None,
) -> None:
    """Prints a recipe as it would run, with what each key means."""
    from troupe.cluster import config as recipes
    from troupe.cluster import launch

    found = recipes.read(recipe, set_)
    launch.check_learner(found)
    print(recipes.explained(found), end="")


def main() -> None:
    """Console entry: errors become one line and an exit code, never a traceback."""
    from troupe.cluster import commands

    commands.register(app)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(line_buffering=True)  # in a pipe or a log too, what is said is there at once
    try:
        code = app(standalone_mode=False)
        sys.exit(code if isinstance(code, int) else 0)
    except TroupeError as error:
        _fail(str(error), error.exit_code)
    except (KeyboardInterrupt, typer.Abort):
        sys.exit(130)
    except BrokenPipeError:
        sys.exit(1)
    except Exception as error:
        # Wrong flags: errors of click, of which newer typers carry a copy of their own under another name.
        if not hasattr(error, "format_message"):
            raise
        if type(error).__name__ == "NoArgsIsHelpError":
            error.show()  # type: ignore[attr-defined]
            sys.exit(2)
        context = getattr(error, "ctx", None)
        said = error.format_message()
        _fail(f"{said.rstrip('.')}. See: {context.command_path} --help" if context else said, 2)


def _fail(message: str, code: int) -> NoReturn:
    Console(stderr=True, highlight=False, soft_wrap=True, emoji=False).print(f"[red]troupe:[/red] {_escaped(message)}")
    sys.exit(code)


def _escaped(text: str) -> str:
    from rich.markup import escape

    return escape(text)
