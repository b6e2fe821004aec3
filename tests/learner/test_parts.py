"""The small parts of a training step, each against numbers worked out by hand: aggregate, correct, kl, filters, schedule,
overlong, truncated sampling, preferences, agreement."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from troupe.learner import advantages, composition, filters, losses
from troupe.learner.aggregate import aggregate
from troupe.learner.agreement import agreement
from troupe.learner.batch import assemble
from troupe.learner.config import LearnerConfig, LoraSettings, ModelConfig, OverlongSettings
from troupe.learner.correct import importance, over_sequences
from troupe.learner.errors import BatchError
from troupe.learner.kl import divergence
from troupe.learner.preferences import dpo, pairs_of
from troupe.learner.rewards import overlong, return_of, turn_rewards
from troupe.learner.schedule import cold_start_rate, learning_rate
from troupe.learner.truncation import kept
from troupe.protocol.errors import ConfigError
from troupe.protocol.trajectory import Step, Trajectory

Make = Callable[..., Trajectory]


# -- aggregate -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("kind", "expected"),
    [
        ("token-mean", (1 - 3) / 4),
        ("sequence-mean-token-mean", (1 - 1) / 2),
        ("sequence-mean-token-sum", (1 - 3) / 2),
        ("constant", (1 - 3) / (2 * 10)),
    ],
)
def test_lengths_one_and_three_with_losses_plus_and_minus_one(kind: Any, expected: float) -> None:
    loss = np.array([-1.0, 1.0, -1.0, -1.0])
    weight, divisor = aggregate(kind, np.array([7, 2, 7, 7]), 10)
    assert (loss * weight).sum() / divisor == pytest.approx(expected, abs=1e-7)


# -- correct ---------------------------------------------------------------------------------------------------------

W = torch.tensor([0.25, 0.5, 1.0, 1.9, 4.0, 8.0])


@pytest.mark.parametrize(
    ("config", "expected"),
    [
        ({"correct": "none"}, [1, 1, 1, 1, 1, 1]),
        ({"correct": "tis"}, [0.25, 0.5, 1, 1.9, 2, 2]),
        ({"correct": "tis", "tis_cap": 5.0}, [0.25, 0.5, 1, 1.9, 4, 5]),
        ({"correct": "icepop", "icepop_low": 0.3}, [0, 0.5, 1, 1.9, 4, 0]),
        ({"correct": "decoupled"}, [0.25, 0.5, 1, 1.9, 4, 8]),
        ({"correct": "decoupled", "decoupled_cap": 5.0}, [0.25, 0.5, 1, 1.9, 4, 0]),
    ],
)
def test_importance_weights(config: dict[str, Any], expected: list[float]) -> None:
    weights = importance(W.log(), torch.zeros(6), LearnerConfig(**config))
    assert weights.tolist() == pytest.approx(expected, rel=1e-5)


def test_on_the_level_of_sequences_the_weight_is_the_product() -> None:
    owner = torch.tensor([0, 1, 0, 1, 1])
    old = over_sequences(torch.tensor([2.0, 3.0, 0.4, 1.0, 0.5]).log(), owner)
    weights = importance(old, torch.zeros(5), LearnerConfig(correct="tis", correct_level="sequence"))
    assert weights.tolist() == pytest.approx([0.8, 1.5, 0.8, 1.5, 1.5], rel=1e-5)


def test_of_a_long_sequence_the_product_is_exact() -> None:
    """32768 tokens at −3, of which 2900 are 2⁻²² less likely than the engine said: float32 cannot tell the sums apart."""
    n, differ = 32_768, 2900
    rollout = torch.full((n,), -3.0)
    old = rollout.clone()
    old[:differ] -= 2.0**-22
    owner = torch.zeros(n, dtype=torch.int64)
    config = LearnerConfig(correct="tis", correct_level="sequence")
    weights = importance(over_sequences(old, owner), over_sequences(rollout, owner), config)
    assert weights.tolist() == pytest.approx([math.exp(-differ * 2.0**-22)] * n, rel=1e-6)
    for correct in ("none", "tis", "icepop"):
        sums = over_sequences(old, owner)
        assert importance(sums, sums, LearnerConfig(correct=correct)).dtype == torch.float32, "the loss would change its type"


def test_a_hopeless_gap_stays_finite() -> None:
    for correct in ("tis", "icepop", "decoupled"):
        weights = importance(torch.tensor([0.0, -1e4]), torch.tensor([-1e4, 0.0]), LearnerConfig(correct=correct))
        assert torch.isfinite(weights).all()


# -- kl --------------------------------------------------------------------------------------------------------------


def test_divergences() -> None:
    lp, ref = torch.tensor([-1.0, -1.0], requires_grad=True), torch.tensor([-1.5, -0.5])
    assert divergence(lp, ref, "k1").tolist() == [0.5, -0.5]
    assert divergence(lp, ref, "k2").tolist() == [0.125, 0.125]
    k3 = divergence(lp, ref, "k3")
    assert k3.tolist() == pytest.approx([math.exp(-0.5) + 0.5 - 1, math.exp(0.5) - 0.5 - 1])
    k3.sum().backward()  # in the loss: 1 − e^(ref − lp), which is not the slope of k1
    assert lp.grad is not None and lp.grad.tolist() == pytest.approx([1 - math.exp(-0.5), 1 - math.exp(0.5)])


# -- filters ---------------------------------------------------------------------------------------------------------

SPREAD = [np.array(g, np.float64) for g in ([0, 2], [1, 1], [0, 6], [0, 4], [3.0], [0, 8], [0.1] * 2, [0, 0])]
"""Deviations √2·(1, 0, 3, 2, 0, 4, 0, 0)."""


@pytest.mark.parametrize(
    ("name", "value", "kept"),
    [
        ("all", 0.25, range(8)),
        ("informative", 0.25, (0, 2, 3, 5)),
        ("top_std", 0.25, (2, 5)),
        ("top_std", 0.01, (5,)),
        ("top_k", 3, (2, 3, 5)),
        ("top_p", 0.4, (5,)),  # 4 of 10
        ("top_p", 0.7, (2, 5)),
        ("top_p", 0.71, (2, 3, 5)),
        ("min_p", 0.5, (2, 3, 5)),
        ("softmax_top_p", 0.7, (5,)),  # e^(4√2) is .75 of the sum
        ("softmax_top_p", 0.9, (2, 5)),
    ],
)
def test_filters_keep_whole_groups(name: str, value: float, kept: Any) -> None:
    assert [i for i, keeps in enumerate(filters.find(name)(SPREAD, value)) if keeps] == list(kept)


def test_where_nothing_spreads_the_residue_of_equal_rewards_does_not_win() -> None:
    equal = [np.full(3, 0.1), np.full(3, 0.7)]
    assert filters.find("top_std")(equal, 0.5) == [True, False]
    assert filters.find("top_p")(equal, 0.5) == filters.find("min_p")(equal, 0.5) == [False, False]


# -- rewards ---------------------------------------------------------------------------------------------------------


def test_soft_overlong_punishes_what_was_generated(make_trajectory: Make) -> None:
    t = make_trajectory(0, 0, 1.0)
    n = t.policy_tokens
    for limit, expected in ((n + 10, 0.0), (n + 4, 0.0), (n + 3, -0.25), (n, -1.0), (n - 5, -1.0)):
        settings = OverlongSettings(limit=limit, buffer=4) if limit >= 4 else None
        if settings:
            assert overlong(t, settings) == expected
    everything = sum(len(node.tokens) for node in t.nodes)
    assert overlong(t, OverlongSettings(limit=everything + 2, buffer=4, factor=3.0, counts="all")) == -1.5
    config = LearnerConfig(overlong=OverlongSettings(limit=n, buffer=4))
    assert return_of(t, config) == 0.0
    assert turn_rewards(t, config).tolist() == [0.0, 0.0]  # the outcome 1 and the punishment −1, both with the last turn


def test_a_step_is_paid_by_the_weights_of_its_stage(make_trajectory: Make) -> None:
    t = make_trajectory(0, 0, 1.75)
    t.steps[0] = Step(reward=0.5, parts={"tidy": 0.5})
    t.steps[1] = Step(reward=1.25, parts={"outcome": 1.0, "tidy": 0.25})
    stages = [{"from_step": 3, "reward_parts": {"outcome": 0.0}}, {"from_step": 5, "reward_parts": {"tidy": -2.0}}]
    config = LearnerConfig(reward_parts={"tidy": 10.0}, stages=stages)
    paid = {step: turn_rewards(t, config.at(step)).tolist() for step in (1, 2, 3, 4, 5, 6, 1_000)}
    before, first, second = [5.0, 3.5], [0.5, 0.25], [-1.0, 0.5]  # a stage's weights stand in place of those before it
    assert list(paid.values()) == [before, before, first, first, second, second, second]
    assert return_of(t, config.at(4)) == 0.75 and LearnerConfig().at(9) == LearnerConfig()


def test_equal_rewards_that_are_shaped_alike_are_exactly_equal(make_trajectory: Make) -> None:
    """In whatever turns they were earned: a residue would be divided by itself, and become an advantage."""
    earned = [0.1e9, 0.2e9, 0.3e9, -0.7e9, 1.1e9 / 3]
    made = [make_trajectory(i, 0, sum(earned), turns=5) for i in range(5)]
    for i, t in enumerate(made):
        for step, reward in zip(t.steps, earned[i:] + earned[:i], strict=True):
            step.reward, step.parts = reward, {"tidy": reward / 7}
    far = OverlongSettings(limit=1000, buffer=10)
    for config in (
        LearnerConfig(overlong=far),
        LearnerConfig(reward_parts={"tidy": 3.0}),
        LearnerConfig(reward_parts={"no": 2}),
    ):
        for scale in (1.0, 0.37):
            assert len({return_of(t, config, scale) for t in made}) == 1
            for t in made:
                assert return_of(t, config, scale) == pytest.approx(turn_rewards(t, config, scale).sum(), rel=1e-12)


# -- what may be trained on ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("parent", [4, 99, -2, None, 1.5])
def test_a_node_whose_parent_does_not_come_before_it_is_refused_by_name(parent: Any, make_trajectory: Make) -> None:
    bad = make_trajectory(1, 0, 0.0)
    bad.nodes[4].parent = parent
    with pytest.raises(BatchError, match=rf"'e0001': node 4 has parent {parent}, which does not come before it"):
        assemble([make_trajectory(0, 0, 1.0), bad], LearnerConfig())
    bad.nodes[3].parent, bad.nodes[4].parent = 4, 0
    with pytest.raises(BatchError, match="'e0001': node 3 has parent 4"):
        assemble([bad], LearnerConfig())


@pytest.mark.parametrize("nothing", [None, "1", 1j])
def test_a_reward_that_is_no_number_is_refused_by_name(nothing: Any, make_trajectory: Make) -> None:
    bad = make_trajectory(1, 0, nothing)
    with pytest.raises(BatchError, match=r"'e0001' has reward .* it is broken, not bad"):
        assemble([make_trajectory(0, 0, 1.0), bad], LearnerConfig())
    for step in (Step(reward=nothing), Step(parts={"tidy": nothing})):
        bad = make_trajectory(1, 0, 0.0)
        bad.steps[1] = step
        with pytest.raises(BatchError, match="'e0001': a reward of turn 1 is not finite"):
            assemble([make_trajectory(0, 0, 1.0), bad], LearnerConfig())


def test_numpys_numbers_are_numbers(make_trajectory: Make) -> None:
    made = [make_trajectory(i, 0, np.float32(i)) for i in range(2)]
    for t in made:
        t.sampling = {"temperature": np.float32(0.5), "top_p": np.float64(0.75), "top_k": np.int64(3)}
        t.nodes[1].parent = np.int32(0)
    sequence = assemble(made, LearnerConfig()).sequences[0]
    assert (sequence.temperature, sequence.top_p, sequence.top_k) == (0.5, 0.75, 3)


# -- schedule --------------------------------------------------------------------------------------------------------


def test_the_learning_rate_rises_then_falls_as_configured() -> None:
    linear = LearnerConfig(warmup_steps=2, decay_steps=10, lr=1e-3)
    assert [learning_rate(linear, s) for s in (0, 1, 2, 7, 11, 12, 50)] == pytest.approx(
        [0.5e-3, 1e-3, 1e-3, 0.525e-3, 0.145e-3, 0.05e-3, 0.05e-3]
    )
    for schedule in ("linear", "cosine"):
        config = LearnerConfig(warmup_steps=10, decay_steps=20, lr=1.0, schedule=schedule)
        rates = [learning_rate(config, step) for step in range(60)]
        assert rates[:11] == pytest.approx([*(i / 10 for i in range(1, 11)), 1.0]), "lr is the peak, and is reached"
        assert rates[29] > rates[30] == pytest.approx(0.05) and rates[30:] == pytest.approx([0.05] * 30)
    assert learning_rate(LearnerConfig(warmup_steps=10, lr=1.0), 1000) == 1.0  # it stays
    cosine = LearnerConfig(decay_steps=10, lr=1e-3, schedule="cosine")
    assert [learning_rate(cosine, s) for s in (0, 5, 10, 55)] == pytest.approx([1e-3, 0.525e-3, 0.05e-3, 0.05e-3])


def test_a_cold_start_rises_to_its_rate_and_then_falls_to_a_tenth_of_it() -> None:
    for warmup, steps in ((10, 60), (1, 30), (0, 30)):
        config = LearnerConfig(cold_start_warmup=warmup, cold_start_lr=1.0)
        rates = [cold_start_rate(config, step, steps) for step in range(steps + 1)]
        assert rates[:warmup] == pytest.approx([i / warmup for i in range(1, warmup + 1)]), "cold_start_lr is the peak"
        assert max(rates) == rates[warmup] == 1.0 and rates[steps] == pytest.approx(0.1)
        assert all(before > after for before, after in itertools.pairwise(rates[warmup:]))
    short = LearnerConfig(cold_start_warmup=10, cold_start_lr=1.0)
    assert [cold_start_rate(short, step, 4) for step in range(4)] == pytest.approx([0.1, 0.2, 0.3, 0.4])


# -- truncated sampling ----------------------------------------------------------------------------------------------


def test_top_k_and_top_p_keep_what_an_engine_keeps_and_what_was_sampled() -> None:
    logits = torch.tensor([[0.1, 0.4, 0.2, 0.3]]).log().repeat(6, 1)
    targets = torch.tensor([1, 1, 1, 0, 1, 1])
    top_k = torch.tensor([0, 2, 0, 2, 3, 0])
    top_p = torch.tensor([1.0, 1.0, 0.65, 1.0, 0.5, 0.4], dtype=torch.float64)
    expected = [[1, 1, 1, 1], [0, 1, 0, 1], [0, 1, 0, 1], [1, 1, 0, 1], [0, 1, 0, 1], [0, 1, 0, 0]]
    assert kept(logits, targets, top_k, top_p).int().tolist() == expected


# -- agreement -------------------------------------------------------------------------------------------------------


def test_the_gap_is_told_by_age() -> None:
    told = agreement(torch.tensor([0.0, 1.0, 2.0]), torch.tensor([0.5, 1.0, 0.0]), np.array([0, 0, 3]))
    assert told.pop("lp_gap_p99") == pytest.approx(0.5 + 0.98 * 1.5, rel=1e-6)
    assert told == {
        "lp_gap_mean": pytest.approx(2.5 / 3),
        "lp_gap_max": 2.0,
        "lp_gap_mean_age_0": 0.25,
        "lp_gap_max_age_0": 0.5,
        "lp_gap_mean_age_3": 2.0,
        "lp_gap_max_age_3": 2.0,
    }


# -- preferences -----------------------------------------------------------------------------------------------------


def test_a_success_is_paired_with_a_failure_of_the_same_task(make_trajectory: Make) -> None:
    made = [make_trajectory(i, i // 4, r) for i, r in enumerate([1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 0.0, 1.0])]
    made[5].success = False  # the world's verdict counts, not the reward
    assert sorted(pairs_of(made)) == [(0, 1), (3, 2), (4, 5), (7, 6)]
    assert pairs_of(made[::-1]) == [(7 - won, 7 - lost) for won, lost in pairs_of(made)]
    assert pairs_of([made[0], made[6]]) == []  # of different seeds


def test_dpo_is_the_logistic_loss_of_the_margin_and_its_weights_are_its_gradient() -> None:
    lp = torch.tensor([-3.0, -5.0, -2.0, -9.0], dtype=torch.float64, requires_grad=True)
    ref = torch.tensor([-4.0, -4.5, -2.0, -9.5], dtype=torch.float64)
    pairs = [(0, 1), (2, 3)]
    margin, weight = dpo(lp.detach(), ref, pairs, beta=0.5)
    assert margin.tolist() == [0.75, -0.25]
    margins = torch.stack([lp[won] - ref[won] - lp[lost] + ref[lost] for won, lost in pairs])
    loss = -torch.nn.functional.logsigmoid(0.5 * margins).mean()
    loss.backward()
    assert loss.item() == pytest.approx((math.log(1 + math.exp(-0.75)) + math.log(1 + math.exp(0.25))) / 2)
    torch.testing.assert_close(weight, lp.grad)


def stage(from_step: int, **reward_parts: float) -> dict[str, Any]:
    return {"from_step": from_step, "reward_parts": reward_parts}


# -- what fits together ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"ratio": "rollout", "correct": "tis"}, "would do it twice: set correct = 'none'"),
        ({"ratio": "rollout"}, "would do it twice"),
        ({"correct": "decoupled", "correct_level": "sequence"}, "set correct_level = 'token'"),
        ({"aggregate": "constant"}, "set aggregate_length"),
        ({"correct": "icepop", "icepop_low": 6.0}, "swap them"),
        ({"overlong": {"limit": 4, "buffer": 5}}, "make it smaller"),
        ({"correct": "tiss"}, "correct"),
        ({"stages": [stage(2), stage(2)]}, "the stages begin at 2, 2: let each begin after the one before it"),
        ({"stages": [stage(1), stage(3), stage(2)]}, "the stages begin at 1, 3, 2"),
        ({"stages": [stage(0)]}, "greater than or equal to 1"),
        ({"stages": [stage(1, outcome=math.nan)]}, "finite"),
        ({"stages": [{"from_step": 1}]}, "reward_parts"),
        ({"stages": [{"from_step": 1, "reward_parts": {}, "lr": 1.0}]}, "lr"),
        ({"kl": {"reset_optimiser": True}}, "set reset_every, or leave it out"),
    ],
)
def test_contradicting_settings_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ValidationError, match=message):
        LearnerConfig(**config)


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({"advantage": "grop"}, "unknown advantage"),
        ({"loss": "ppo"}, "unknown loss"),
        ({"filter": "informativ"}, "Did you mean 'informative'"),
        ({"loss": "reinforce", "passes": 2}, "set both to 1"),
        ({"loss": "reinforce", "minibatches": 2}, "set both to 1"),
        ({"loss": "reinforce", "ratio": "rollout", "correct": "none"}, "set ratio = 'old'"),
        ({"loss": "reinforce", "correct": "decoupled"}, "use tis"),
        ({"loss": "gspo", "correct": "decoupled"}, "use tis or icepop"),
        ({"kl": {"reset_every": 5}}, "the base model is the reference"),
        ({"critic": {"path": "x"}}, "set kind = 'separate'"),
    ],
)
def test_parts_that_do_not_fit_are_refused(config: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        composition.check(LearnerConfig(**config), ModelConfig(path="x", lora=LoraSettings()))


def test_a_setting_that_nothing_reads_is_told() -> None:
    assert composition.unused(LearnerConfig()) == []
    assert composition.unused(LearnerConfig(advantage="pass_at_k", pass_k=2, filter="top_k", filter_value=3)) == []
    assert composition.unused(LearnerConfig(advantage="mine.py:mine", pass_k=2)) == []
    (told,) = composition.unused(LearnerConfig(pass_k=2))
    assert told == "learner.pass_k is set, but advantage = 'grpo' does not read it"
    (told,) = composition.unused(LearnerConfig(objective="preference", loss="cispo"))
    assert told == "learner.loss is set, but objective = 'preference' does not read it"


@pytest.mark.parametrize(("choice", "parts"), [("advantage", advantages), ("loss", losses)])
def test_what_is_said_to_read_a_setting_reads_it_and_no_other_file_does(choice: str, parts: ModuleType) -> None:
    files = {file.stem: file.read_text() for file in Path(parts.__file__ or "").parent.glob("[a-z]*.py")}
    for key, (by, readers) in composition._READ_BY.items():
        if by == choice and key != "teacher":  # the trainer reads it, and gives distill the logprobs
            reading = {stem for stem, text in files.items() if f"config.{key}" in text}
            assert reading == {parts.find(name).__module__.rpartition(".")[2] for name in readers}, key
