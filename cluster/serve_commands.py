"""`troupe serve` and `troupe submit`: how others reach a policy, and how a run reaches a cluster."""

from __future__ import annotations

from typing import Annotated

import typer


def register(app: typer.Typer) -> None:
    """Adds the commands to the `troupe` command."""

    @app.command()
    def serve(
        run: Annotated[str, typer.Argument(help="run folder", show_default=False)],
        port: Annotated[int, typer.Option(help="port of the HTTP door")] = 8000,
        host: Annotated[str, typer.Option(help="address it listens on; anyone who reaches it may ask")] = "127.0.0.1",
        replicas: Annotated[int | None, typer.Option(min=1, help="generators (default: as many as the run had)")] = None,
        checkpoint: Annotated[str | None, typer.Option(help="step-N, or a checkpoint folder (default: the newest)")] = None,
    ) -> None:
        """Serves a run's policy over HTTP, as OpenAI does, until Ctrl-C.

        troupe serve runs/frozen_lake-… --port 8000
        """
        from troupe.cluster.serving import serve as start

        start(run, port=port, host=host, replicas=replicas, checkpoint=checkpoint)

    @app.command()
    def submit(
        recipe: Annotated[str, typer.Argument(help="a recipe below this folder", show_default=False)],
        address: Annotated[
            str | None, typer.Option(help="dashboard of the cluster, http://HOST:PORT (default: RAY_API_SERVER_ADDRESS)")
        ] = None,
        set_: Annotated[list[str] | None, typer.Option("--set", help="override a key: section.key=value")] = None,
        steps: Annotated[int | None, typer.Option(help="training steps")] = None,
        seed: Annotated[int | None, typer.Option(help="seed of the run")] = None,
        run_dir: Annotated[
            str | None, typer.Option(help="run folder, on a disk that the cluster's nodes share (default: runs/NAME-TIME)")
        ] = None,
        wait: Annotated[bool, typer.Option(help="follow the log until the run ends")] = True,
    ) -> None:
        """Trains on a running Ray cluster: ships this folder as a job and follows its log.

        troupe submit recipes/frozen_lake.toml --address http://127.0.0.1:8265
        """
        from troupe.cluster.submit import submit as start

        raise typer.Exit(start(recipe, address=address, overrides=set_, steps=steps, seed=seed, run_dir=run_dir, wait=wait))
