"""Groups of commands that live beside what they command; each is imported only when it is used."""

from __future__ import annotations

import typer


def register(app: typer.Typer) -> None:
    """Adds the command groups to the `troupe` command."""
    from troupe.cluster import (
        baseline_commands,
        bench_commands,
        env_commands,
        eval_commands,
        model_commands,
        serve_commands,
    )

    app.add_typer(env_commands.app, name="env")
    app.add_typer(bench_commands.app, name="bench")
    app.add_typer(model_commands.app, name="models")
    baseline_commands.register(app)
    eval_commands.register(app)
    serve_commands.register(app)
