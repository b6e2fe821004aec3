"""Recipes: what is wrong with one is said with its line and the nearest valid name; what is right reads back the same."""

import tomllib
from pathlib import Path

import pytest

from troupe.actors.host import WallClock
from troupe.actors.ledger import Ledger
from troupe.actors.settings import RunConfig
from troupe.cluster import config as recipes
from troupe.cluster import launch
from troupe.protocol.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.toml"))

RECIPE = """\
# a recipe
seed = 7

[env]
name = "guess"
options = { high = 10 }

[learner]
lr = 1e-4
passes = 2
"""


@pytest.fixture
def recipe(tmp_path):
    def write(text=RECIPE, name="mine.toml"):
        path = tmp_path / name
        path.write_text(text)
        return str(path)

    return write


def error_of(*args):
    with pytest.raises(ConfigError) as caught:
        recipes.read(*args)
    message = str(caught.value)
    assert "\n" not in message
    return message


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_every_recipe_of_the_house_loads(path):
    assert recipes.read(str(path)).name == path.stem


def test_there_are_recipes():
    assert {"frozen_lake", "smollm2_guess"} <= {path.stem for path in RECIPES}


def test_an_unknown_key_is_named_with_its_line_and_the_nearest_key(recipe):
    path = recipe(RECIPE + 'advantge = "grpo"\n')
    assert error_of(path) == f"{path} line 11: unknown key 'learner.advantge'. Did you mean 'learner.advantage'?"


@pytest.mark.parametrize(
    ("key", "hint"),
    [
        ("generator.foo", ""),
        ("generator.max_cached_tokens", ""),
        ("learner.group_size", " Did you mean 'rollout.group_size'?"),
        ("generator.thread", " Did you mean 'generator.threads'?"),
        ("rolout.group_size", " Did you mean 'rollout'?"),
    ],
)
def test_no_key_is_offered_that_nobody_meant(recipe, key, hint):
    with pytest.raises(ConfigError, match=r"unknown key") as refused:
        recipes.read(recipe(RECIPE), [f"{key}=1"])
    assert str(refused.value).endswith(f"'.{hint}")


def test_a_number_that_is_given_at_a_resume_counts_though_the_run_was_scaled(tmp_path):
    ledger = Ledger(str(tmp_path), WallClock())
    launch._ask(tmp_path, {"generator": 4})
    assert ledger.wanted() == {}, "it was never scaled: the recipe says it"
    ledger.note("scale", wanted={"env": 2, "generator": 3})
    launch._ask(tmp_path, {"generator": 1})
    assert ledger.wanted() == {"env": 2, "generator": 1}


def test_an_unknown_section_is_named_with_its_line(recipe):
    path = recipe(RECIPE + "\n[lerner]\nlr = 1\n")
    assert error_of(path) == f"{path} line 12: unknown key 'lerner'. Did you mean 'learner'?"


def test_a_wrong_type_is_named_with_its_line_and_value(recipe):
    path = recipe(RECIPE.replace("passes = 2", 'passes = "two"'))
    message = error_of(path)
    assert message.startswith(f"{path} line 10: 'learner.passes' = 'two': ") and "integer" in message


STAGES = """
[[learner.stages]]
from_step = 1
[learner.stages.reward_parts]
outcome = 0.0

[[learner.stages]]
from_step = 5
reward_parts = { format = 0.0 }
"""


@pytest.mark.parametrize(
    ("old", "new", "line", "reason"),
    [
        (
            "from_step = 1",
            "from_stp = 1",
            13,
            "unknown key 'learner.stages.0.from_stp'. Did you mean 'learner.stages",
        ),
        ("from_step = 5", "from_step = 0", 18, "'learner.stages.1.from_step' = 0: Input should be"),
        ("outcome = 0.0", "outcome = 'no'", 15, "'learner.stages.0.reward_parts.outcome' = 'no': Input should be"),
        ("format = 0.0", "format = 'no'", 19, "'learner.stages.1.reward_parts.format' = 'no': Input should be"),
        ("from_step = 1", "from_step = 7", 12, "the stages begin at 7, 5: let each begin after the one before it"),
    ],
)
def test_what_is_wrong_in_one_of_several_tables_is_named_with_its_line(recipe, old, new, line, reason):
    path = recipe(RECIPE + STAGES.replace(old, new))
    assert error_of(path).startswith(f"{path} line {line}: ") and reason in error_of(path)


def test_a_value_out_of_range_is_named_with_its_line(recipe):
    path = recipe(RECIPE.replace("lr = 1e-4", "lr = 0"))
    assert error_of(path).startswith(f"{path} line 9: 'learner.lr' = 0: ")


def test_invalid_toml_is_named_with_its_line(recipe):
    path = recipe(RECIPE + "lr = = 3\n")
    message = error_of(path)
    assert message.startswith(f"{path}: not valid TOML: ") and "line 11" in message


def test_a_missing_recipe_is_answered_with_the_nearest_file(recipe):
    path = recipe()
    typo = path.replace("mine.toml", "mien.tmol")
    assert error_of(typo) == f"No recipe '{typo}'. Did you mean '{path}'?"


def test_an_override_wins_and_an_empty_one_restores_the_default(recipe):
    path = recipe()
    config = recipes.read(path, ["learner.lr=0.5", "env.name=echo", "env.options.high=12", "seed=", "learner.passes="])
    assert (config.learner.lr, config.env.name, config.env.options) == (0.5, "echo", {"high": 12})
    assert (config.seed, config.learner.passes) == (RunConfig().seed, RunConfig().learner.passes)


@pytest.mark.parametrize(
    ("override", "reason"),
    [
        ("learner.lr", "--set 'learner.lr': write it as section.key=value"),
        ("=3", "--set '=3': write it as section.key=value"),
        ("seed.x=3", "--set 'seed.x=3': 'seed' is a value, not a section"),
        ("learner.advantge=grpo", "unknown key 'learner.advantge'. Did you mean 'learner.advantage'?"),
        ("steps=many", "'steps' = 'many': Input should be a valid integer"),
    ],
)
def test_a_bad_override_says_what_is_wrong_with_it(recipe, override, reason):
    assert reason in error_of(recipe(), [override])


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_an_explained_recipe_reads_back_the_same(path):
    config = recipes.read(
        str(path), ["model.lora={rank = 4, targets = ['q', 'v']}", "env.options={a = {b = [1, 2]}, 'c d' = '# no comment'}"]
    )
    assert RunConfig.model_validate(tomllib.loads(recipes.explained(config))) == config
    plain = recipes.read(
        str(path), ["model.lora=", "env.options=", "learner.stages=[{from_step = 2, reward_parts = {a = 0.5}}]"]
    )
    assert RunConfig.model_validate(tomllib.loads(recipes.explained(plain))) == plain


def test_every_key_is_explained_by_its_description():
    text = recipes.explained(RunConfig())

    def check(model):
        for name, field in model.model_fields.items():
            kind = field.annotation
            if hasattr(kind, "model_fields"):
                check(kind)
            else:
                assert field.description, f"{model.__name__}.{name}"
                assert field.description.rstrip(".")[1:] in text, f"{model.__name__}.{name}"

    check(RunConfig)


def test_the_adapters_keys_are_checked_too(recipe):
    assert "unknown key 'model.lora.rnk'. Did you mean 'model.lora.rank'?" in error_of(recipe(), ["model.lora.rnk=4"])


def test_a_run_folders_recipe_reads_back_the_same(recipe, tmp_path):
    config = recipes.read(recipe(), ["model.lora.rank=4", "learner.betas=[0.8, 0.9]"])
    recipes.write(config, tmp_path / "config.toml")
    assert recipes.read(str(tmp_path / "config.toml")) == config


def test_a_world_alone_makes_a_recipe_named_after_it(tmp_path):
    world = tmp_path / "mine.py"
    world.write_text(
        "from troupe.envs.base import TextWorld\n"
        "class HideAndSeek(TextWorld):\n"
        "    def reset(self, task): return 'hello'\n"
        "    def step(self, text): return 'no'\n"
    )
    config = recipes.from_flags(f"{world}:HideAndSeek", [])
    assert (config.name, config.env.name) == ("hide_and_seek", f"{world}:HideAndSeek")
    assert config.cold_start.steps == 0  # it has no player to learn from
    assert recipes.from_flags("guess", []).cold_start.steps > 0


def test_a_world_with_a_model_trains_an_adapter_unless_told_otherwise():
    config = recipes.from_flags("guess", ["model.path='some/folder'", "model.lora.rank=4", "steps=3"])
    assert config.cold_start.steps == 0
    assert (config.steps, config.model.path) == (3, "some/folder")
    assert config.model_settings("some/folder").lora.rank == 4
    assert recipes.from_flags("guess", ["model.path=x", "model.lora="]).model.lora is None


def test_flags_for_a_world_that_is_not_there_name_the_nearest():
    with pytest.raises(ConfigError, match="Did you mean 'guess'"):
        recipes.from_flags("gues", [])
    with pytest.raises(ConfigError, match="the command line: unknown key 'stepz'"):
        recipes.from_flags("guess", ["stepz=3"])


def test_a_recipe_without_a_world_is_refused(tmp_path):
    file = tmp_path / "empty.toml"
    file.write_text("")
    with pytest.raises(ConfigError, match="names no world"):
        recipes.read(str(file))


def test_a_wrong_override_is_named_not_the_line_that_it_overrides(tmp_path):
    file = tmp_path / "r.toml"
    file.write_text('steps = 3\n[env]\nname = "echo"\n')
    with pytest.raises(ConfigError, match=r"with steps=many: 'steps' = 'many'"):
        recipes.read(str(file), ["steps=many"])


@pytest.mark.parametrize(
    ("given", "mode", "most"),
    [
        ("", "async", 1),
        ("max_staleness = 0", "sync", 0),
        ("max_staleness = 4", "async", 4),
        ('mode = "sync"', "sync", 0),
        ('mode = "one-step-off"', "one-step-off", 1),
        ('mode = "async"', "async", 1),
        ('mode = "async"\nmax_staleness = 3', "async", 3),
    ],
)
def test_of_mode_and_staleness_the_one_that_is_left_out_follows_from_the_other(recipe, tmp_path, given, mode, most):
    config = recipes.read(recipe(RECIPE + f"\n[rollout]\n{given}\n"))
    assert (config.rollout.mode, config.rollout.max_staleness) == (mode, most)
    recipes.write(config, tmp_path / "config.toml")
    assert recipes.read(str(tmp_path / "config.toml")).rollout == config.rollout


@pytest.mark.parametrize(
    ("mode", "most", "reason"),
    [
        ("sync", 2, "mode = 'sync' means max_staleness = 0, not 2: leave it out (or set it to 0), or set mode = 'async'"),
        (
            "one-step-off",
            0,
            "mode = 'one-step-off' means max_staleness = 1, not 0: leave it out (or set it to 1), or set mode = 'sync'",
        ),
        ("async", 0, "mode = 'async' with max_staleness = 0 is step by step: set mode = 'sync', or allow 1 or more"),
    ],
)
def test_a_mode_that_contradicts_the_staleness_is_refused_with_the_fix(recipe, mode, most, reason):
    path = recipe(RECIPE + f'\n[rollout]\nmode = "{mode}"\nmax_staleness = {most}\n')
    assert error_of(path) == f"{path} line 12: [rollout]: {reason}"


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ("[rollout]\ntemperature = 1e-300", "temperature"),
        ("[rollout]\ntemperature = inf", "temperature"),
        ("[eval]\ntemperature = 0.001", "a temperature is 0 (greedy), or 0.01 or more"),
        ("[eval]\ntemperature = inf", "temperature"),
    ],
)
def test_temperatures_that_cannot_be_divided_by_are_refused(recipe, given, says):
    assert says in error_of(recipe(RECIPE + f"\n{given}\n"))


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("rollout.max_staleness", "true", "true is no number"),
        ("rollout.context_window", "true", "true is no number"),
        ("learner.lr", "true", "true is no number"),
        ("eval.trials", "true", "true is no number"),
        ("health.min_rows", "true", "true is no number"),
        ("generator.replicas", "100000", "less than or equal to 1024"),
        ("learner.ranks", "100000", "less than or equal to 1024"),
        ("env.actors", "100000", "less than or equal to 10000"),
        *(
            (f"{section}.device", name, f"'{name}' is no device")
            for section in ("generator", "learner")
            for name in ("gpu", "meta")
        ),
        ("generator.device", "auto", "'auto' is no device"),
        ("generator.device", "cuda:x", "'cuda:x' is no device"),
    ],
)
def test_numbers_and_devices_that_mean_nothing_are_refused(recipe, key, value, says):
    section, _, name = key.partition(".")
    written = value if value == "true" or value.isdecimal() else f'"{value}"'
    path = recipe(f'[env]\nname = "frozen_lake"\n{"" if section == "env" else f"[{section}]"}\n{name} = {written}\n')
    error = error_of(path)
    assert says in error and name in error and "\n" not in error


def test_devices_that_machines_have_are_taken(recipe):
    path = recipe('[env]\nname = "frozen_lake"\n[generator]\ndevice = "cuda:7"\n[learner]\ndevice = "auto"\n')
    assert recipes.read(path).generator.device == "cuda:7"
