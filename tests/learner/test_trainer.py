"""Policy-gradient steps: what they learn, what they tell, what they refuse."""

from __future__ import annotations

import math
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.learner.training import BF16, FULL, LORA, Make, logprobs_of, trainer
from troupe.learner.config import LearnerConfig
from troupe.learner.errors import BatchError, Diverged
from troupe.protocol.checksum import checksum_of
from troupe.protocol.errors import ConfigError
from troupe.protocol.trajectory import Step, Trajectory


@pytest.mark.parametrize("kind", [FULL, BF16, LORA])
@pytest.mark.parametrize("config", [{}, {"passes": 2}, {"passes": 2, "minibatches": 2}])
def test_training_makes_rewarded_tokens_likelier(tiny: str, make_trajectory: Make, kind: str, config: Any) -> None:
    good, bad = make_trajectory(0, 0, 1.0), make_trajectory(1, 0, 0.0)
    t = trainer(tiny, kind, correct="none", lr=1e-2, **config)
    before = [logprobs_of(t, x, 1.0).mean() for x in (good, bad)]
    for _ in range(5):
        metrics = t.train([good, bad])
    after = [logprobs_of(t, x, 1.0).mean() for x in (good, bad)]
    assert after[0] > before[0] and after[1] < before[1]
    assert t.step == 5
    assert all(math.isfinite(v) for v in metrics.values())
    assert metrics["kl"] > 0


@pytest.mark.parametrize(("temperature", "top_p"), [(1.0, 1.0), (0.6, 1.0), (0.6, 0.8)])
def test_logprobs_agree_with_an_engine_that_samples_so(
    tiny: str, make_trajectory: Make, temperature: float, top_p: float
) -> None:
    t = trainer(tiny)
    pair = [make_trajectory(i, 0, float(i)) for i in range(2)]
    for x in pair:
        x.sampling = {"temperature": temperature, "top_p": top_p}
        lp = logprobs_of(t, x, temperature, top_p)
        for node in x.nodes:
            node.logprobs, lp = lp[: len(node.logprobs)], lp[len(node.logprobs) :]
    metrics = t.train(pair)
    assert metrics["lp_gap_max"] < 1e-5


def test_metrics_say_what_was_in_the_batch(tiny: str, batch: list[Trajectory]) -> None:
    t = trainer(tiny)
    t.step = 3
    metrics = t.train(batch)
    rewards = np.array([x.reward for x in batch])
    assert metrics["reward_mean"] == pytest.approx(rewards.mean())
    assert metrics["reward_std"] == pytest.approx(rewards.std(ddof=1))
    assert metrics["group_reward_std"] == pytest.approx(rewards.reshape(3, 4).std(axis=1, ddof=1).mean())
    assert metrics["equal_groups"] == pytest.approx(1 / 3)
    assert metrics["success"] == pytest.approx((rewards > 0).mean())
    assert metrics["turns"] == 2
    assert metrics["policy_tokens"] == sum(x.policy_tokens for x in batch)
    assert metrics["tokens"] == sum(len(s.tokens) for x in batch for s in x.samples())
    assert metrics["staleness_mean"] == metrics["staleness_max"] == 3 and metrics["staleness_3"] == 1  # all are of version 0
    assert metrics["entropy"] == pytest.approx(math.log(270), rel=0.05)
    assert metrics["lr"] == 3e-3


def test_a_batch_without_anything_to_compare_changes_nothing(tiny: str, make_trajectory: Make, batch: Any) -> None:
    t = trainer(tiny)
    t.train(batch)  # so that there is momentum
    before = checksum_of(t.tensors())
    metrics = t.train([make_trajectory(i, 9, 1.0) for i in range(4)])
    assert checksum_of(t.tensors()) == before
    assert (metrics["equal_groups"], metrics["grad_norm"], t.step) == (1.0, 0.0, 2)
    assert metrics["entropy"] > 0  # measured all the same


def test_importance_weights_are_capped_and_applied_once(tiny: str, make_trajectory: Make) -> None:
    """Engine logprobs far below the learner's: every weight is the cap, so the gradient is exactly twice the plain one."""
    pair = [make_trajectory(i, 0, float(i)) for i in range(2)]
    for x in pair:
        for node in x.nodes:
            node.logprobs = node.logprobs - 10
    norms = [trainer(tiny, correct=i, tis_cap=2.0).train(pair)["grad_norm"] for i in ("none", "tis")]
    assert norms[1] == pytest.approx(2 * norms[0], rel=1e-5)


def test_warmup_raises_the_learning_rate(tiny: str, batch: list[Trajectory]) -> None:
    t = trainer(tiny, warmup_steps=2, lr=1e-3)
    assert [t.train(batch)["lr"] for _ in range(3)] == pytest.approx([5e-4, 1e-3, 1e-3])


def test_broken_trajectories_are_refused_by_name_before_anything_changes(tiny: str, make_trajectory: Make) -> None:
    def broken(**changes: Any) -> list[Trajectory]:
        bad = make_trajectory(1, 0, 0.0)
        for name, value in changes.items():
            setattr(bad, name, value)
        return [make_trajectory(0, 0, 1.0), bad]

    short = make_trajectory(1, 0, 0.0)
    short.nodes[2].logprobs = short.nodes[2].logprobs[:-1]
    infinite = make_trajectory(1, 0, 0.0)
    infinite.nodes[2].logprobs = np.full_like(infinite.nodes[2].logprobs, -np.inf)
    t = trainer(tiny)
    before = checksum_of(t.tensors())
    for bad, message in (
        ([], "empty batch"),
        (broken(status="failed", stop="failed"), "'e0001' is failed"),
        (broken(status="cancelled"), "'e0001' is cancelled"),
        (broken(reward=math.nan), "'e0001' has reward nan"),
        (broken(reward=math.inf), "'e0001' has reward inf"),
        (broken(kind="eval"), "never trained on"),
        (broken(id="e0000"), "is there twice"),
        (broken(nodes=short.nodes), "logprobs"),
        (broken(nodes=infinite.nodes), "not finite"),
        (broken(sampling={"temperature": 0.0}), "temperature"),
        (broken(sampling={"top_p": 0.0}), "top_p"),
        (broken(sampling={"top_k": -1}), "top_k"),
        (broken(steps=[Step(reward=math.nan)]), "a reward of turn 0 is not finite"),
        ([x for x in broken(nodes=[]) if not x.nodes], "policy token"),
    ):
        with pytest.raises(BatchError, match=message):
            t.train(bad)
    assert (checksum_of(t.tensors()), t.step) == (before, 0)


def test_a_gradient_that_is_not_finite_is_refused(tiny: str, batch: list[Trajectory]) -> None:
    t = trainer(tiny)
    with torch.no_grad():
        next(t.model.parameters())[:] = math.inf
    with pytest.raises(Diverged):
        t.train(batch)


def test_a_users_advantage_may_differ_by_token(make_trajectory: Make, batch: list[Trajectory], tmp_path: Path) -> None:
    """One number per policy token, in node order, also where branches take the nodes in another order."""
    file = tmp_path / "token_advantage.py"
    file.write_text(
        "import numpy as np\n"
        "def f(group):\n"
        "    return [np.concatenate([n.tokens[n.provenance == 1] for n in t.nodes]) for t in group.trajectories]\n"
        "def short(group):\n    return [np.zeros(1) for t in group.trajectories]\n"
        "def few(group):\n    return [0.0]\n"
    )
    from troupe.learner.advantages import find
    from troupe.learner.batch import assemble, credit

    forked = make_trajectory(99, 1, 0.5, turns=4)
    forked.nodes[5].parent, forked.nodes[7].parent = 2, 4  # branches 0-1-2-5-6 and 0-1-2-3-4-7-8, in this order
    assert [path[-1] for path in forked.branches()] == [6, 8]
    batch.append(forked)
    config = LearnerConfig()
    made = assemble(batch, config)
    sampled = np.concatenate([s.tokens[s.at] for s in made.sequences])
    np.testing.assert_array_equal(credit(made, find(f"{file}:f"), config).advantage, sampled.astype(np.float32))
    for name in ("short", "few"):
        with pytest.raises(BatchError, match="advantages"):
            credit(made, find(f"{file}:{name}"), config)


def test_lengths_one_and_three_with_opposite_advantages(tiny: str, make_trajectory: Make) -> None:
    """Under sequence means the two weigh the same, under the token mean the longer one three times as much."""
    pair = [make_trajectory(i, 0, float(1 - i), turns=1) for i in range(2)]
    for x, n in zip(pair, (1, 3), strict=True):
        said = x.nodes[-1]
        said.tokens, said.provenance = said.tokens[:1].repeat(n), said.provenance[:1].repeat(n)
        said.logprobs, said.versions = said.logprobs[:1].repeat(n), said.versions[:1].repeat(n)
    losses = {}
    for kind in ("token-mean", "sequence-mean-token-mean", "sequence-mean-token-sum", "constant"):
        config = {"aggregate": kind, "aggregate_length": 10, "advantage": "dr_grpo", "correct": "none"}
        losses[kind] = trainer(tiny, **config).train(pair)["loss"]  # −½ on one token, +½ on three, at ratio 1
    expected = [(3 - 1) / 2 / 4, 0.0, (3 - 1) / 2 / 2, (3 - 1) / 2 / 20]
    assert list(losses.values()) == pytest.approx(expected, abs=1e-6)


def test_a_trainer_tells_what_it_did_when_one_thing_after_the_other(tiny: str, batch: list[Trajectory]) -> None:
    t = trainer(tiny, kl={"coef": 0.1}, passes=2, minibatches=2)
    told = t.train(batch)
    found = t.timings()
    names = [span.name for span in found]
    assert names[:4] == ["pack", "old logprobs", "reference logprobs", "advantages"] and names[-1] == "kl"
    assert names[4:-1] == ["forward-backward", "optimiser"] * 4
    assert all(one.end <= other.begin for one, other in pairwise(found))
    assert sum(span.end - span.begin for span in found) <= told["learn_s"] + 1e-3
    assert t.timings() == []


def test_a_stage_pays_from_its_step_on_also_after_a_restart(tiny: str, batch: list[Trajectory], scratch: Path) -> None:
    """Without its weight every return of the batch is equal: nothing is learned before the stage begins."""
    for t in batch:
        t.steps[-1] = Step(reward=t.reward, parts={"outcome": t.reward})
    stages = [{"from_step": 1, "reward_parts": {"outcome": 0.0}}, {"from_step": 3, "reward_parts": {}}]
    t = trainer(tiny, stages=stages)
    norms = []
    for _ in range(4):
        norms.append(t.train(batch)["grad_norm"])
        if t.step == 2:
            t.save(scratch / "step-2")
    assert norms[:2] == [0, 0] and norms[2] > 0 < norms[3]
    again = trainer(tiny, stages=stages)
    again.restore(scratch / "step-2")
    assert [again.train(batch)["grad_norm"] for _ in range(2)] == norms[2:]
    assert checksum_of(again.tensors()) == checksum_of(t.tensors())


@pytest.mark.parametrize("kind", ["head", "separate"])
@pytest.mark.parametrize("advantage", ["gae", "bi_level_gae"])
def test_a_critic_learns_what_returns_to_expect(tiny: str, batch: list[Trajectory], kind: str, advantage: str) -> None:
    t = trainer(tiny, advantage=advantage, lr=1e-6, critic={"kind": kind, "lr": 1e-2})
    told = [t.train(batch) for _ in range(40)]
    assert told[-1]["value_loss"] < told[0]["value_loss"] * 0.7
    assert told[-1]["value_explained"] > told[0]["value_explained"]


def test_a_filter_leaves_whole_groups_out_of_training_and_metrics_see_them_all(tiny: str, batch: list[Trajectory]) -> None:
    """With the all-equal group gone the other tokens weigh more; what is told of rewards does not change."""
    everything, informative = (trainer(tiny, filter=f).train(batch) for f in ("all", "informative"))
    assert informative["kept_groups"] == pytest.approx(2 / 3)
    assert informative["policy_tokens"] == sum(t.policy_tokens for t in batch[:8])
    for name in ("reward_mean", "equal_groups", "success", "turns"):
        assert informative[name] == everything[name]
    shares = informative["policy_tokens"] / everything["policy_tokens"]
    assert informative["loss"] == pytest.approx(everything["loss"] / shares, rel=1e-4, abs=1e-7)


def test_a_filter_that_leaves_nothing_changes_nothing(tiny: str, make_trajectory: Make) -> None:
    t = trainer(tiny, filter="informative", advantage="reinforce")
    before = checksum_of(t.tensors())
    metrics = t.train([make_trajectory(i, 0, 1.0) for i in range(3)])
    assert checksum_of(t.tensors()) == before and metrics["kept_groups"] == 0


@pytest.mark.parametrize("config", [{}, {"entropy_coef": 0.01}, {"advantage": "gae", "critic": {"kind": "separate"}}])
def test_activation_checkpointing_changes_nothing(tiny: str, batch: list[Trajectory], config: Any) -> None:
    sums = []
    for on in (False, True):
        t = trainer(tiny, activation_checkpointing=on, passes=2, **config)
        for _ in range(2):
            t.train(batch)
        sums.append(checksum_of(t.tensors()))
    assert sums[0] == sums[1]


def test_a_step_that_an_error_cut_off_leaves_no_gradient_behind(
    tiny: str, batch: list[Trajectory], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, clean = (trainer(tiny, tokens_per_micro_batch=40) for _ in range(2))
    with monkeypatch.context() as patched:
        calls = iter(range(100))
        real = broken._loss

        def fails(*args: Any) -> Any:
            if next(calls) == 2:
                raise RuntimeError("out of memory")
            return real(*args)

        patched.setattr(broken, "_loss", fails)
        with pytest.raises(RuntimeError):
            broken.train(batch)
    assert broken.train(batch)["grad_norm"] == clean.train(batch)["grad_norm"]


def test_a_critic_that_diverges_leaves_the_policy_as_it_was(tiny: str, batch: list[Trajectory]) -> None:
    t = trainer(tiny, advantage="gae", whiten="batch")
    before = checksum_of(t.tensors())
    batch[0].reward = 1e25
    with pytest.raises(Diverged):
        t.train(batch)
    assert checksum_of(t.tensors()) == before


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"advantage": "rloo"}, "advantage cannot change"),
        ({"kl": {"coef": 1.0}}, "kl cannot change"),
        ({"lr": -1.0}, "cannot be adjusted"),
    ],
)
def test_what_a_trainer_cannot_change_on_its_way_is_refused(tiny: str, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        trainer(tiny).adjust(changes)


def test_adjusted_settings_hold_until_they_are_adjusted_again(tiny: str, batch: list[Trajectory]) -> None:
    t = trainer(tiny, lr=1e-2)
    t.adjust({"lr": 5e-3, "clip_high": 0.5})
    assert t.train(batch)["lr"] == 5e-3 and t.config.clip_high == 0.5
    t.adjust({"filter": "informative"})
    told = t.train(batch)
    assert told["lr"] == 1e-2 and told["kept_groups"] == pytest.approx(2 / 3)
