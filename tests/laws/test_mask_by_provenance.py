"""Law 2: only policy tokens are trained. Scaffold, inserted terminators and observations never."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.laws.rollouts import Run, every_seed
from troupe.learner.config import LearnerConfig, ModelConfig
from troupe.learner.model import load
from troupe.learner.optimiser import Optimiser
from troupe.learner.tiny import make_tiny
from troupe.learner.trainer import Trainer
from troupe.protocol.trajectory import ENVIRONMENT, POLICY, TEMPLATE, Node, Task, Trajectory


@every_seed
def test_every_policy_token_was_sampled_for_exactly_its_prompt_and_nothing_else_is_trained(run: Run) -> None:
    """Law 1 and law 2 of whatever a rollout leaves in the store, completed, failed or cancelled. What a trajectory took from
    a sibling is in the sibling, token by token, logprob by logprob; that one is looked at too."""
    stored = {(t.id, t.attempt): said_in(t) for t in run.rows}
    for t in run.rows:
        for node in t.nodes:
            node.check()
        taken = t.fork.tokens if t.fork else 0
        if t.fork and taken:
            sibling = stored[t.fork.episode, t.fork.attempt]
            assert said_in(t)[:taken] == sibling[:taken] and taken < len(sibling), f"{t.id}/{t.attempt} is no fork of it"
        first = dict(zip(map(id, t.nodes), np.cumsum([0, *(len(node.logprobs) for node in t.nodes)]).tolist(), strict=False))
        for branch in t.branches():
            ids: list[int] = []
            for node in (t.nodes[i] for i in branch):
                mine = node.provenance == POLICY
                opened = int(len(mine) - mine.sum())
                assert (not mine[:opened].any() and (node.provenance[:opened] == TEMPLATE).all()) or not mine.any()
                known = min(len(node.logprobs), max(0, taken - first[id(node)]))  # of a sibling
                if known < mine.sum():
                    tokens, at = node.tokens.tolist(), opened + known
                    versions, logprobs = tuple(node.versions[known:].tolist()), node.logprobs[known:].tobytes()
                    said = ((*ids, *tokens[:at]), tuple(tokens[at:]), versions, logprobs)
                    assert said in run.sampled, f"{t.id}/{t.attempt}: no engine sampled this"
                ids += node.tokens.tolist()
        sampled = [id_ for node in t.nodes for id_ in node.tokens[node.provenance == POLICY].tolist()]
        assert [id_ for sample in t.samples() for id_ in sample.tokens[sample.mask].tolist()] == sampled


def said_in(t: Trajectory) -> list[tuple[int, int, float]]:
    """Each token of the policy with its version and logprob."""
    found: list[tuple[int, int, float]] = []
    for node in t.nodes:
        tokens = node.tokens[node.provenance == POLICY].tolist()
        found += zip(tokens, node.versions.tolist(), node.logprobs.tolist(), strict=True)
    return found


@pytest.fixture(scope="module")
def trainer(tmp_path_factory: pytest.TempPathFactory) -> Trainer:
    folder = make_tiny(tmp_path_factory.mktemp("tiny"), ["a b"], hidden=16, layers=2, heads=2, mlp=24)
    return Trainer(LearnerConfig(correct="none", device="cpu"), ModelConfig(path=str(folder)), seed=0)


@pytest.fixture(scope="module")
def plain(trainer: Trainer) -> torch.nn.Module:
    """The same weights behind the library's own attention."""
    return load(trainer.model_config, seed=trainer.seed)


def trajectory(index: int, reward: float, provenance: list[list[int]]) -> Trajectory:
    """A chain of nodes whose tokens have the given provenances, mixed at will within a node."""
    rng = np.random.default_rng(index)
    nodes = []
    for parent, row in enumerate([[TEMPLATE], *provenance], start=-1):
        k = row.count(POLICY)
        nodes.append(
            Node(
                parent=parent,
                role="x",
                step=0,
                tokens=rng.integers(0, 250, len(row)).astype(np.int32),
                provenance=np.array(row, np.uint8),
                logprobs=rng.normal(-5.6, 0.2, k).astype(np.float32),
                versions=np.zeros(k, np.int32),
            )
        )
    task = Task("t", "w", "train", 0)
    return Trajectory(f"e{index}", 0, 0, index, "train", 1, task, "completed", "terminated", nodes, reward=reward)


def gradient(trainer: Trainer, trajectories: list[Trajectory]) -> torch.Tensor:
    """The gradient that reaches the optimiser in a training step; it is taken away there, so the weights stay."""
    seen: list[torch.Tensor] = []

    def taken(_: Optimiser, lr: float) -> float:
        seen.append(torch.cat([p.grad.flatten() for p in trainer.model.parameters() if p.grad is not None]))
        trainer.model.zero_grad()
        return 0.0

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Optimiser, "step", taken)
        trainer.train(trajectories)
    (only,) = seen
    return only


def by_hand(model: torch.nn.Module, trajectories: list[Trajectory], advantages: list[float]) -> torch.Tensor:
    """−Σ A·∇logprob / count over policy tokens and nothing else, one token at a time (the ratio is 1 before the step)."""
    model.zero_grad()
    total, count = torch.zeros(()), 0
    for t, advantage in zip(trajectories, advantages, strict=True):
        ids = torch.from_numpy(np.concatenate([n.tokens for n in t.nodes])).long()
        provenance = np.concatenate([n.provenance for n in t.nodes])
        lp = model(input_ids=ids[None]).logits[0].log_softmax(-1)
        for i in range(1, len(ids)):
            if provenance[i] == POLICY:
                total = total - advantage * lp[i - 1, ids[i]]
                count += 1
    (total / count).backward()
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


row = st.lists(st.sampled_from([TEMPLATE, POLICY, ENVIRONMENT]), min_size=1, max_size=10)
chain = st.lists(row, min_size=1, max_size=4)


@settings(max_examples=25, deadline=None)
@given(one=chain, other=chain)
def test_the_gradient_is_the_sum_over_policy_tokens_and_nothing_else(
    trainer: Trainer, plain: torch.nn.Module, one: list[list[int]], other: list[list[int]]
) -> None:
    pair = [trajectory(0, 1.0, [[ENVIRONMENT, POLICY], *one]), trajectory(1, 0.0, [[POLICY], *other])]
    advantage = 0.5 / (0.5**0.5 + 1e-6)  # GRPO of rewards [1, 0]
    expected = by_hand(plain, pair, [advantage, -advantage])
    assert (gradient(trainer, pair) - expected).norm() <= 1e-5 * expected.norm()


def test_an_observation_that_nothing_follows_has_no_influence_at_all(trainer: Trainer) -> None:
    """As a target it is masked, and it is no one's context: any other token in its place gives the same gradient."""

    def pair(last: int) -> list[Trajectory]:
        made = [trajectory(i, float(i), [[ENVIRONMENT, POLICY, POLICY], [ENVIRONMENT]]) for i in range(2)]
        for t in made:
            t.nodes[-1].tokens[:] = last
        return made

    assert torch.equal(gradient(trainer, pair(7)), gradient(trainer, pair(8)))
