"""What is asked of a run of the rollout, and what goes wrong in it: a `Plot`, which a seed draws."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from typing import Literal

from troupe.actors.settings import RolloutSettings
from troupe.actors.simulated import Chaos

SEED = 1
"""Of the runs, which are all the same but for what goes wrong in them."""
A_TURN = 0.25
"""What each turn but the last gives."""
Trouble = Literal["", "reset", "step", "hang", "stuck", "nan", "data"]


@dataclass
class Plot:
    """What is asked for, and what goes wrong. Without arguments: nothing.

    think: seconds that a turn takes beside its tokens. troubles: chance of each trouble, for an attempt (for "data": for a
    task). script: trouble and its turn for the n-th world that is reset, from 1. crashes: (word, n, who): right after the
    n-th event with that word "it" (who saw the event) or the actor of that name dies. room: episodes that the dispatcher
    may have open at a time. drains: (after seconds, pool, limit): the pool is drained, and another takes its place.
    retired: (after seconds, generator): it drains and hands its turns over, and another takes its place. token_s: seconds that
    a token takes at most.
    """

    seed: int = 0
    settings: RolloutSettings = field(default_factory=lambda: RolloutSettings(groups_per_step=2, group_size=3, max_tokens=4))
    steps: int = 2
    slots: int = 3
    turns: int = 2
    think: float = 0.0
    troubles: dict[Trouble, float] = field(default_factory=dict)
    script: dict[int, tuple[Trouble, int]] = field(default_factory=dict)
    chaos: Chaos = field(default_factory=Chaos)
    crashes: list[tuple[str, int, str]] = field(default_factory=list)
    evaluations: list[tuple[float, int, int]] = field(default_factory=list)
    room: int = 1_000
    drains: list[tuple[float, str, float]] = field(default_factory=list)
    retired: list[tuple[float, str]] = field(default_factory=list)
    token_s: float = 0.001
    names: tuple[str, ...] = ("store", "dispatcher", "env-0", "env-1", "generator-0", "generator-1")


def drawn(seed: int) -> Plot:
    """The plot of `seed`."""
    dice = random.Random(f"plot/{seed}")
    lost = dice.choice([0.0, 0.0, 0.01, 0.03])
    harm = dice.choice([0.0, 0.5, 1.0])
    steps, size = dice.choice([(1, 2), (1, 3), (2, 2)])
    plot = Plot(
        seed,
        RolloutSettings(
            groups_per_step=2,
            group_size=size,
            max_staleness=dice.choice([0, 1, 2]),
            max_tokens=4,
            on_failure=dice.choice(["retry", "retry", "drop-episode", "drop-group"]),
            oversample=dice.choice([0.0, 0.0, 0.5, 1.0]),
            filter=dice.choice(["none", "none", "informative"]),
            attempts=dice.choice([2, 3, 4]),
            quarantine_after=dice.choice([1, 2, 3]),
        ),
        steps=steps,
        slots=dice.choice([2, 3, 6]),
        turns=dice.choice([1, 1, 2, 3]),
        troubles={"reset": 0.08 * harm, "step": 0.08 * harm, "hang": 0.04 * harm, "stuck": 0.01 * harm}
        | {"nan": 0.02 * harm, "data": 0.06 * harm},
        chaos=Chaos((0.0005, dice.choice([0.005, 0.05, 0.2])), dice.choice([0.0, 0.02, 0.05]), lost, lost),
        room=dice.choice([6, 1_000]),
    )
    grown = random.Random(f"tree/{seed}")  # dice of their own: the rest of a seed's plot is as it would be without
    if grown.random() < 0.4:
        settings = plot.settings
        plot.settings = settings.model_copy(
            update={
                "group_size": settings.group_size + grown.choice([0, 1, 2]),
                "tree": 1 if settings.group_size == 2 else grown.choice([1, 2]),
                "tree_segment": grown.choice([0, 0, 1, 2]),
            }
        )
    for _ in range(dice.choice([0, 1, 1, 2, 3])):
        kind = dice.choice(["", "", "begins", "ends", "accepted", "commit of", "fences", "lives", "announces", "dies"])
        number = dice.randrange(1, {"": 120, "announces": 3, "dies": 3, "fences": 5, "commit of": 6}.get(kind, 12))
        plot.crashes.append((kind, number, dice.choice(["it", *plot.names])))
    if dice.random() < 0.4:
        plot.evaluations.append((dice.uniform(0.0, 5.0), dice.choice([1, 2]), dice.choice([1, 2])))
    if dice.random() < 0.4:
        plot.drains.append((dice.uniform(0.0, 4.0), dice.choice(["env-0", "env-1"]), dice.choice([0.0, 0.5, 30.0])))
    return plot
