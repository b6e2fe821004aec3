"""A world as a `gymnasium.Env` is the world itself: same observations, same rewards, same end."""

import asyncio
import random

import pytest

np = pytest.importorskip("numpy")
gymnasium = pytest.importorskip("gymnasium", reason="gymnasium is not installed: pip install 'troupe-rl[baseline]'")

from gymnasium.utils.env_checker import check_env  # noqa: E402

from troupe.envs import registry, tensors  # noqa: E402
from troupe.envs.base import TextWorld, Turn, rng_of  # noqa: E402
from troupe.envs.drive import Driver  # noqa: E402
from troupe.envs.tensors import TensorEnv  # noqa: E402
from troupe.protocol.errors import ConfigError, EnvironmentFailed, InvalidAction  # noqa: E402

WITH_TENSORS = ["bandit", "frozen_lake", "guess", "sokoban"]


class Counts(TextWorld):
    """Says how often it was told "up"; may break; cannot read "hm"."""

    max_turns = 3
    actions = ("up", "hm", "break")

    async def reset(self, task):
        self.up = 0
        return "go"

    def step(self, text):
        if text == "hm":
            raise InvalidAction("say up")
        if text == "break":
            raise RuntimeError("broken")
        self.up += 1
        return Turn(str(self.up), reward=0.5, success=True)

    def encode(self):
        return [self.up]


@pytest.fixture
def counts(monkeypatch):
    monkeypatch.setattr(registry, "find", lambda name: Counts)
    env = TensorEnv("counts")
    yield env
    env.close()


def test_the_worlds_with_a_tensor_form_are_known_and_others_are_refused_with_their_names():
    assert tensors.names() == WITH_TENSORS
    with pytest.raises(ConfigError, match=r"'search' has no tensor form.*bandit, frozen_lake, guess, sokoban"):
        TensorEnv("search")


@pytest.mark.parametrize("name", WITH_TENSORS)
def test_gymnasiums_own_checker_takes_it(name):
    env = TensorEnv(name)
    check_env(env, skip_render_check=True)
    env.close()


@pytest.mark.parametrize("name", WITH_TENSORS)
def test_it_steps_the_world_itself_for_the_same_rewards(name):
    env, world = TensorEnv(name), registry.make(registry.find(name), {})
    rng = random.Random(0)
    for index in range(5):
        task = type(world).task("heldout", index)
        world.rng = rng_of(task)
        world.reset(task)
        seen, info = env.reset(options={"split": "heldout", "index": index})
        assert info == {"task": task.id} and env.observation_space.contains(seen)
        for turn in range(world.max_turns):
            assert seen.tolist() == pytest.approx(np.asarray(world.encode(), np.float32).tolist())
            action = rng.randrange(len(world.actions))
            told = world.step(world.actions[action])
            seen, reward, done, truncated, info = env.step(action)
            assert (reward, done) == (told.reward, told.done) and truncated == (not done and turn + 1 == world.max_turns)
            if done or truncated:
                assert info["success"] == bool(told.done and told.success)
                break
    env.close()


@pytest.mark.parametrize("name", WITH_TENSORS)
def test_states_that_the_agent_can_tell_apart_are_encoded_apart(name):
    """What the text says, the array says: no two observations of a new episode share an array."""

    async def openings():
        driver = Driver(registry.make(registry.find(name), {}))
        found = {}
        for index in range(60):
            text = await driver.reset(driver.world.task("train", index))
            found.setdefault(text, set()).add(tuple(driver.world.encode()))
        await driver.close()
        return found

    found = asyncio.run(openings())
    assert all(len(arrays) == 1 for arrays in found.values())
    assert len({array for arrays in found.values() for array in arrays}) == len(found)


def test_training_tasks_are_drawn_by_the_seed_and_never_held_out():
    env = TensorEnv("frozen_lake")
    drawn = [env.reset(seed=7)[1]["task"], *(env.reset()[1]["task"] for _ in range(5))]
    again = [env.reset(seed=7)[1]["task"], *(env.reset()[1]["task"] for _ in range(5))]
    env.close()
    assert drawn == again and len(set(drawn)) == 6 and all(task.startswith("train/") for task in drawn)


def test_an_action_that_cannot_be_read_costs_a_turn_and_nothing_else(counts):
    counts.reset(seed=0)
    seen, reward, done, truncated, info = counts.step(1)
    assert (seen.tolist(), reward, done, truncated, info) == ([0.0], 0.0, False, False, {"invalid": "say up"})


def test_an_episode_without_an_end_is_cut_and_is_no_success(counts):
    counts.reset(seed=0)
    steps = [counts.step(0) for _ in range(3)]
    assert [step[3] for step in steps] == [False, False, True] and steps[-1][4] == {"success": False}


def test_a_world_that_breaks_is_an_error_and_no_reward(counts):
    counts.reset(seed=0)
    with pytest.raises(EnvironmentFailed, match=r"Counts\.step .* raised RuntimeError: broken"):
        counts.step(2)
