"""`troupe baseline`: a table that says what a score in a world is worth."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Annotated, Any

import typer


def register(app: typer.Typer) -> None:
    """Adds the command to the `troupe` command."""

    @app.command()
    def baseline(
        name: Annotated[str, typer.Argument(help="world with a tensor form, for example frozen_lake", show_default=False)],
        option: Annotated[list[str] | None, typer.Option("--option", help="option of the world: key=value")] = None,
        seconds: Annotated[
            float | None, typer.Option(min=1, help="of PPO's training (default: 60, or as many as --iterations take)")
        ] = None,
        iterations: Annotated[int | None, typer.Option(min=1, help="of PPO's training, each of 1,024 steps")] = None,
        tasks: Annotated[int, typer.Option(min=1, help="held-out tasks that each player plays once")] = 100,
        policy: Annotated[str | None, typer.Option(help="run folder: its newest evaluation is one row")] = None,
        seed: Annotated[int, typer.Option(min=0, help="of the random player, of PPO and of the intervals")] = 0,
        json_: Annotated[bool, typer.Option("--json", help="everything, as one JSON object")] = False,
    ) -> None:
        """Trains RLlib's PPO in a world and compares: random, PPO, the scripted player, and the LLM policy of a run.

        troupe baseline frozen_lake --seconds 120

        troupe baseline frozen_lake --policy runs/frozen_lake-…
        """
        import sys

        _gymnasium()
        from troupe.cluster import baseline as players
        from troupe.cluster.env_commands import options_of
        from troupe.envs import registry, tensors

        world = tensors.find(name)
        options = options_of(option)
        row = None
        if policy is not None:
            options, row = _policy(policy, name, options, given=option is not None)
        registry.make(world, options)
        forever = 1e9
        budget = players.Budget(seconds or (forever if iterations else 60.0), iterations)
        try:
            with _progress(name) as show:
                show(0.0, "the random and the scripted player")
                rows = [players.random_player(name, options, tasks, seed)]
                scripted = players.scripted_player(name, options, tasks, seed)
                show(0.0, "Ray starts")
                ppo, used = players.ppo_player(name, options, tasks, seed, budget, show)
        except KeyboardInterrupt:
            print("Stopped; nothing is kept.", file=sys.stderr)
            raise typer.Exit(130) from None
        rows += [found for found in (ppo, scripted, row) if found is not None]
        if json_:
            print(json.dumps(document(name, options, rows, used, seed), indent=1, ensure_ascii=False, allow_nan=False))
        else:
            _print(name, rows, seed)


def document(name: str, options: dict[str, Any], rows: Sequence[Any], used: dict[str, Any], seed: int) -> dict[str, Any]:
    """Everything of a comparison, as JSON has it."""
    from dataclasses import asdict

    return {
        "world": {"name": name, "options": options},
        "split": "heldout",
        "seed": seed,
        "ppo": used,
        "rows": [asdict(row) for row in rows],
    }


def _gymnasium() -> None:
    from troupe.protocol.errors import ConfigError

    try:
        import gymnasium  # noqa: F401
    except ImportError as error:
        raise ConfigError(f"gymnasium cannot be imported ({error}): pip install 'troupe-rl[baseline]'") from error


def _policy(run: str, name: str, options: dict[str, Any], given: bool) -> tuple[dict[str, Any], Any]:
    """The options that are played with, and the policy's row. Raises ConfigError if the run is of another world."""
    from troupe.cluster import launch
    from troupe.cluster.baseline import policy_row
    from troupe.protocol.errors import ConfigError

    folder, config = launch.known_folder(run)
    if config.env.name != name:
        raise ConfigError(f"'{run}' is a run in '{config.env.name}', not in '{name}'")
    if given and options != config.env.options:
        raise ConfigError(f"'{run}' plays with the options {config.env.options}: leave out --option, they are taken from it")
    return dict(config.env.options), policy_row(folder, name, config.env.options)


@contextmanager
def _progress(name: str) -> Iterator[Callable[[float, str], None]]:
    """A bar on a terminal, on standard error: the table is what can be piped."""
    from rich.console import Console
    from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn

    console = Console(stderr=True, highlight=False, emoji=False)
    columns = (TextColumn(name, markup=False), BarColumn(), TimeElapsedColumn(), TextColumn("{task.description}", markup=False))
    with Progress(*columns, console=console, transient=True, disable=not console.is_terminal) as progress:
        bar, told = progress.add_task("", total=1.0), -1

        def show(share: float, said: str) -> None:
            nonlocal told
            progress.update(bar, completed=share, description=said)
            if not console.is_terminal and int(10 * share) > told:  # a line each tenth
                told = int(10 * share)
                console.print(f"{name} {share:.0%}: {said}", markup=False, soft_wrap=True)

        yield show


def _print(name: str, rows: Sequence[Any], seed: int) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("world", "player", "success", "reward", "n", ""):
        table.add_column(column, justify="right" if column == "n" else "left")
    for row in rows:
        table.add_row(name, row.player, _interval(row.success), _interval(row.reward), str(row.episodes), row.what)
    console = Console(highlight=False, markup=False, emoji=False)
    console.print(table)
    console.print(
        f"\nHeld-out tasks, each played once but by the LLM policy; 95 % intervals over tasks; seed {seed}.", soft_wrap=True
    )


def _interval(estimate: Any) -> str:
    if estimate.value is None:
        return "–"
    value = f"{estimate.value:.3f}"
    return value if estimate.low is None else f"{value} [{estimate.low:.3f}, {estimate.high:.3f}]"
