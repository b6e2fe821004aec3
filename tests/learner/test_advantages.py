"""What each estimator gives, against the definitions, and what a user's own may do."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from troupe.learner.advantages import Group, find
from troupe.protocol.errors import ConfigError

ALL = ("grpo", "rloo", "dr_grpo")


def group(*returns: float) -> Group:
    return Group([], np.array(returns, np.float64))


def test_grpo_divides_by_the_unbiased_deviation() -> None:
    np.testing.assert_allclose(find("grpo")(group(1, 0, 0, 0)), [1.5, -0.5, -0.5, -0.5], rtol=1e-5)


def test_rloo_compares_with_the_mean_of_the_others() -> None:
    np.testing.assert_allclose(find("rloo")(group(1, 0, 0.5)), [1 - 0.25, 0 - 0.75, 0.5 - 0.5], atol=1e-12)


def test_dr_grpo_only_centres() -> None:
    np.testing.assert_allclose(find("dr_grpo")(group(1, 0, 0, 0)), [0.75, -0.25, -0.25, -0.25])


@pytest.mark.parametrize("name", ALL)
def test_a_singleton_gets_zero(name: str) -> None:
    assert list(find(name)(group(5.0))) == [0.0]


@pytest.mark.parametrize("name", ALL)
@settings(deadline=None)
@given(value=st.floats(-1e6, 1e6), n=st.integers(1, 40))
def test_an_all_equal_group_gets_exactly_zero(name: str, value: float, n: int) -> None:
    assert (np.asarray(find(name)(group(*[value] * n))) == 0).all()


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
