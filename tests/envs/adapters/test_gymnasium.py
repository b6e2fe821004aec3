"""Gymnasium's environments as worlds: actions by name or number, spaces as text, ends told apart, seeds that reproduce."""

import random
from importlib.util import find_spec
from itertools import pairwise

import pytest

pytest.importorskip("gymnasium", reason="the package gymnasium is missing: pip install 'troupe-rl[gymnasium]'")

import gymnasium
import numpy as np
from gymnasium import spaces

from troupe.envs import registry
from troupe.envs.adapters import pictures
from troupe.envs.adapters.gymnasium import wrap
from troupe.envs.adapters.spaces import Named, printer
from troupe.envs.check import check, player_score
from troupe.protocol.errors import ConfigError, EnvironmentFailed, InvalidAction, TaskFailed

needs_atari = pytest.mark.skipif(find_spec("ale_py") is None, reason="ale-py is missing: pip install 'troupe-rl[atari]'")


def opened(name, split="train", index=0, **options):
    kind = registry.find(name) if isinstance(name, str) else name
    world = registry.make(kind, options)
    return world, begun(world, split, index)


def begun(world, split="train", index=0):
    task = type(world).task(split, index)
    world._begin(task)
    return world.reset(task)


class Echoing(gymnasium.Env):
    """Says what it is told; ends by its rules at "end", by its own limit at the third step, and breaks at "break"."""

    observation_space = spaces.Dict({"said": spaces.Text(20), "at": spaces.Discrete(99)})
    action_space = spaces.Text(8, min_length=1)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        self.steps, self.at = 0, int(self.np_random.integers(90))
        return {"said": "hello", "at": self.at}, {}

    def step(self, action):
        if action == "break":
            raise ValueError("a bug of the environment")
        self.steps += 1
        return {"said": action, "at": self.at}, 0.5, action == "end", self.steps == 3, {}


@pytest.mark.parametrize("name", ["FrozenLake-v1", "CliffWalking-v1", "Blackjack-v1", "CartPole-v1", "Taxi-v4"])
def test_the_usual_environments_conform(name):
    report = check(registry.find(f"gymnasium:{name}"), episodes=6)
    assert report.ok, str(report)


def test_actions_are_said_by_name_or_number_and_one_at_a_time():
    lake, _ = opened("gymnasium:FrozenLake-v1", is_slippery=False)
    assert [lake.step(said).text for said in ("I go Right.", "2", "left", "action: 0")] == ["1", "2", "1", "0"]
    for said in ("", "left or right", "4", "-1", "2.5", "righteous", "1 2"):
        with pytest.raises(InvalidAction, match="name one of: left, down, right, up"):
            lake.step(said)


def test_names_win_over_the_numbers_that_they_hold():
    named = Named(spaces.Discrete(3, start=5), ["1", "go 2", "Three"], "x")
    assert [named.read(said) for said in ("1", "go 2", "three", "7")] == [5, 6, 7, 7]
    assert [named.name(action) for action in (5, 7, "go 2")] == ["1", "Three", "go 2"]


def test_a_seed_is_an_episode_and_no_opening_is_in_both_splits():
    world, _ = opened("gymnasium:Blackjack-v1")
    openings = {split: [begun(world, split, i) for i in range(25)] for split in ("train", "heldout")}
    assert openings["train"] == [opened("gymnasium:Blackjack-v1", "train", i)[1] for i in range(25)]
    assert not set(openings["train"]) & set(openings["heldout"])
    assert min(len(set(found)) for found in openings.values()) > 5


def test_an_environment_that_opens_alike_differs_in_luck_only_and_few_openings_need_seeds():
    lake = registry.make(registry.find("gymnasium:FrozenLake-v1"), {})
    assert begun(lake, "train") == begun(lake, "heldout")
    seeds = []
    for index in range(8):
        begun(lake, "train", index)
        seeds.append(lake.seed)
    assert len(set(seeds)) == 8

    class TwoStarts(Echoing):
        observation_space = spaces.Discrete(99)

        def reset(self, *, seed=None, options=None):
            super().reset(seed=seed)
            return 1 + int(self.np_random.integers(2)), {}

    few = wrap(TwoStarts)
    with pytest.raises(TaskFailed, match="only 2 openings: set split_by = 'seed'"):
        for split in ("train", "heldout"):
            opened(few, split)
    opened(few, "heldout", split_by="seed")


def test_terminated_and_truncated_stay_what_they_are():
    world, opening = opened(wrap(Echoing))
    assert opening.startswith("at: ") and "said: hello" in opening and "text of 1 to 8 characters" in opening
    assert world.state_key() == ""
    turns = [world.step(f" {said}\n") for said in ("one", "two", "three")]
    assert [(turn.done, turn.truncated) for turn in turns] == [(False, False), (False, False), (True, True)]
    assert turns[-1].success and turns[-1].reward == 0.5 and "said: three" in turns[-1].text
    begun(world)
    over = world.step("end")
    assert over.done and not over.truncated
    begun(world)
    with pytest.raises(EnvironmentFailed, match="ValueError: a bug of the environment"):
        world.step("break")
    for said in ("", "x" * 9, "\ud800"):
        with pytest.raises(InvalidAction):
            world.step(said)


def test_success_is_the_environments_threshold_or_the_recipes():
    assert player_score(registry.find("gymnasium:FrozenLake-v1"), {"is_slippery": False}, n=3).success == 1.0
    cliff = registry.find("gymnasium:CliffWalking-v1")
    assert player_score(cliff, {}, n=2).success == 0.0
    assert player_score(cliff, {"success_at": -13}, n=2).success == 1.0
    upright = wrap(
        lambda: gymnasium.make("CartPole-v1"), max_turns=500, player=lambda seen, rng: int(seen[2] + 0.5 * seen[3] > 0)
    )
    assert player_score(upright, {}, n=2).success == 1.0
    assert player_score(upright, {}, n=2, noise=1.0).success == 0.0


def test_the_state_key_is_the_observation_where_it_is_discrete():
    lake, _ = opened("gymnasium:FrozenLake-v1", show="ansi", is_slippery=False)
    lake.step("down")
    assert lake.state_key() == "4"
    assert opened("gymnasium:CartPole-v1")[0].state_key() == ""
    jack, opening = opened("gymnasium:Blackjack-v1")
    assert opening.startswith(jack.state_key() + "\n") and len(jack.state_key().split()) == 3


def test_what_is_rendered_may_be_shown_with_its_colours_said():
    lake, opening = opened("gymnasium:FrozenLake-v1", show="both", is_slippery=False)
    assert opening == "0\n[S]FFF\nFHFH\nFFFH\nHFFG\nactions: left, down, right, up"
    assert lake.step("down").text == "4\n  (Down)\nSFFF\n[F]HFH\nFFFH\nHFFG"
    assert pictures.without_escapes("\x1b[35mY\x1b[0m| \x1b[34;1mB\x1b[0m\x1b[K") == "magenta(Y)| blue(B)"


def test_spaces_are_printed_short_or_refused():
    shown = printer(spaces.Box(-1, 1, (3,)), "x")
    assert shown(np.array([0.123456, -0.0, 1.0], np.float32)) == "0.1235 0 1"
    board = spaces.Tuple([spaces.MultiDiscrete([[3, 3], [3, 3]]), spaces.MultiBinary(2)])
    assert printer(board, "x")((np.array([[1, 2], [0, 1]]), np.array([1, 0]))) == "1 2\n0 1\n1 0"
    for space in (spaces.Box(0, 1, (20, 20)), spaces.Box(0, 1, (2, 2, 2)), spaces.Sequence(spaces.Discrete(2))):
        with pytest.raises(ConfigError, match="x: observations of"):
            printer(space, "x")


def test_a_frame_is_a_picture_in_which_a_ball_is_seen():
    frame = np.zeros((64, 80, 3), np.uint8)
    frame[:, :] = (92, 186, 92)
    frame[17:19, 33:35] = (236, 236, 236)
    rows = pictures.drawn(frame).splitlines()
    assert len(rows) == 8 and rows[2] == "....w....." and {row for i, row in enumerate(rows) if i != 2} == {"." * 10}


@pytest.mark.parametrize(
    ("name", "options", "reason"),
    [
        ("FrozenLak-v1", {}, "Did you mean: `FrozenLake`?"),
        ("nowhere_at_all:Lake-v1", {}, "No module named 'nowhere_at_all'"),
        ("", {}, "environment 'gymnasium:': "),
        ("Pendulum-v1", {}, "are no Discrete and no Text"),
        ("FrozenLake-v1", {"is_sliperry": 1}, "unexpected keyword argument 'is_sliperry'"),
        ("FrozenLake-v1", {"show": "anci"}, "show is 'anci'; it is one of observation, ansi, both. Did you mean 'ansi'?"),
        ("FrozenLake-v1", {"actions": ["a", "b"]}, "2 names for 4 actions"),
        ("FrozenLake-v1", {"actions": ["a", "b", "A", "c"]}, "different from each other"),
        ("Blackjack-v1", {"show": "ansi"}, "does not render as text"),
    ],
)
@pytest.mark.filterwarnings("ignore")
def test_what_cannot_be_played_is_one_clear_line(name, options, reason):
    with pytest.raises(ConfigError) as error:
        registry.make(registry.find(f"gymnasium:{name}"), options)
    assert reason in str(error.value) and "\n" not in str(error.value)


def test_one_environment_is_not_shared_by_two_worlds():
    same = Echoing()
    shared = wrap(lambda: same)
    first = registry.make(shared, {})
    with pytest.raises(ConfigError, match="the same environment was given twice"):
        registry.make(shared, {})
    first.close()
    registry.make(shared, {}).close()


def test_the_corpus_has_every_word_that_is_said():
    corpus = " ".join(registry.find("gymnasium:FrozenLake-v1").corpus()).split()
    lake, opening = opened("gymnasium:FrozenLake-v1")
    assert {*opening.split(), *lake.actions.names} <= {*corpus}
    assert lake.play(random.Random(0), 1.0) in lake.actions.names


@needs_atari
def test_an_atari_screen_is_a_coarse_picture_and_its_seed_an_episode():
    played = []
    for _ in range(2):
        world, opening = opened("gymnasium:ALE/Pong-v5")
        played.append([opening, *(world.step(said).text for said in ["fire", *["left"] * 30])])
        world.close()
    assert played[0] == played[1] and len({*played[0]}) > 10
    assert [len(row) for row in played[0][1].splitlines()] == [20] * 26
    assert any(a != b for a, b in pairwise(played[0][20:]))
    assert "actions: noop, fire, right, left, rightfire, leftfire" in played[0][0]
    world, opening = opened("gymnasium:ALE/Pong-v5", obs_type="ram")
    assert len(opening.splitlines()[0].split()) == 128
    world.close()


WRAPPED = """
import gymnasium
from gymnasium import spaces
from troupe.envs.adapters.gymnasium import wrap

class Rooms(gymnasium.Env):
    observation_space = spaces.Text(60, charset="abcdefghijklmnopqrstuvwxyz 0123456789,")
    action_space = spaces.Discrete(2)

    def reset(self, *, seed=None, options=None):
        super().reset(seed=seed)
        return f"room {self.np_random.integers(10**6)} exits " + ",".join(EXITS), {}

    def step(self, action):
        return "out", float(action), True, False, {}

Maze = wrap(lambda: Rooms(), actions=["north", "south"], name="maze")
"""


@pytest.mark.parametrize(
    ("exits", "status"), [('{"north", "south", "east", "west", "up"}', "broken"), ('("north", "south")', "ok")]
)
def test_a_wrapped_world_of_a_file_is_looked_at_in_another_process(tmp_path, exits, status):
    file = tmp_path / "my_env.py"
    file.write_text(WRAPPED.replace("EXITS", exits))
    report = check(registry.find(f"{file}:Maze"), episodes=3, others=1)
    found = {finding.name: finding.status for finding in report.findings}
    assert found["another process gives the same episode"] == status and report.ok == (status == "ok"), str(report)
