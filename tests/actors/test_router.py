"""Which replica samples a turn, and what happens to the turn when that replica does not."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from troupe.actors.router import Router
from troupe.actors.simulated import Simulation
from troupe.protocol.errors import ActorLost, NotReady, Overloaded, TimedOut
from troupe.protocol.messages import Abort, Generate, Generated, Routes, Sampling


class Replica:
    """Answers, refuses or dawdles as `how` says, and writes down what it was asked."""

    def __init__(self, context: Any, how: str, log: list[tuple[str, str]]) -> None:
        self.name, self.how, self.log = context.name, how, log

    async def generate(self, message: Generate) -> Generated:
        self.log.append((self.name, message.request))
        if self.how == "refuses":
            raise NotReady("unproved")
        if self.how == "is full":
            raise Overloaded("full")
        if self.how == "dies after long":
            await asyncio.sleep(150.0)
            raise ActorLost("it died")
        await asyncio.sleep({"dawdles": 1000.0, "cuts short after long": 150.0}.get(self.how, 1.0))
        finish: Any = "abort" if "cuts short" in self.how else "stop"
        said = message.prompt[-1:] + 1 if self.how in ("cuts short", "fine") else message.prompt[:0]
        version = int(self.name[-1:])
        return Generated(said, -said.astype(np.float32), np.full(len(said), version, np.int32), finish, self.name)

    async def abort(self, message: Abort) -> None:
        self.log.append((self.name, f"abort {message.request}"))


def play(how: dict[str, str], work: Any, **settings: float) -> tuple[Any, list[tuple[str, str]]]:
    """Lets `work(router)` play with replicas; returns its result and what the replicas were asked."""
    log: list[tuple[str, str]] = []
    with Simulation(3) as simulation:

        async def main(context: Any) -> Any:
            for name, kind in how.items():
                await context.spawn(name, Replica, how=kind, log=log)
            router = Router(context, **settings)
            router.set_routes(Routes(list(how)))
            try:
                return await work(router)
            finally:
                await asyncio.sleep(20.0)

        return simulation.run(main), log


def ask(request: str = "r", session: str = "s", group: int | None = None, **sampling: Any) -> Generate:
    return Generate(request, session, np.zeros(3, np.int32), Sampling(**sampling), group=group)


def test_a_session_stays_where_its_cache_is_and_new_ones_go_to_the_least_loaded():
    async def work(router: Router) -> list[str]:
        made = await asyncio.gather(*(router.generate(ask(f"r{n}", f"s{n}")) for n in range(4)))
        again = await asyncio.gather(*(router.generate(ask(f"q{n}", f"s{n}")) for n in range(4)))
        assert [m.generator for m in made] == [m.generator for m in again]
        return [m.generator for m in made]

    names, _ = play({"generator-0": "fine", "generator-1": "fine"}, work)
    assert sorted(names) == ["generator-0"] * 2 + ["generator-1"] * 2


def test_a_group_begins_on_one_replica_whichever_process_asks_and_groups_are_spread():
    fine = dict.fromkeys(["generator-0", "generator-1", "generator-2"], "fine")

    async def work(router: Router) -> dict[int, set[str]]:
        other = Router(router._context)
        other.set_routes(Routes(list(reversed(fine))))
        asked = [(g, n) for n in range(4) for g in (70_000, 70_001, 70_002)]
        made = await asyncio.gather(*((router, other)[n % 2].generate(ask(f"{g}/{n}", f"{g}/{n}", g)) for g, n in asked))
        return {g: {m.generator for m, (of, _) in zip(made, asked, strict=True) if of == g} for g, _ in asked}

    homes, _ = play(fine, work)
    assert all(len(names) == 1 for names in homes.values()) and len(set.union(*homes.values())) == 3


def test_a_group_leaves_a_replica_that_has_clearly_more_to_do():
    async def work(router: Router) -> list[str]:
        made = await asyncio.gather(*(router.generate(ask(f"r{n}", f"s{n}", 4)) for n in range(40)))
        return [m.generator for m in made]

    names, _ = play({"generator-0": "fine", "generator-1": "fine"}, work)
    theirs, least = names.count("generator-0"), names.count("generator-1")
    assert names[:3] == ["generator-0"] * 3 and least < theirs <= 1.25 * least + 3


def test_a_session_leaves_a_replica_that_is_full():
    async def work(router: Router) -> list[str]:
        router._home["s"] = "generator-0"
        return [(await router.generate(ask("r", "s"))).generator, (await router.generate(ask("q", "s"))).generator]

    names, log = play({"generator-0": "is full", "generator-1": "fine"}, work)
    assert names == ["generator-1"] * 2
    assert log == [("generator-0", "r"), ("generator-1", "r"), ("generator-1", "q")]


@pytest.mark.parametrize("how", ["refuses", "cuts short at once"])
def test_a_turn_that_one_replica_does_not_finish_is_sampled_whole_by_another(how):
    made, log = play({"generator-0": how, "generator-1": "fine"}, lambda router: router.generate(ask()))
    assert (made.finish, made.generator, made.tokens.tolist()) == ("stop", "generator-1", [1])
    assert log == [("generator-0", "r")] * (1 if how == "refuses" else 2) + [("generator-1", "r")]


@pytest.mark.parametrize("how", ["dies after long", "cuts short after long"])
def test_time_in_which_a_turn_was_sampled_in_vain_is_not_time_in_which_nobody_took_it(how):
    made, _ = play({"generator-0": how, "generator-1": "fine"}, lambda router: router.generate(ask()), generate_s=600.0)
    assert (made.finish, made.generator) == ("stop", "generator-1")


def test_a_turn_that_is_cut_short_goes_on_from_there_and_its_tokens_keep_their_versions():
    how = {"generator-0": "cuts short", "generator-1": "cuts short", "generator-2": "fine"}
    made, _ = play(how, lambda router: router.generate(ask(max_tokens=9)))
    assert (made.tokens.tolist(), made.logprobs.tolist()) == ([1, 2, 3], [-1.0, -2.0, -3.0])
    assert (made.versions.tolist(), made.finish, made.generator) == ([0, 1, 2], "stop", "generator-2")


def test_a_turn_that_is_cut_when_it_is_full_has_ended_by_its_length():
    how = {"generator-0": "cuts short", "generator-1": "cuts short", "generator-2": "fine"}
    made, log = play(how, lambda router: router.generate(ask(max_tokens=2)))
    assert (made.finish, made.tokens.tolist(), len(log)) == ("length", [1, 2], 2)


def test_with_stop_strings_a_turn_that_is_cut_short_is_sampled_anew():
    made, _ = play(
        {"generator-0": "cuts short", "generator-1": "fine"}, lambda router: router.generate(ask(stop=["end"], max_tokens=9))
    )
    assert (made.tokens.tolist(), made.versions.tolist()) == ([1], [1])


def test_a_turn_that_takes_too_long_names_the_replica_and_is_aborted_there():
    async def work(router: Router) -> None:
        with pytest.raises(TimedOut, match=r"generator-0\.generate has not answered for 5 s"):
            await router.generate(ask())

    assert play({"generator-0": "dawdles"}, work, generate_s=5.0)[1] == [("generator-0", "r"), ("generator-0", "abort r")]


def test_a_turn_that_nobody_waits_for_any_more_is_aborted():
    async def work(router: Router) -> None:
        waiting = asyncio.ensure_future(router.generate(ask()))
        await asyncio.sleep(5.0)
        waiting.cancel()
        with pytest.raises(asyncio.CancelledError):
            await waiting

    assert play({"generator-0": "dawdles"}, work)[1][-1] == ("generator-0", "abort r")


@pytest.mark.parametrize(
    ("how", "why"), [("refuses", "unproved"), ("is full", "full"), ("cuts short at once", "cut 'r' short")]
)
def test_patience_ends_even_if_the_replica_is_announced_again_and_again(how, why):
    async def work(router: Router) -> None:
        async def announce() -> None:
            while True:
                router.set_routes(Routes(["generator-0"]))
                await asyncio.sleep(0.5)

        announcing = asyncio.ensure_future(announce())
        with pytest.raises(TimedOut, match=f"no generator took 'r' for 60 s: .*{why}"):
            await router.generate(ask())
        announcing.cancel()

    assert len(play({"generator-0": how}, work, patience_s=60.0)[1]) > 3
