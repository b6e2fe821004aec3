"""What each estimator gives, against numbers worked out by hand, and what a user's own may do."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from troupe.learner.advantages import Group, find, traits
from troupe.learner.config import LearnerConfig
from troupe.learner.whiten import whiten
from troupe.protocol.errors import ConfigError
from troupe.protocol.trajectory import ENVIRONMENT, POLICY, Call, Fork, Node, Step, Task, Trajectory

BY_RETURN = ("grpo", "rloo", "dr_grpo", "grpo_loo", "starpo", "reinforce_pp_baseline", "aspo", "pass_at_k")
COMPARING = (*BY_RETURN, "gigpo", "turn_level", "treepo")
ALL = (*COMPARING, "reinforce", "reinforce_pp", "gae", "bi_level_gae", "distill")


def group(*returns: float, **config: Any) -> Group:
    """Returns alone: one turn of one token each."""
    return Group([episode([r], [1]) for r in returns], np.array(returns, np.float64), LearnerConfig(**config))


def episode(
    rewards: list[float],
    lengths: list[int],
    *,
    keys: list[str] | None = None,
    outcome: float = 0.0,
    said: int = 0,
    name: str = "e",
) -> Trajectory:
    """Turns of `lengths` sampled tokens, each after an observation. `said`: makes the first turn's tokens differ."""
    nodes = []
    for turn, n in enumerate(lengths):
        for provenance, k in ((ENVIRONMENT, 2), (POLICY, n)):
            tokens = np.full(k, 10 + turn + (said if provenance == POLICY else 0), np.int32)
            sampled = k if provenance == POLICY else 0
            nodes.append(
                Node(
                    len(nodes) - 1, "x", turn, tokens, np.full(k, provenance, np.uint8),
                    np.zeros(sampled, np.float32), np.zeros(sampled, np.int32),
                )
            )  # fmt: skip
    steps = [Step(reward=r, state_key=k) for r, k in zip(rewards, keys or [""] * len(rewards), strict=True)]
    reward = float(sum(rewards)) + outcome
    task = Task("t", "w", "train", 0)
    return Trajectory("e", 0, 0, 0, "train", 1, task, "completed", "terminated", nodes, steps, reward)


def of(trajectories: list[Trajectory], values: list[list[float]] | None = None, **config: Any) -> Group:
    arrays = [np.array(v, np.float64) for v in values or []]
    return Group(trajectories, np.array([t.reward for t in trajectories]), LearnerConfig(**config), values=arrays)


def tokens(name: str, made: Group) -> list[list[float]]:
    """The estimator's answer, always as one list of numbers per trajectory."""
    answers = find(name)(made)
    assert len(answers) == len(made.trajectories)
    return [
        np.broadcast_to(np.asarray(a), (t.policy_tokens,)).tolist() for a, t in zip(answers, made.trajectories, strict=True)
    ]


def close(found: list[list[float]], expected: list[list[float]]) -> None:
    assert [len(f) for f in found] == [len(e) for e in expected]
    for f, e in zip(found, expected, strict=True):
        assert f == pytest.approx(e, abs=2e-5)


# -- of returns ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("grpo", [1.5, -0.5, -0.5, -0.5]),
        ("starpo", [1.5, -0.5, -0.5, -0.5]),
        ("dr_grpo", [0.75, -0.25, -0.25, -0.25]),
        ("rloo", [1.0, -1 / 3, -1 / 3, -1 / 3]),
        ("grpo_loo", [2.0, -2 / 3, -2 / 3, -2 / 3]),
        ("reinforce_pp_baseline", [0.75, -0.25, -0.25, -0.25]),
    ],
)
def test_one_success_in_four(name: str, expected: list[float]) -> None:
    np.testing.assert_allclose(find(name)(group(1, 0, 0, 0)), expected, rtol=1e-5)


def test_grpo_with_population_deviation() -> None:
    expected = [math.sqrt(3), *[-1 / math.sqrt(3)] * 3]
    np.testing.assert_allclose(find("grpo")(group(1, 0, 0, 0, sigma="population")), expected, rtol=1e-5)


def test_rloo_compares_with_the_mean_of_the_others() -> None:
    np.testing.assert_allclose(find("rloo")(group(1, 0, 0.5)), [1 - 0.25, 0 - 0.75, 0.5 - 0.5], atol=1e-12)


def test_seven_equal_and_one_zero() -> None:
    """μ = .30625, σ² = .35² / 8 (unbiased), so σ = .123744: the one gets −.30625/σ, the others .04375/σ."""
    expected = [0.04375 / 0.1237437] * 7 + [-0.30625 / 0.1237437]
    np.testing.assert_allclose(find("grpo")(group(*[0.35] * 7, 0.0)), expected, rtol=1e-4)


@pytest.mark.parametrize("name", COMPARING)
def test_a_singleton_gets_zero(name: str) -> None:
    assert tokens(name, group(5.0)) == [[0.0]]


@pytest.mark.parametrize("name", COMPARING)
@settings(deadline=None, max_examples=30)
@given(value=st.floats(-1e6, 1e6), n=st.integers(1, 40))
def test_an_all_equal_group_gets_exactly_zero(name: str, value: float, n: int) -> None:
    assert tokens(name, group(*[value] * n, pass_k=1)) == [[0.0]] * n


rewards = st.lists(st.floats(-10, 10), min_size=1, max_size=3)


@pytest.mark.parametrize("name", ALL)
@settings(deadline=None, max_examples=30)
@given(all_rewards=st.lists(rewards, min_size=1, max_size=5), data=st.data())
def test_advantages_are_finite_and_follow_their_trajectories(name: str, all_rewards: list[list[float]], data: Any) -> None:
    made = [episode(r, [1 + i % 2] * len(r), keys=["s"] * len(r), said=i % 2) for i, r in enumerate(all_rewards)]
    order = data.draw(st.permutations(range(len(made))))
    values = {id(t): np.linspace(-1, 1, t.policy_tokens) * (i + 1) for i, t in enumerate(made)}

    def answers(ts: list[Trajectory]) -> list[list[float]]:
        v = [values[id(t)] for t in ts]
        config = LearnerConfig(pass_k=1, gamma=0.9, turn_gamma=0.9, gae_lambda=0.8)
        return tokens(name, Group(ts, np.array([t.reward for t in ts]), config, values=v, old=v, teacher=v))

    plain = answers(made)
    assert all(math.isfinite(x) for row in plain for x in row)
    for row, i in zip(answers([made[i] for i in order]), order, strict=True):
        assert row == pytest.approx(plain[i], rel=1e-6, abs=1e-6)


@pytest.mark.parametrize(
    ("name", "power"), [("grpo", 0), ("grpo_loo", 0), ("dr_grpo", 1), ("rloo", 1), ("reinforce", 1), ("treepo", 0)]
)
def test_the_scale_of_rewards_counts_only_without_division_by_sigma(name: str, power: int) -> None:
    one, ten = (tokens(name, group(*(scale * r for r in (1, 0, 0.5)))) for scale in (1, 10))
    close(ten, [[x * 10**power for x in row] for row in one])


def test_pass_at_k_by_counting_subsets() -> None:
    """n = 4, one success, k = 2: 3 of 6 pairs solve it. R̄ = ½, σ = ½; success (1 − ½)/½ = 1; each failure is in three
    pairs, of which one has the success: (⅓ − ½)/½ = −⅓."""
    np.testing.assert_allclose(find("pass_at_k")(group(1, 0, 0, 0, pass_k=2)), [1, -1 / 3, -1 / 3, -1 / 3])
    np.testing.assert_allclose(find("pass_at_k")(group(1, 0, 0, 0, pass_k=1)), [math.sqrt(3), *[-1 / math.sqrt(3)] * 3])
    assert list(find("pass_at_k")(group(1, 1, 1, 0, pass_k=2))) == [0] * 4  # any two solve it
    assert list(find("pass_at_k")(group(1, 0, 0))) == [0] * 3  # no four of three


def test_aspo_favours_early_calls_among_successes() -> None:
    """Two successes call a tool after 2 and 6 of 8 tokens: p − mean p = ∓2, mean L = 8, δ = −2: ±½, within .7·A."""
    early, late = episode([0, 1], [2, 6]), episode([0, 1], [6, 2])
    idle, failed = episode([0, 1], [4, 4]), episode([0, 0], [1, 7])
    for t in (early, late, failed):
        t.steps[0].calls = [Call("c", "run", "{}", "ok")]
    plain = find("grpo")(of([early, late, idle, failed]))
    np.testing.assert_allclose(plain, [0.5, 0.5, 0.5, -1.5], rtol=1e-5)
    shaped = find("aspo")(of([early, late, idle, failed]))
    np.testing.assert_allclose(shaped, [0.5 + 0.35, 0.5 - 0.35, 0.5, -1.5], rtol=1e-5)  # bound by .7 · .5
    mild = find("aspo")(of([early, late, idle, failed], aspo_delta=-0.4))
    np.testing.assert_allclose(mild, [0.5 + 0.1, 0.5 - 0.1, 0.5, -1.5], rtol=1e-5)


def test_what_succeeded_is_not_judged_by_shaped_returns() -> None:
    """A divergence in the reward leaves failures a positive residue, and a success a negative one; neither is a verdict."""
    made = of([episode([0, r], [2, 6]) for r in (1, 0, 0, 0)], pass_k=2, aspo_delta=-0.4)
    for t in made.trajectories:
        t.steps[0].calls = [Call("c", "run", "{}", "ok")]
    plain = find("grpo")(made)
    made.returns = np.array([-0.01, 0.001, 0.002, -0.01])
    np.testing.assert_allclose(find("pass_at_k")(made), [1, -1 / 3, -1 / 3, -1 / 3])
    made.returns = np.array([1.0, 0.001, 0.002, -0.01])
    made.trajectories[1].nodes = episode([0, 0], [6, 2]).nodes  # it called late, were it a success
    np.testing.assert_allclose(find("aspo")(made), find("grpo")(made), atol=1e-12)
    assert plain[0] > 0


# -- of turns --------------------------------------------------------------------------------------------------------


def test_turns_are_credited_with_what_follows_them() -> None:
    """Step rewards 0, 1, 0 and a final 1 over turns of 2, 1 and 3 tokens: r = 0, 1, 1."""
    one = of([episode([0, 1, 0], [2, 1, 3], outcome=1.0)])
    close(tokens("reinforce", one), [[2, 2, 2, 1, 1, 1]])
    half = of([episode([0, 1, 0], [2, 1, 3], outcome=1.0)], turn_gamma=0.5)
    close(tokens("reinforce", half), [[0.75, 0.75, 1.5, 1, 1, 1]])


def test_reinforce_pp_carries_returns_across_observations() -> None:
    """Token rewards 0 0 | 1 | 0 0 1; with γ = ½ from the end: 1, ½, ¼, 1⅛, 9/16, 9/32."""
    one = of([episode([0, 1, 0], [2, 1, 3], outcome=1.0)], gamma=0.5)
    close(tokens("reinforce_pp", one), [[9 / 32, 9 / 16, 9 / 8, 1 / 4, 1 / 2, 1]])
    assert traits(find("reinforce_pp")).whiten and traits(find("reinforce_pp_baseline")).whiten


def test_parts_of_a_reward_can_be_weighed_anew() -> None:
    t = episode([1.5, 0.25], [1, 1])
    t.steps[0].parts, t.steps[1].parts = {"format": 0.5, "outcome": 1.0}, {"format": 0.25}
    close(tokens("reinforce", of([t])), [[1.75, 0.25]])
    close(tokens("reinforce", of([t], reward_parts={"format": 0.0})), [[1.0, 0.0]])
    close(tokens("reinforce", of([t], reward_parts={"format": 2.0, "outcome": 3.0})), [[4.0 + 0.5, 0.5]])


def test_turn_level_compares_the_same_turn() -> None:
    """Returns to go (1, 0), (3, 2), (2): turn 0 has μ = 2, σ = 1; turn 1 has 0 and 2, μ = 1, σ = √2."""
    made = of([episode([1, 0], [1, 1]), episode([1, 2], [2, 1]), episode([2], [1])])
    half = 1 / math.sqrt(2)
    close(tokens("turn_level", made), [[-1, -half], [1, 1, half], [0]])
    alone = of([episode([1, 5], [1, 1]), episode([2], [1])])
    assert tokens("turn_level", alone)[0][1] == 0  # nobody else got there


def test_gigpo_adds_what_an_action_did_from_the_same_state() -> None:
    """Two episodes from s: one goes to u and earns 1, the other meets s again and earns nothing.

    A_E = ±½. Steps from s: returns to go 1, 0, 0 with γ = 1, μ = ⅓: +⅔, −⅓, −⅓. The step from u is alone: 0.
    """
    made = [episode([0, 1], [2, 1], keys=["s", "u"]), episode([0, 0], [1, 1], keys=["s", "s"])]
    close(tokens("gigpo", of(made)), [[0.5 + 2 / 3] * 2 + [0.5], [-0.5 - 1 / 3] * 2])
    close(tokens("gigpo", of(made, gigpo_weight=0.5)), [[0.5 + 1 / 3] * 2 + [0.5], [-0.5 - 1 / 6] * 2])
    # γ = ½ halves the first step's return to go: ½, 0, 0, μ = 1/6
    close(tokens("gigpo", of(made, turn_gamma=0.5)), [[0.5 + 1 / 3] * 2 + [0.5], [-0.5 - 1 / 6] * 2])
    # with σ: A_E = ±½/√½, A_S = (⅔, −⅓, −⅓)/√⅓
    e, s = 0.5 / math.sqrt(0.5), 1 / 3 / math.sqrt(1 / 3)
    close(tokens("gigpo", of(made, gigpo_norm="mean-std")), [[e + 2 * s] * 2 + [e], [-e - s] * 2])


def test_gigpo_never_groups_across_tasks_or_unknown_states() -> None:
    one, other = episode([1], [1], keys=["s"]), episode([0], [1], keys=["s"])
    other.task = Task("another", "w", "train", 0)
    close(tokens("gigpo", of([one, other])), [[0.5], [-0.5]])
    close(tokens("gigpo", of([episode([1], [1]), episode([0], [1])])), [[0.5], [-0.5]])


def test_treepo_compares_within_the_trajectories_that_share_a_prefix() -> None:
    """R = 1, 0 share their first turn; R = 1, 1 share another. σ = ½ (unbiased over 1, 0, 1, 1), μ = ¾.

    The second turns are compared with all and with their pair: ½(¼ + ½) and ½(−¾ − ½); ½(¼ + 0). First turns: with all.
    """
    made = [episode([0, r], [1, 1], said=said) for r, said in ((1, 0), (0, 0), (1, 5), (1, 5))]
    sigma = 0.5
    first, second = [0.25, -0.75, 0.25, 0.25], [0.375, -0.625, 0.125, 0.125]
    close(tokens("treepo", of(made)), [[a / sigma, b / sigma] for a, b in zip(first, second, strict=True)])
    apart = [episode([0, r], [1, 1], said=i) for i, r in enumerate((1, 0, 0, 0))]
    close(tokens("treepo", of(apart)), [[1.5] * 2] + [[-0.5] * 2] * 3)  # GRPO


@pytest.mark.parametrize("told", [False, True])
def test_treepo_compares_with_those_that_ended_at_the_shared_turn(told: bool) -> None:
    """R = 1, 0, 0 share their first turn, where the third ends; R = 1 is apart. μ = ½, σ = 1/√3, μ of the three ⅓.

    Second turns: ½(½ + ⅔) and ½(−½ − ⅓). It is the same whether the third was told something afterwards.
    """
    made = [episode([0, 1], [1, 1]), episode([0, 0], [1, 1]), episode([0], [1]), episode([0, 1], [1, 1], said=5)]
    if told:
        made[2].nodes.append(episode([0, 0], [1, 1]).nodes[2])
    sigma = 1 / math.sqrt(3)
    expected = [[0.5, 7 / 12], [-0.5, -5 / 12], [-0.5], [0.5, 0.5]]
    close(tokens("treepo", of(made)), [[a / sigma for a in row] for row in expected])


@pytest.mark.parametrize("order", [[0, 1, 2, 3], [3, 2, 1, 0], [2, 0, 3, 1]])
def test_treepo_compares_within_a_turn_that_was_forked(order: list[int]) -> None:
    """R = 1, 0, 1, 0; one turn of three tokens. The second forked from the first after one token, the third from the second
    after two; the fourth begins at the start. μ = ½, σ = 1/√3; μ of the first three ⅔, of the second and third ½.
    """
    said = [[1, 2, 3], [1, 4, 5], [1, 4, 6], [7, 7, 7]]
    made = [episode([r], [3]) for r in (1, 0, 1, 0)]
    for t, ids, forked in zip(made, said, (0, 1, 2, 0), strict=True):
        t.nodes[1].tokens[:] = ids
        t.fork = Fork("e", 0, forked) if forked else None
    expected = [[1 / 2, 5 / 12, 5 / 12], [-1 / 2, -7 / 12, -5 / 9], [1 / 2, 5 / 12, 4 / 9], [-1 / 2] * 3]
    answers = tokens("treepo", of([made[i] for i in order]))
    close(answers, [[a * math.sqrt(3) for a in expected[i]] for i in order])
    for t in made:
        t.fork = None  # then these are four turns that differ
    close(tokens("treepo", of(made)), [[a * math.sqrt(3)] * 3 for a in (0.5, -0.5, 0.5, -0.5)])


def test_treepo_knows_a_fork_in_a_later_turn_and_a_sibling_that_said_no_more() -> None:
    """R = 1, 0, 0. The second forked in the second turn, after the one token that is all that the third said there.

    μ = ⅓, σ = 1/√3; all share the first turn (μ = ⅓) and that token (μ = ⅓).
    """
    made = [episode([0, 1], [2, 2]), episode([0, 0], [2, 2]), episode([0, 0], [2, 1])]
    made[1].nodes[3].tokens[1] = 99
    made[1].fork = Fork("e", 0, 3)
    close(tokens("treepo", of(made)), [[2 / math.sqrt(3)] * 4, [-1 / math.sqrt(3)] * 4, [-1 / math.sqrt(3)] * 3])
    made.append(episode([0, 1], [2, 2], said=5))  # apart: μ of all ½, of the three ⅓
    sigma = 1 / math.sqrt(3)
    first, second = [0.5, 0.5, (0.5 + 2 / 3) / 2, (0.5 + 2 / 3 + 2 / 3) / 3], [-0.5, -0.5, -5 / 12, -7 / 18]
    answers = tokens("treepo", of(made))
    close(answers[:3], [[a / sigma for a in row] for row in (first, second, second[:3])])


# -- of values -------------------------------------------------------------------------------------------------------


def test_gae_skips_observations() -> None:
    """Rewards 0, 0 | 1 with values .5, .25, 2 | γ = .9, λ = .8.

    δ₃ = 1 − 2 = −1; δ₂ = .9·2 − .25 = 1.55, A₂ = 1.55 − .72 = .83; δ₁ = .9·.25 − .5 = −.275, A₁ = −.275 + .72·.83 = .3226.
    """
    made = of([episode([0, 1], [2, 1])], [[0.5, 0.25, 2.0]], gamma=0.9, gae_lambda=0.8)
    close(tokens("gae", made), [[0.3226, 0.83, -1.0]])
    plain = of([episode([0, 1], [2, 1])], [[0.5, 0.25, 2.0]])
    close(tokens("gae", plain), [[0.5, 0.75, -1.0]])  # γ = λ = 1: reward to go minus V


def test_bi_level_gae_first_between_turns_then_inside() -> None:
    """Turns of 2 and 1 tokens, values .5, .25 | 2, rewards 0 and 1; γ_H = .9, λ_H = .5, γ = .8, λ = .5.

    Turns: A₂ = 1 − 2 = −1; δ₁ = 0 + .9·2 − .25 = 1.55, A₁ = 1.55 − .45 = 1.1. Paid at the ends: 1.35 and 1.
    Inside turn 1: last δ = 1.35 − .25 = 1.1; before it δ = .8·.25 − .5 = −.3, A = −.3 + .4·1.1 = .14.
    """
    made = of(
        [episode([0, 1], [2, 1])], [[0.5, 0.25, 2.0]], turn_gamma=0.9, turn_lambda=0.5, gamma=0.8, gae_lambda=0.5
    )  # fmt: skip
    close(tokens("bi_level_gae", made), [[0.14, 1.1, -1.0]])


def test_distillation_grades_each_token_by_the_teacher() -> None:
    made = of([episode([7], [2])])
    made.old, made.teacher = [np.array([-1.0, -2.0])], [np.array([-0.5, -4.0])]
    close(tokens("distill", made), [[0.5, -2.0]])


def test_a_divergence_in_the_reward_is_part_of_tokens_turns_and_returns() -> None:
    made = of([episode([0, 1], [2, 1])])
    made.penalties = [np.array([-0.1, -0.2, -0.3])]
    close([made.token_rewards(0).tolist()], [[-0.1, -0.2, 0.7]])
    close([made.turn_rewards(0).tolist()], [[-0.3, 0.7]])


def test_whitening_has_mean_zero_and_deviation_one_and_never_blows_up_residue() -> None:
    np.testing.assert_allclose(whiten(np.array([1.0, 2.0, 3.0])), [-1, 0, 1], rtol=1e-6)
    assert list(whiten(np.full(7, 0.1))) == [0] * 7
    assert list(whiten(np.array([3.0]))) == [0]
    assert len(whiten(np.zeros(0))) == 0


# -- a user's own ----------------------------------------------------------------------------------------------------


def test_an_unknown_name_gets_the_nearest_one() -> None:
    with pytest.raises(ConfigError, match=r"unknown advantage 'grop'\. Did you mean 'grpo'\?"):
        find("grop")


def test_an_estimator_can_live_in_a_users_file(tmp_path: Path) -> None:
    file = tmp_path / "mine_advantage.py"
    file.write_text(
        "from troupe.learner import advantage\n"
        "@advantage('mine_from_a_file')\n"
        "def mine(group):\n    return [2 * r for r in group.returns]\n"
    )
    assert find(f"{file}:mine")(group(1, 2)) == [2, 4]
    assert find("mine_from_a_file")(group(3)) == [6]
    taken = tmp_path / "taken_advantage.py"
    taken.write_text("from troupe.learner import advantage\n@advantage('grpo')\ndef grpo(group):\n    return []\n")
    with pytest.raises(ConfigError, match="'grpo' is registered already"):
        find(f"{taken}:grpo")
    file.write_text("def mine(group):\n    return []\n")
    with pytest.raises(ConfigError, match=r"has no function 'mien'\. Did you mean 'mine'\?"):
        find(f"{file}:mien")


def test_a_missing_or_broken_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no file"):
        find(f"{tmp_path}/none.py:f")
    (tmp_path / "broken_advantage.py").write_text("1 / 0")
    with pytest.raises(ConfigError, match="ZeroDivisionError"):
        find(f"{tmp_path}/broken_advantage.py:f")
