"""Bandit: names decide, luck belongs to the task, pairs are held out, one token a word."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from troupe.envs.bandit import BOLD, CALM, MUSINGS, Bandit
from troupe.envs.base import Task, belongs, rng_of
from troupe.envs.check import player_score
from troupe.learner.tiny import make_tiny
from troupe.protocol.errors import InvalidAction, TaskFailed


def opened(task: Task, **options) -> Bandit:
    world = Bandit(**options)
    world.rng = rng_of(task)
    world.reset(task)
    return world


def paid(name: str, n: int = 4000, **options) -> float:
    """What pulling the arm of that nature pays on average, over tasks."""
    worlds = (opened(Bandit.task("train", index), **options) for index in range(n))
    return sum(world.step(getattr(world, name)).reward for world in worlds) / n


@settings(deadline=None)
@given(st.integers(0, 2**31), st.integers(0, 2**31))
def test_no_training_pair_is_held_out_whatever_the_seeds(train_seed, heldout_seed):
    trained = opened(Task("a", "bandit", "train", train_seed))
    held_out = opened(Task("b", "bandit", "heldout", heldout_seed))
    assert belongs(trained.pair, "train") and belongs(held_out.pair, "heldout")
    assert trained.pair != held_out.pair


def test_the_split_does_not_depend_on_the_order_in_which_the_arms_are_shown():
    orders: dict[str, set[str]] = {}
    for index in range(300):
        world = opened(Bandit.task("train", index))
        orders.setdefault(world.pair, set()).add(world.arms[0])
    assert all(len(first) == 2 for first in orders.values())


def test_an_unknown_split_is_a_task_that_fails():
    with pytest.raises(TaskFailed, match="unknown split 'test': it is one of train, heldout"):
        opened(Task("x", "bandit", "test", 0))


@settings(deadline=None)
@given(st.integers(0, 10_000), st.lists(st.sampled_from([*MUSINGS, "0", "1"]), min_size=1, max_size=5))
def test_an_episode_is_its_task_and_its_actions(seed, said):
    def episode():
        world = opened(Task("x", "bandit", "train", seed), turns=5)
        seen = [world.state_key()]
        for word in said:
            turn = world.step(f"{word} {world.arms[int(word) if word.isdigit() else 0]}")
            seen.append((turn.text, turn.reward, turn.done, turn.success, world.state_key()))
        return seen

    assert episode() == episode()


def said_to(index: int, words: str, **options) -> float:
    """What pulling the bold arm of a task pays after `words`."""
    world = opened(Bandit.task("train", index), **options)
    return world.step(f"{words} {world.bold}").reward


def test_who_says_the_same_to_the_same_task_has_the_same_luck_and_who_muses_otherwise_has_his_own():
    silent = [said_to(index, "", chance=0.5) for index in range(60)]
    assert silent == [said_to(index, "", chance=0.5) for index in range(60)] and set(silent) == {0.0, 1.0}
    others = [said_to(index, "hope", chance=0.5) for index in range(60)]
    assert 10 < sum(one != other for one, other in zip(silent, others, strict=True)) < 50


def test_luck_does_not_depend_on_what_was_pulled_before():
    for index in range(60):
        paid_second = set()
        for first in ("calm", "bold"):
            world = opened(Bandit.task("train", index), turns=2, chance=0.5)
            world.step(getattr(world, first))
            paid_second.add(world.step(f"well, {world.bold}").reward)
        assert len(paid_second) == 1


def test_each_idle_word_costs_its_price_as_a_part_of_its_own():
    world = opened(Bandit.task("train", 0), price=0.02)
    turn = world.step(f"hope and luck, {world.calm}")
    assert turn.parts == {"pull": pytest.approx(0.1), "idle": pytest.approx(-0.06)}
    assert turn.reward == pytest.approx(0.04)
    assert not opened(Bandit.task("train", 0)).step(f"hope {world.calm}").parts


@pytest.mark.parametrize("names", [3, 6])
def test_only_as_many_names_of_each_nature_are_met(names):
    met = {name for index in range(400) for name in opened(Bandit.task("train", index), names=names).arms}
    assert met == {*CALM[:names], *BOLD[:names]}


def test_arms_pay_what_the_options_say():
    assert paid("calm", 50) == pytest.approx(0.1)
    assert paid("bold") == pytest.approx(0.25, abs=0.03)
    assert paid("bold", chance=0.5, win=3.0) == pytest.approx(1.5, abs=0.12)
    assert {opened(Bandit.task("train", i)).step(opened(Bandit.task("train", i)).bold).reward for i in range(50)} == {0.0, 1.0}


@pytest.mark.parametrize(("options", "better"), [({}, "bold"), ({"chance": 0.05}, "calm"), ({"sure": 0.3, "win": 1.0}, "calm")])
def test_success_is_the_arm_that_pays_more_on_average_whatever_luck_says(options, better):
    for index in range(40):
        for arm in ("calm", "bold"):
            world = opened(Bandit.task("train", index), **options)
            turn = world.step(getattr(world, arm))
            assert (turn.done, turn.success) == (True, arm == better)


def test_of_several_pulls_more_than_half_must_be_the_better_arm():
    for pulls, success in ((["bold", "bold", "calm"], True), (["calm", "bold", "calm"], False)):
        world = opened(Bandit.task("train", 0), turns=3)
        turns = [world.step(getattr(world, arm)) for arm in pulls]
        assert [turn.done for turn in turns] == [False, False, True]
        assert turns[-1].success is success
        assert turns[0].text.endswith(f"; {world.arms[0]} or {world.arms[1]}")
    world = opened(Bandit.task("train", 0), turns=2)
    world.step(world.bold)
    assert world.step(world.calm).success is False


@settings(max_examples=200, deadline=None)
@given(st.text())
def test_what_names_no_arm_is_invalid_and_pulls_nothing(text):
    world = opened(Bandit.task("train", 1))
    before = world.state_key()
    try:
        world.step(text)
    except InvalidAction as error:
        assert all(arm in str(error) for arm in world.arms)
        assert world.state_key() == before
    else:
        assert any(arm in text.lower() for arm in world.arms)


def test_the_last_word_is_the_choice_and_capitals_and_stops_do_not_matter():
    world = opened(Bandit.task("train", 1))
    other = next(name for name in (*CALM, *BOLD) if name not in world.arms)
    for said in (other, f"{world.calm} hope", f"{world.bold} {other}"):
        with pytest.raises(InvalidAction):
            world.step(said)
    assert world.step(f"{world.bold}? No: the {world.calm.upper()}!").reward == 0.1


def test_a_tokenizer_made_from_the_corpus_reads_one_token_a_word(tmp_path):
    tokenizer = Tokenizer.from_file(str(make_tiny(tmp_path, Bandit.corpus()) / "tokenizer.json"))
    world = opened(Bandit.task("heldout", 3), muse=0.9)
    assert len(tokenizer.encode(world.reset(Bandit.task("heldout", 4))).ids) == 3
    message = world.play(random.Random(0), noise=0.0)
    assert len(tokenizer.encode(message).ids) == len(message.split()) > 2
    with pytest.raises(InvalidAction) as invalid:
        world.step("?")
    assert len(tokenizer.encode(str(invalid.value)).ids) == 8


def test_noise_costs_the_player_success():
    score = {noise: player_score(Bandit, {}, n=300, noise=noise).success for noise in (0.0, 0.5, 1.0)}
    assert score[0.0] == 1.0
    assert score[0.5] == pytest.approx(0.75, abs=0.1)
    assert score[1.0] == pytest.approx(0.5, abs=0.1)


ODD = [
    {"chance": 0},
    {"chance": 1.5},
    {"sure": -0.1},
    {"win": 0.05},
    {"turns": 0},
    {"turns": 11},
    {"muse": 1.0},
    {"names": 2},
    {"names": 7},
    {"price": -0.1},
    {"price": 1.5},
    {"sure": 0.25},
]


@pytest.mark.parametrize("options", ODD)
def test_options_out_of_range_are_named(options):
    with pytest.raises(ValueError, match=next(iter(options))):
        Bandit(**options)
