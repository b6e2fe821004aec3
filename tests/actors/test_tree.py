"""Sampling as a tree: who forks from whom and where, and that what is shared is played again and not sampled again."""

from __future__ import annotations

import os
import random
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from tests.actors.dispatching import Act, Company, Plan
from tests.actors.test_env_pool import Here
from troupe.actors import tree
from troupe.actors.env_pool import EnvPool
from troupe.actors.settings import AgentSettings, RolloutSettings
from troupe.envs.base import Task, TextWorld, Turn
from troupe.learner.tiny import make_tiny
from troupe.protocol.messages import Deposited, Generate, Generated, GetDeposit, Limits, Routes, RunEpisode, Sampling, Sibling
from troupe.protocol.trajectory import POLICY, Trajectory

SAID = 6
"""Tokens of each turn."""


class Counting(TextWorld):
    """Three turns; it tells what it was told. `restless`: what of it is another each time that it runs."""

    def __init__(self, restless: str = "") -> None:
        self.restless = restless

    def reset(self, task: Task) -> str:
        self.turn, self.chance = 0, random.SystemRandom().randrange(10**6)
        return f"go {self.chance if self.restless == 'opening' else ''}"

    def step(self, text: str) -> Turn:
        self.turn += 1
        told = f"{len(text)} {self.chance if self.restless == 'observation' else ''}"
        return Turn(told, reward=0.25 + self.chance * (self.restless == "reward"), done=self.turn == 3)

    def state_key(self) -> str:
        return f"{self.turn} {self.chance if self.restless == 'state' else ''}"


class Family(Here):
    """A pool's surroundings: what was deposited can be had again, and the policy's tokens follow from the request's seed."""

    def __init__(self) -> None:
        super().__init__()
        self.asked: list[Generate] = []

    async def deposited(self, message: GetDeposit) -> Deposited:
        found = [t for t in self.deposits if (t.id, t.attempt) == (message.episode, message.attempt)]
        return Deposited(found[0] if found else None)

    async def generate(self, message: Generate) -> Generated:
        self.asked.append(message)
        dice = random.Random(f"{message.seed}/{len(message.prompt)}")
        n = min(message.sampling.max_tokens, SAID) - 1
        ids = [*(dice.randrange(40, 200) for _ in range(n)), message.sampling.stop_ids[0]]
        logprobs = np.asarray([-dice.random() for _ in ids], np.float32)
        return Generated(
            np.asarray(ids, np.int32), logprobs, np.full(len(ids), len(self.asked), np.int32), "stop", "generator-0"
        )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(make_tiny(tmp_path_factory.mktemp("tiny"), ["go 0 1 2"], hidden=16, layers=1, heads=2))


def pool_in(family: Family, folder: str, program: str = "", **options: Any) -> EnvPool:
    world = f"{__name__}:{Counting.__name__}"
    return EnvPool(family, world, options, folder, 8, agent=AgentSettings(program=program))  # type: ignore[arg-type]


async def grown(pool: EnvPool, family: Family, seed: int, segment: int = 0) -> tuple[Trajectory, Trajectory]:
    """A member that begins at the start, and one of `seed` that forks from it."""
    await pool.routes(Routes(["generator-0"]))
    task, sampling, limits = Task("train/0", "counting", "train", 0), Sampling(max_tokens=SAID + 2), Limits(max_turns=5)
    root = RunEpisode("root", 3, 0, 0, "train", 1, task, sampling, limits, seed=10**6)
    assert (await pool.run_episode(root)).status == "completed"
    child = RunEpisode("child", 0, 0, 1, "train", 1, task, sampling, limits, seed, Sibling("root", 3, segment))
    done = await pool.run_episode(child)
    first, second = family.deposits
    assert done.tokens == second.sampled_tokens
    return first, second


def said(t: Trajectory) -> list[tuple[int, float, int]]:
    """Each token of the policy, with its logprob and version."""
    columns = [
        np.concatenate([array(node) for node in t.nodes if len(node.logprobs)]).tolist()
        for array in (lambda n: n.tokens[n.provenance == POLICY], lambda n: n.logprobs, lambda n: n.versions)
    ]
    return list(zip(*columns, strict=True))


def prompts(t: Trajectory) -> list[list[int]]:
    return [turn.prompt.tolist() for turn in tree.turns_of(t)]


# -- who and where ---------------------------------------------------------------------------------------------------


def test_the_tree_doubles_from_its_roots() -> None:
    assert [tree.sibling_of(member, 2) for member in range(9)] == [None, None, 0, 1, 0, 1, 2, 3, 0]
    assert [tree.sibling_of(member, 3) for member in range(8)] == [None, None, None, 0, 1, 2, 0, 1]
    assert [tree.sibling_of(member, 0) for member in range(3)] == [None] * 3
    for roots in range(1, 6):
        for member in range(200):
            depth, at = 0, tree.sibling_of(member, roots)
            while at is not None:
                depth, at = depth + 1, tree.sibling_of(at, roots)
            assert 2**depth * roots < 2 * max(member, roots) + 1, "siblings wait for each other longer than they need"


async def test_every_place_but_the_start_is_forked_at_equally_often(folder: str) -> None:
    root, _ = await grown(pool_in(family := Family(), folder), family, seed=1)
    turns = tree.turns_of(root)
    assert [len(turn.answer.tokens) for turn in turns] == [SAID] * 3
    for segment, places in (
        (0, {(1, 0), (2, 0)}),
        (4, {(0, 4), (1, 0), (1, 4), (2, 0), (2, 4)}),
        (3, {(0, 3), (1, 0), (1, 3), (2, 0), (2, 3)}),
    ):
        found = Counter(tree.drawn(turns, segment, seed) for seed in range(500))
        assert set(found) == places and min(found.values()) > 300 / len(places)
    assert tree.drawn(turns[:1], 0, 1) is None and tree.drawn(turns[:1], SAID, 1) is None and tree.drawn([], 2, 1) is None


# -- what is shared --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("segment", [0, 4, 1])
@pytest.mark.parametrize("seed", range(6))
async def test_what_is_shared_is_the_sibling_s_own_and_only_the_rest_is_sampled(folder: str, segment: int, seed: int) -> None:
    root, child = await grown(pool_in(family := Family(), folder), family, seed, segment)
    whole, kept = tree.drawn(tree.turns_of(root), segment, seed) or (0, 0)
    taken = whole * SAID + kept
    assert child.fork is not None and (child.fork.episode, child.fork.attempt, child.fork.tokens) == ("root", 3, taken)
    assert said(child)[:taken] == said(root)[:taken] and said(child)[taken] != said(root)[taken]
    assert prompts(child)[: whole + 1] == prompts(root)[: whole + 1]
    assert [step.reward for step in child.steps] == [0.25] * 3 and child.status == "completed"
    new = family.asked[3:]
    assert len(new) == 3 - whole, "what is known already was sampled again"
    fed = np.concatenate([prompts(root)[whole], tree.turns_of(root)[whole].answer.tokens[:kept]])
    assert np.array_equal(new[0].prompt, fed) and new[0].sampling.max_tokens == SAID + 2 - kept
    assert [request.sampling.max_tokens for request in new[1:]] == [SAID + 2] * (2 - whole)


async def test_a_fork_of_a_fork_shares_with_both(folder: str) -> None:
    root, child = await grown(pool := pool_in(family := Family(), folder), family, seed=4, segment=1)
    task, sampling = root.task, Sampling(max_tokens=SAID + 2)
    message = RunEpisode("grandchild", 0, 0, 2, "train", 1, task, sampling, Limits(), 7, Sibling("child", 0, 1))
    await pool.run_episode(message)
    grandchild = family.deposits[2]
    assert grandchild.fork is not None and child.fork is not None and grandchild.fork.episode == "child"
    assert said(grandchild)[: grandchild.fork.tokens] == said(child)[: grandchild.fork.tokens]
    both = min(grandchild.fork.tokens, child.fork.tokens)
    assert both and said(grandchild)[:both] == said(root)[:both]


async def rewriting(client: Any, episode: Any) -> str | None:
    """A harness that forgets what was said: each turn is a branch of its own."""
    told, over = episode.observation, False
    while not over:
        reply = await client.complete([{"role": "user", "content": f"so far: {told}"}])
        turn = await episode.step(reply.text)
        told, over = turn.text, turn.done
    return None


async def test_a_harness_that_rewrites_its_history_forks_too(folder: str) -> None:
    root, child = await grown(pool_in(family := Family(), folder, f"{__name__}:rewriting"), family, seed=1)
    assert child.status == "completed" and child.fork is not None and child.fork.tokens in (SAID, 2 * SAID)
    assert said(child)[: child.fork.tokens] == said(root)[: child.fork.tokens] and len(list(child.branches())) == 3


# -- the dispatcher --------------------------------------------------------------------------------------------------


@pytest.fixture
def company(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Company]:
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)  # the machine does not crash here

    def make(plan: Plan, **settings: Any) -> Company:
        one_group = {"groups_per_step": 1, "group_size": 6, "tree": 2, "tree_segment": 3, **settings}
        return Company(tmp_path / "store", plan, one_group, steps=1)

    return make


def test_a_member_begins_when_its_sibling_has_ended_and_forks_from_the_attempt_that_is_stored(company: Any) -> None:
    """Member 0 breaks once; members 2 and 4 wait for its second attempt, and 1, 3 and 5 do not."""

    def plan(message: RunEpisode, pool: str) -> Act:
        return Act("fail" if (message.member, message.attempt) == (0, 0) else "complete", seconds=2.0)

    made = company(plan)
    made.play()
    started = [message for _, message in made.started]
    assert {m.member: m.sibling for m in started} == {
        0: None,
        1: None,
        2: Sibling("t000010000-00", 1, 3),
        3: Sibling("t000010000-01", 0, 3),
        4: Sibling("t000010000-00", 1, 3),
        5: Sibling("t000010000-01", 0, 3),
    }
    order = [(m.member, m.attempt) for m in started]
    assert sorted(order[:2]) == [(0, 0), (1, 0)] and set(order[2:5]) == {(0, 1), (3, 0), (5, 0)}
    assert set(order[5:]) == {(2, 0), (4, 0)}, "the others did not wait for the sibling, or waited for more"


def test_a_member_whose_sibling_broke_begins_at_the_start(company: Any) -> None:
    made = company(lambda message, pool: Act("fail" if message.member == 1 else "complete"), on_failure="drop-episode")
    made.play()
    siblings = {message.member: message.sibling for _, message in made.started}
    assert sorted(member for member, sibling in siblings.items() if sibling is None) == [0, 1, 3, 5]
    assert len(made.batches[1]) == 5


def test_members_of_a_group_that_cannot_train_any_more_do_not_begin(company: Any) -> None:
    def plan(message: RunEpisode, pool: str) -> Act:
        return Act("fail") if (message.group, message.member) == (10_000, 0) else Act(seconds=5.0)

    made = company(plan, on_failure="drop-group")
    made.play()
    assert {m.member for _, m in made.started if m.group == 10_000} == {0, 1}
    assert Counter(row["status"] for row in made.rows() if row["group"] == 10_000) == {"failed": 1, "cancelled": 5}


def test_an_evaluation_is_no_tree(company: Any) -> None:
    made = company(lambda message, pool: Act())

    async def work(made: Company, context: Any) -> None:
        await made.evaluate([Task("heldout/0", "echo", "heldout", 0)], trials=6)

    made.play(work)
    trials = [message for _, message in made.started if message.kind == "eval"]
    assert len(trials) == 6 and all(message.sibling is None for message in trials)


# -- when it cannot be -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("restless", "words"),
    [
        ("opening", "turn 1 is told something else"),
        ("observation", "turn 2 is told something else"),
        ("reward", "'reward' of turn 1 is"),
        ("state", "'state_key' of turn 1 is"),
    ],
)
async def test_a_world_that_does_not_repeat_itself_breaks_the_episode_and_says_so(
    folder: str, restless: str, words: str
) -> None:
    _, child = await grown(pool_in(family := Family(), folder, restless=restless), family, seed=1)
    assert child.status == "failed" and child.failure is not None and child.reward == 0.0
    assert (child.failure.type, child.failure.kind) == ("NotReplayed", "infrastructure")
    assert words in child.failure.message and "set rollout.tree = 0" in child.failure.message
    assert "root" in child.failure.message and len(family.asked) == 3, "it was sampled all the same"


async def test_a_member_whose_sibling_the_store_has_lost_begins_at_the_start(folder: str) -> None:
    pool = pool_in(family := Family(), folder)
    await pool.routes(Routes(["generator-0"]))
    task = Task("train/0", "counting", "train", 0)
    message = RunEpisode("child", 0, 0, 1, "train", 1, task, Sampling(max_tokens=8), Limits(), 5, Sibling("root", 3))
    assert (await pool.run_episode(message)).status == "completed"
    assert family.deposits[0].fork is None and len(family.asked) == 3


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"tree": 8, "group_size": 8}, "tree = 8 leaves none of 8 episodes to fork"),
        ({"tree_segment": 4}, "tree_segment has no effect without tree"),
        ({"tree": 2, "tree_segment": 4, "stop": ["</x>"]}, "a stop string could begin before a fork"),
    ],
)
def test_settings_that_mean_nothing_are_refused(settings: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError, match=words):
        RolloutSettings.model_validate(settings)
