"""Supervised steps, policy-gradient steps, their metrics and checkpoints."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from troupe.learner.config import LearnerConfig, LoraSettings, ModelConfig
from troupe.learner.errors import BatchError, Diverged
from troupe.learner.model import load
from troupe.learner.tiny import make_tiny
from troupe.learner.trainer import Trainer
from troupe.protocol.checksum import checksum_of
from troupe.protocol.errors import CheckpointError, ConfigError
from troupe.protocol.trajectory import Step, Trajectory

Make = Callable[..., Trajectory]
FULL, BF16, LORA = "full", "bf16", "lora"


def trainer(path: str, kind: str = FULL, *, seed: int = 0, **config: Any) -> Trainer:
    model = ModelConfig(
        path=path,
        dtype="bfloat16" if kind == BF16 else "float32",
        lora=LoraSettings(rank=2) if kind == LORA else None,
    )
    return Trainer(LearnerConfig(**{"lr": 3e-3, "device": "cpu", **config}), model, seed=seed)


def logprobs_of(t: Trainer, trajectory: Trajectory, temperature: float, top_p: float = 1.0) -> np.ndarray[Any, Any]:
    """What an engine with the trainer's weights would report for the policy tokens of an unforked trajectory.

    With `top_p`, its tokens are first exchanged for ones that lie within it.
    """
    model = load(t.model_config, seed=0)
    model.load_state_dict(t.model.state_dict())
    (sample,) = trajectory.samples()
    found = []
    for position in np.flatnonzero(sample.mask):
        with torch.no_grad():
            logits = model(input_ids=torch.from_numpy(sample.tokens[:position]).long()[None]).logits[0, -1].float()
        p = (logits / temperature).softmax(-1)
        ordered = p.sort(descending=True)
        inside = int((ordered.values.cumsum(-1) - ordered.values < top_p).sum())
        if top_p < 1:
            sample.tokens[position] = ordered.indices[position % inside]
        found.append(math.log(p[sample.tokens[position]] / ordered.values[:inside].sum()))
    at = 0
    for node in trajectory.nodes:
        node.tokens = sample.tokens[at : at + len(node.tokens)].copy()
        at += len(node.tokens)
    return np.array(found, np.float32)


# -- cold start ------------------------------------------------------------------------------------------------------


def demonstrations(n: int = 12) -> tuple[list[Any], list[Any]]:
    rng = np.random.default_rng(0)
    tokens = [np.concatenate([rng.integers(0, 200, 5), [210, 211, 212]]).astype(np.int32) for _ in range(n)]
    return tokens, [np.array([0] * 5 + [1] * 3, np.int32) for _ in tokens]


def test_cold_start_teaches_the_supervised_tokens(tiny: str) -> None:
    t = trainer(tiny, cold_start_lr=2e-2)
    seen: list[tuple[int, int, float]] = []
    result = t.cold_start(*demonstrations(), steps=30, batch=8, progress=lambda *a: seen.append(a))
    assert [s[:2] for s in seen] == [(i + 1, 30) for i in range(30)]
    assert result["loss_first"] == seen[0][2] == pytest.approx(math.log(270), rel=0.1)
    assert result["loss"] < result["loss_first"] / 4
    assert t.step == 0


def test_cold_start_learns_nothing_from_other_tokens(tiny: str) -> None:
    """The last token is not supervised and predicts nothing: whatever it is, the weights come out the same."""
    sums = []
    for last in (1, 2):
        tokens, supervised = demonstrations()
        tokens = [np.append(x, last).astype(np.int32) for x in tokens]
        t = trainer(tiny)
        t.cold_start(tokens, [np.append(m, 0) for m in supervised], steps=3, batch=4)
        sums.append(checksum_of(t.tensors()))
    assert sums[0] == sums[1]


def test_cold_start_refuses_what_it_cannot_learn_from(tiny: str) -> None:
    tokens, supervised = demonstrations(2)
    for bad, message in (
        ((tokens, supervised[:1]), "2 demonstrations but 1 masks"),
        ((tokens, [m * 0 for m in supervised]), "no demonstration has a supervised token"),
        (([x + 10_000 for x in tokens], supervised), "vocabulary"),
        (([np.zeros(300, np.int32)], [np.ones(300, np.int32) * (np.arange(300) > 0)]), "context of 256"),
    ):
        with pytest.raises(BatchError, match=message):
            trainer(tiny).cold_start(*bad, steps=1, batch=1)


# -- reinforcement ---------------------------------------------------------------------------------------------------


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


@pytest.mark.parametrize("kind", [FULL, LORA])
@pytest.mark.parametrize("where", ["loss", "reward"])
def test_a_divergence_holds_the_policy_near_its_reference(tiny: str, batch: list[Trajectory], kind: str, where: str) -> None:
    """The same steps with and without a (strong) price: with it, the policy stays where it was."""
    moved = []
    for coef in (0.0, 50.0):
        t = trainer(tiny, kind, kl={"coef": coef, "where": where, "estimator": "k1" if where == "reward" else "k3"})
        for _ in range(6):
            t.train(batch)
        moved.append(reference_divergence(t, batch))
    assert moved[1] < moved[0] / 2


def reference_divergence(t: Trainer, batch: list[Trajectory]) -> float:
    """k3 to the reference, as the trainer's own metric tells it."""
    t.config = t.config.model_copy(update={"kl": t.config.kl.model_copy(update={"where": "loss", "estimator": "k3"})})
    return t.train(batch)["kl_reference"]


def test_with_lora_the_reference_is_the_base_model_and_nothing_is_copied(tiny: str, batch: list[Trajectory]) -> None:
    t = trainer(tiny, LORA, kl={"coef": 0.1})
    first = t.train(batch)["kl_reference"]
    assert first == pytest.approx(0, abs=1e-6)  # a fresh adapter does nothing
    assert t.train(batch)["kl_reference"] > 1e-6
    assert t._reference is not None and t._reference.state_dict() == {}


def test_the_reference_can_be_reset(tiny: str, batch: list[Trajectory]) -> None:
    t = trainer(tiny, kl={"coef": 0.1, "reset_every": 2})
    assert [t.train(batch)["kl_reference"] > 1e-6 for _ in range(4)] == [False, True, False, True]


@pytest.mark.parametrize("kind", [FULL, BF16])
def test_with_the_reference_the_optimiser_can_be_reset(tiny: str, batch: list[Trajectory], kind: str) -> None:
    moments = {}
    for on in (False, True):
        t = trainer(tiny, kind, kl={"coef": 0.1, "reset_every": 2, "reset_optimiser": on})
        moments[on] = []
        for _ in range(5):
            t.train(batch)
            adam = t._optimiser.state_dict()["adam"]["state"]
            moments[on].append({int(state["step"]) for state in adam.values()})
    assert moments == {False: [{1}, {2}, {3}, {4}, {5}], True: [{1}, {2}, {1}, {2}, {1}]}


def test_an_optimiser_that_forgets_its_moments_keeps_what_a_narrower_type_cannot_hold(
    tiny: str, batch: list[Trajectory]
) -> None:
    t = trainer(tiny, BF16, lr=1e-5)
    t.train(batch)
    before = [master.clone() for master in t._optimiser.state_dict()["masters"]]
    t._optimiser.forget()
    after = t._optimiser.state_dict()
    assert not after["adam"]["state"] and all(torch.equal(a, b) for a, b in zip(before, after["masters"], strict=True))
    assert any((master != master.bfloat16().float()).any() for master in before)


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


def test_preferences_make_success_likelier_than_failure(tiny: str, make_trajectory: Make) -> None:
    good, bad = make_trajectory(0, 0, 1.0), make_trajectory(1, 0, 0.0)
    t = trainer(tiny, lr=1e-2)
    first = t.prefer([good, bad])
    assert first["dpo_loss"] == pytest.approx(math.log(2), rel=1e-5)  # the policy is its own reference
    for _ in range(8):
        last = t.prefer([good, bad])
    assert last["dpo_accuracy"] == 1 and last["dpo_loss"] < 0.6 and t.step == 9


def test_a_step_on_preferences_without_a_pair_teaches_nothing_and_counts(tiny: str, make_trajectory: Make) -> None:
    t = trainer(tiny, objective="preference", passes=2)
    before = checksum_of(t.tensors())
    told = t.train([make_trajectory(0, 0, 1.0), make_trajectory(1, 0, 1.0)])
    assert (told["pairs"], told["grad_norm"], told["success"], t.step) == (0, 0, 1, 1)
    assert checksum_of(t.tensors()) == before
    told = t.train([make_trajectory(0, 0, 1.0), make_trajectory(1, 0, 0.0)])
    assert told["pairs"] == 1 and told["grad_norm"] > 0 and checksum_of(t.tensors()) != before


def test_distillation_moves_the_policy_to_its_teacher(tiny: str, batch: list[Trajectory]) -> None:
    t, teacher = trainer(tiny, advantage="distill", lr=1e-2), trainer(tiny)
    batch = [x for x in batch if len(list(x.samples())) == 1]
    with torch.no_grad():
        for p in teacher.model.parameters():
            p.mul_(3)
    graded = {x.id: logprobs_of(teacher, x, 1.0) for x in batch}

    def gap() -> float:
        return float(np.mean([np.abs(logprobs_of(t, x, 1.0) - graded[x.id]).mean() for x in batch]))

    before = gap()
    for _ in range(15):
        t.train(batch, teacher=graded)
    assert gap() < before / 2
    with pytest.raises(BatchError, match="teacher has no logprobs for trajectory 'e0000'"):
        t.train(batch)
    with pytest.raises(BatchError, match="policy token"):
        t.train(batch, teacher={x.id: [0.0] for x in batch})


def test_a_teacher_that_is_named_grades_as_its_logprobs_given_with_the_batch_do(
    tiny: str, batch: list[Trajectory], tmp_path: Path
) -> None:
    teacher = trainer(tiny)
    with torch.no_grad():
        for p in teacher.model.parameters():
            p.mul_(3)
    teacher.save(tmp_path / "teacher")
    graded = {x.id: logprobs_of(teacher, x, x.sampling["temperature"]) for x in batch if len(list(x.samples())) == 1}
    batch = [x for x in batch if x.id in graded]
    named = trainer(tiny, advantage="distill", teacher=str(tmp_path / "teacher" / "model")).train(batch)
    given = trainer(tiny, advantage="distill").train(batch, teacher=graded)
    ungraded = trainer(tiny, advantage="grpo").train(batch)
    for name in ("loss", "grad_norm"):
        assert named[name] == pytest.approx(given[name], rel=1e-3) != pytest.approx(ungraded[name], rel=1e-3)


def test_a_teacher_of_another_vocabulary_is_refused(tiny: str, tmp_path: Path) -> None:
    other = make_tiny(tmp_path / "other", ["other words that make another vocabulary"], hidden=16, layers=1, heads=2, mlp=24)
    with pytest.raises(ConfigError, match="same tokenizer"):
        trainer(tiny, advantage="distill", teacher=str(other))


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


# -- checkpoints -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("saved_at", [0, 2])
def test_preferences_go_on_from_a_checkpoint_against_the_same_reference(
    tiny: str, make_trajectory: Make, tmp_path: Path, saved_at: int
) -> None:
    batches = [[make_trajectory(10 * k, k, 1.0), make_trajectory(10 * k + 1, k, 0.0)] for k in range(4)]
    for pair in batches:
        pair[1].task = pair[0].task
    whole = trainer(tiny, objective="preference", lr=1e-2)
    for step, found in enumerate(batches):
        if step == saved_at:
            whole.save(tmp_path / "saved")
        whole.train(found)
    resumed = trainer(tiny, objective="preference", lr=1e-2)
    resumed.restore(tmp_path / "saved")
    for found in batches[saved_at:]:
        resumed.train(found)
    assert checksum_of(resumed.tensors()) == checksum_of(whole.tensors())


def test_a_reference_is_reset_on_time_also_in_a_step_without_pairs(tiny: str, make_trajectory: Make) -> None:
    good, bad = make_trajectory(0, 0, 1.0), make_trajectory(1, 0, 0.0)
    t = trainer(tiny, objective="preference", lr=1e-2, kl={"reset_every": 2})
    for found in ([good, bad], [good, bad], [good]):
        t.train(found)
    assert t.train([good, bad])["dpo_margin"] == 0  # the policy of step 2 is the reference, and nothing was learned since


def test_rolling_back_to_before_the_first_step_takes_the_reference_along(
    tiny: str, batch: list[Trajectory], tmp_path: Path
) -> None:
    t = trainer(tiny, lr=1e-2, kl={"coef": 0.1, "reset_every": 2})
    t.save(tmp_path / "start")
    for _ in range(3):
        t.train(batch)
    t.roll_back(tmp_path / "start")
    assert t.step == 3 and t.train(batch)["kl_reference"] == pytest.approx(0, abs=1e-9)


def test_another_decay_or_momentum_takes_effect_after_a_checkpoint(tiny: str, batch: list[Trajectory], tmp_path: Path) -> None:
    first = trainer(tiny)
    first.train(batch)
    first.save(tmp_path / "saved")
    sums = set()
    for config in ({}, {"weight_decay": 0.5}, {"betas": (0.5, 0.5)}):
        t = trainer(tiny, **config)
        t.restore(tmp_path / "saved")
        t.train(batch)
        sums.add(checksum_of(t.tensors()))
    assert len(sums) == 3


WITH_A_CRITIC = {"advantage": "gae", "critic": {"kind": "separate"}, "kl": {"coef": 0.1}}
WITH_RESETS = {"kl": {"coef": 0.1, "reset_every": 2, "reset_optimiser": True}}


WAYS = [(FULL, {}), (BF16, {}), (LORA, {})]
WAYS += [(kind, config) for kind in (FULL, BF16) for config in (WITH_A_CRITIC, WITH_RESETS)]


@pytest.mark.parametrize(("kind", "config"), WAYS)
def test_going_on_from_a_checkpoint_is_bit_identical(
    tiny: str, batch: list[Trajectory], scratch: Path, kind: str, config: Any
) -> None:
    whole = trainer(tiny, kind, passes=2, minibatches=2, warmup_steps=5, **config)
    whole.cold_start(*demonstrations(), steps=2, batch=4)
    for step in range(4):
        if step == 2:
            whole.save(scratch / "step-2")
        last = whole.train(batch)

    again = trainer(tiny, kind, passes=2, minibatches=2, warmup_steps=5, **config)
    again.restore(scratch / "step-2")
    assert again.step == 2
    for _ in range(2):
        metrics = again.train(batch)
    assert checksum_of(again.tensors()) == checksum_of(whole.tensors())
    del last["learn_s"], metrics["learn_s"]
    assert metrics == last


def test_a_checkpoint_loads_as_a_model_folder(tiny: str, batch: list[Trajectory], scratch: Path) -> None:
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from troupe.learner.model import tensors_of

    t = trainer(tiny)
    t.train(batch)
    t.save(scratch / "c")
    assert checksum_of(tensors_of(AutoModelForCausalLM.from_pretrained(scratch / "c/model"))) == checksum_of(t.tensors())
    assert AutoTokenizer.from_pretrained(scratch / "c/model")("go down")["input_ids"]


def test_a_checkpoint_with_lora_is_a_peft_adapter(tiny: str, batch: list[Trajectory], scratch: Path) -> None:
    from peft import PeftModel

    from troupe.learner.model import tensors_of

    t = trainer(tiny, LORA)
    t.train(batch)
    t.save(scratch / "c")
    loaded = PeftModel.from_pretrained(load(ModelConfig(path=tiny), seed=0), scratch / "c/model")
    assert checksum_of(tensors_of(loaded)) == checksum_of(t.tensors())


def test_a_checkpoint_is_complete_or_absent(
    tiny: str, batch: list[Trajectory], scratch: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    t = trainer(tiny)
    t.save(scratch / "c")
    first = json.loads((scratch / "c/trainer.json").read_text())
    t.train(batch)

    def full(*_: Any) -> None:
        raise OSError("No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr("torch.save", full)
        for name in ("c", "d"):
            with pytest.raises(OSError, match="No space"):
                t.save(scratch / name)
    assert [p.name for p in scratch.iterdir()] == ["c"]
    assert json.loads((scratch / "c/trainer.json").read_text()) == first
    t.save(scratch / "c")
    assert [p.name for p in scratch.iterdir()] == ["c"]
    assert json.loads((scratch / "c/trainer.json").read_text())["step"] == 1


def test_a_wrong_checkpoint_is_refused(tiny: str, batch: list[Trajectory], scratch: Path) -> None:
    t = trainer(tiny)
    t.save(scratch / "c")
    with pytest.raises(CheckpointError, match="no complete checkpoint"):
        trainer(tiny).restore(scratch / "none")
    with pytest.raises(CheckpointError, match="seed"):
        trainer(tiny, seed=1).restore(scratch / "c")
    with pytest.raises(CheckpointError, match=r"without model\.lora"):
        trainer(tiny, LORA).restore(scratch / "c")
    trainer(tiny, LORA).save(scratch / "l")
    with pytest.raises(CheckpointError, match="LoRA adapter"):
        trainer(tiny).restore(scratch / "l")
    weights = scratch / "c/model/model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    with pytest.raises(CheckpointError, match="damaged"):
        trainer(tiny).restore(scratch / "c")
