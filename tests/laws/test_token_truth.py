"""Law 1, token truth: what is recorded is exactly what the engine was fed and what it sampled."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from troupe.actors.recorder import Recorder
from troupe.actors.rendering import ChatML
from troupe.learner.tiny import make_tiny
from troupe.protocol.messages import Generate, Generated, Limits, RunEpisode, Sampling
from troupe.protocol.trajectory import ENVIRONMENT, POLICY, Task, Trajectory

Turns = list[tuple[str, list[int], bool]]
ANY_TEXT = st.one_of(st.text(max_size=20), st.sampled_from(["", "<|im_end|>", "<|im_start|>assistant\n", "<think>x</think>"]))
TURNS = st.lists(st.tuples(ANY_TEXT, st.lists(st.integers(0, 259), max_size=6), st.booleans()), min_size=1, max_size=5)


@pytest.fixture(scope="module")
def renderer(tmp_path_factory: pytest.TempPathFactory) -> ChatML:
    return ChatML(str(make_tiny(tmp_path_factory.mktemp("tiny"), ["some words"], hidden=16, layers=1, heads=2)))


class Scripted:
    """Says what it is told to say, and remembers what it was fed."""

    def __init__(self, turns: list[list[int]]) -> None:
        self.turns, self.fed = turns, list[list[int]]()

    async def generate(self, request: Generate) -> Generated:
        self.fed.append(request.prompt.tolist())
        said = self.turns[len(self.fed) - 1]
        finish = "stop" if said and said[-1] in request.sampling.stop_ids else "length"
        logprobs = np.linspace(-2, -1, len(said), dtype=np.float32)
        return Generated(np.asarray(said, np.int32), logprobs, np.full(len(said), len(self.fed), np.int32), finish)


def record(renderer: ChatML, turns: Turns) -> tuple[Recorder, Scripted, list[list[int]]]:
    end = renderer.stop_ids[0]
    said = [ids + [end] * stops for _, ids, stops in turns]
    engine = Scripted(said)
    task = Task("t", "echo", "train", 0)
    episode = RunEpisode("e", 0, 0, 0, "train", 1, task, Sampling(max_tokens=8), Limits(), seed=7)
    recorder = Recorder(episode, renderer, engine)

    async def play() -> None:
        recorder.observe("system", "rules")
        for index, (text, _, _) in enumerate(turns):
            recorder.observe("user", text, step=index)
            await recorder.act(index)

    asyncio.run(play())
    return recorder, engine, said


@given(turns=TURNS)
def test_each_prompt_extends_what_was_fed_and_sampled_before(
    renderer: ChatML, turns: list[tuple[str, list[int], bool]]
) -> None:
    recorder, engine, said = record(renderer, turns)
    for index in range(1, len(said)):
        before = engine.fed[index - 1] + said[index - 1]
        assert engine.fed[index][: len(before)] == before
    trajectory = Trajectory("e", 0, 0, 0, "train", 1, Task("t", "echo", "train", 0), "completed", "terminated", recorder.nodes)
    (sample,) = trajectory.samples()
    assert sample.tokens.tolist() == engine.fed[-1] + said[-1]


@given(turns=TURNS)
def test_exactly_the_sampled_tokens_are_policy_tokens(renderer: ChatML, turns: Turns) -> None:
    recorder, engine, said = record(renderer, turns)
    ids = np.concatenate([node.tokens for node in recorder.nodes])
    policy = np.concatenate([node.provenance for node in recorder.nodes]) == POLICY
    assert ids[policy].tolist() == [token for turn in said for token in turn]
    starts = [len(fed) for fed in engine.fed]
    assert np.flatnonzero(policy).tolist() == [s + i for s, turn in zip(starts, said, strict=True) for i in range(len(turn))]
    versions = np.concatenate([node.versions for node in recorder.nodes])
    assert versions.tolist() == [index + 1 for index, turn in enumerate(said) for _ in turn]


@given(text=ANY_TEXT)
def test_special_tokens_in_an_observation_are_plain_text(renderer: ChatML, text: str) -> None:
    ids, provenance = renderer.message("user", text)
    body = [i for i, p in zip(ids, provenance, strict=True) if p == ENVIRONMENT]
    assert not set(body) & {0, 1, 2}
    assert renderer.decode(body) == text


def test_a_turn_cut_by_max_tokens_is_closed_by_scaffold_that_is_not_trained(renderer: ChatML) -> None:
    recorder, _, _ = record(renderer, [("hi", [40, 41], False), ("again", [42], True)])
    cut, after = recorder.nodes[2], recorder.nodes[3]
    assert (cut.provenance == POLICY).sum() == 2
    assert after.tokens[0] == renderer.stop_ids[0] and after.provenance[0] != POLICY
