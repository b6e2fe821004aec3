"""`troupe bench`: how fast is it on this machine?"""

from __future__ import annotations

import json
from typing import Annotated

import typer

app = typer.Typer(no_args_is_help=True, help="Benchmarks on this machine: how fast is a world, how long do its calls take?")


@app.callback()
def bench() -> None:
    """Benchmarks on this machine: how fast is a world, how long do its calls take?"""


@app.command("env")
def env(
    name: Annotated[str, typer.Argument(help="world: a name, module:Class or file.py:Class", show_default=False)],
    actors: Annotated[int, typer.Option(min=1, max=1000, help="environment pools, each a process of its own")] = 2,
    episodes: Annotated[int, typer.Option(min=1, max=10_000_000, help="episodes to play in all")] = 200,
    slots: Annotated[int, typer.Option(min=1, max=100_000, help="environments that one pool holds at a time")] = 32,
    seed: Annotated[int, typer.Option(min=0, help="number of the first task, and of the player's dice")] = 0,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="a key of a recipe: env.options.size=5, rollout.env_step_s=3 (repeatable)")
    ] = None,
    address: Annotated[str | None, typer.Option(help="address of a running Ray cluster; default: one on this machine")] = None,
    json_: Annotated[bool, typer.Option("--json", help="one JSON object instead of the tables")] = False,
) -> None:
    """Plays a world in real environment pools, without a model: steps and episodes a second, latencies of each call.

    Its scripted player acts; a world without one is fed tools and words picked at random, most of them from what it said.
    What breaks is counted and told, and is no error of this command. Choose env.actors and env.slots of a recipe by it:

    troupe bench env shop --actors 2 --slots 32 --episodes 500

    troupe bench env my_world.py:MyWorld --actors 1 --set env.options.size=5 --json
    """
    from troupe.cluster import bench_env

    keys = {"env.actors": actors, "env.slots": slots}
    overrides = [*(set_ or []), *(f"{key}={value}" for key, value in keys.items())]
    plan = bench_env.planned(name, overrides, episodes, seed)
    report = bench_env.measure(plan, address=address, quiet=json_)
    print(json.dumps(bench_env.plain(report)) if json_ else bench_env.rendered(report), end="\n" if json_ else "")
