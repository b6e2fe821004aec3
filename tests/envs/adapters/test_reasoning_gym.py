"""Datasets of reasoning-gym: their own scores, splits by content, and nothing that an agent writes is run."""

from __future__ import annotations

import asyncio
import re
from pathlib import Path
from typing import Any

import pytest

from troupe.envs import registry
from troupe.envs.base import Turn
from troupe.envs.check import check, player_score
from troupe.envs.drive import Driver
from troupe.protocol.errors import ConfigError, EnvironmentFailed, InvalidAction

pytest.importorskip("reasoning_gym", reason="needs reasoning-gym: pip install 'troupe-rl[reasoning-gym]'")

from troupe.envs.adapters import reasoning_gym as adapter

NAMES = ("basic_arithmetic", "leg_counting", "n_queens", "spell_backward")


def begun(name: str, split: str = "train", index: int = 0, **options: Any) -> Any:
    world = registry.make(registry.find(f"reasoning_gym:{name}"), options)
    task = world.task(split, index)
    world._begin(task)
    world.reset(task)
    return world


@pytest.mark.parametrize("name", NAMES)
def test_a_dataset_is_a_good_world_whose_player_knows_the_answers(name: str) -> None:
    world = registry.find(f"reasoning_gym:{name}")
    assert world.name == f"reasoning_gym:{name}"
    report = check(world, episodes=6)
    assert report.ok, str(report)
    assert player_score(world, n=20).success == 1.0
    assert player_score(world, n=20, noise=1.0).success < 0.5


def test_options_are_those_of_the_dataset() -> None:
    assert (
        len(begun("basic_arithmetic", min_terms=6, max_terms=6, operators=["+"])._entry["metadata"]["expression"].split()) >= 11
    )
    for options, reason in (
        ({"min_term": 2}, "no option 'min_term'. Did you mean 'min_terms'?"),
        ({"min_terms": -1}, "min_terms must be positive"),
        ({"size": 1}, "size is 1; it is 2 to"),
    ):
        with pytest.raises(ConfigError) as error:
            begun("basic_arithmetic", **options)
        assert reason in str(error.value) and "\n" not in str(error.value)


@pytest.mark.parametrize(("name", "reason"), [("basic_arithmetik", "Did you mean 'basic_arithmetic'?"), ("", "It has")])
def test_a_wrong_name_is_one_line(name: str, reason: str) -> None:
    with pytest.raises(ConfigError) as error:
        registry.find(f"reasoning_gym:{name}")
    assert reason in str(error.value) and "\n" not in str(error.value)


def test_no_question_is_in_both_splits_even_of_a_dataset_that_repeats_itself() -> None:
    asked = {
        split: {
            begun("basic_arithmetic", split, i, min_terms=2, max_terms=2, min_digits=1, max_digits=1)._entry["question"]
            for i in range(40)
        }
        for split in ("train", "heldout")
    }
    assert asked["train"] and asked["heldout"] and not asked["train"] & asked["heldout"]


def test_the_score_is_the_datasets_and_only_1_is_a_success() -> None:
    world = begun("basic_arithmetic")
    answer = world._entry["answer"]
    assert world.step(f"<answer>0</answer> no: <answer> {answer} </answer>").success
    partly = world.step(f"<answer>it is {answer}</answer>")
    assert 0.0 < partly.reward < 1.0 and partly.done and not partly.success
    assert partly.reward == world._data.score_answer(f"it is {answer}", world._entry)
    with pytest.raises(InvalidAction):
        world.step(f"it is {answer}")


@pytest.mark.parametrize(
    ("name", "answer"),
    [
        ("countdown", "__import__('os').system('touch {file}')"),
        ("countdown", "9**9**9**9"),
        ("countdown", "99999999!"),
        ("simple_integration", "open('{file}', 'w')"),
        ("n_queens", "[open('{file}', 'w')]"),
        ("string_insertion", "[x for x in [open('{file}', 'w')]]"),
        ("string_insertion", "['A'] * 10**12"),
        ("polynomial_multiplication", "().__class__"),
        ("intermediate_integration", "Integral(x**2, x)"),  # the dataset would take the question for its answer
    ],
)
def test_nothing_that_an_agent_writes_is_run(name: str, answer: str, tmp_path: Path) -> None:
    file = tmp_path / "owned"
    with pytest.raises(InvalidAction):
        begun(name).step(f"<answer>{answer.replace('{file}', str(file))}</answer>")
    assert not file.exists()


@pytest.mark.parametrize("name", sorted(adapter.ARITHMETIC | adapter.DATA))
def test_what_is_refused_is_never_a_right_answer(name: str) -> None:
    assert player_score(registry.find(f"reasoning_gym:{name}"), n=4).success == 1.0


def test_every_dataset_that_evaluates_answers_is_known() -> None:
    """Modules of the package in which an answer reaches `eval`, `exec` or `parse_expr`."""
    import reasoning_gym
    from reasoning_gym.factory import DATASETS

    evaluates = re.compile(r"(eval|exec|parse_expr|sympify)\((answer|full_code)")
    root = Path(str(reasoning_gym.__file__)).parent
    found = {
        str(path.relative_to(root.parent).with_suffix("")).replace("/", ".")
        for path in root.rglob("*.py")
        if evaluates.search(path.read_text())
    }
    known = {DATASETS[name][0].__module__ for name in adapter.ARITHMETIC | adapter.DATA | adapter.CODE}
    assert found == known


def test_a_dataset_that_runs_its_own_code_has_to_be_trusted() -> None:
    with pytest.raises(ConfigError, match="trusted = true"):
        begun("codeio")


def test_an_answer_that_breaks_the_scorer_is_invalid_and_a_scorer_that_breaks_is_no_zero(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(InvalidAction, match="cannot be read"):
        begun("prime_factorization").step("<answer>two and three</answer>")

    def away(answer: str, entry: dict[str, Any]) -> float:
        raise RuntimeError("away")

    world = begun("prime_factorization")
    monkeypatch.setattr(world._data, "score_answer", away)
    with pytest.raises(EnvironmentFailed, match="cannot score its own answer"):
        world.step("<answer>2 × 3</answer>")


def test_worlds_of_one_process_do_not_disturb_each_other() -> None:
    """pool_matrix draws from numpy's global chance."""

    async def one(index: int) -> tuple[str, Turn]:
        driver = Driver(registry.make(registry.find("reasoning_gym:pool_matrix"), {}))
        question = await driver.reset(driver.world.task("train", index))
        turn = await driver.step(str(driver.play(driver.world.rng, 0.0)))
        await driver.close()
        return question, turn

    async def all_at_once() -> list[tuple[str, Turn]]:
        return await asyncio.gather(*(one(index) for index in range(16)))

    async def one_by_one() -> list[tuple[str, Turn]]:
        return [await one(index) for index in range(16)]

    assert asyncio.run(all_at_once()) == asyncio.run(one_by_one())
