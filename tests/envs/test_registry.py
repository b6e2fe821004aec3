"""Worlds by name: four ways to name one, and one clear line for every way to get it wrong."""

import sys

import pytest

from troupe.envs import registry
from troupe.envs.base import TextWorld
from troupe.envs.frozen_lake import FrozenLake
from troupe.protocol.errors import ConfigError

WORLD = """
import dataclasses
from troupe.envs import TextWorld, Turn
from troupe.envs.tools import ToolWorld

class {name}(TextWorld):
    def reset(self, task):
        return "hello"
    def step(self, text):
        return Turn(text, done=True)

class Half(TextWorld):
    def reset(self, task):
        return "hello"

class Unjudged(ToolWorld):
    def reset(self, task):
        return "hello"

class Stranger: ...

def helper(): ...
"""


@pytest.fixture
def file(tmp_path, monkeypatch):
    monkeypatch.setattr(sys, "path", list(sys.path))
    path = tmp_path / "mine.py"
    path.write_text(WORLD.format(name="Mine"))
    yield path
    for name in [name for name, module in sys.modules.items() if str(tmp_path) in str(getattr(module, "__file__", ""))]:
        del sys.modules[name]


@pytest.mark.parametrize("name", sorted(registry.BUILT_IN))
def test_built_in_worlds_are_found_under_their_own_name(name):
    world = registry.find(name)
    assert issubclass(world, TextWorld) and world.name == name and name in registry.names()


def test_a_world_is_found_in_a_module():
    assert registry.find("troupe.envs.frozen_lake:FrozenLake") is FrozenLake


def test_a_world_is_found_in_a_file_and_loaded_once(file, monkeypatch):
    monkeypatch.chdir(file.parent)
    world = registry.find(f"{file}:Mine")
    assert issubclass(world, TextWorld) and world is registry.find("mine.py:Mine") is registry.find("./mine.py:Mine")


def test_a_file_may_import_the_files_beside_it(file):
    (file.parent / "beside_mine.py").write_text("WORD = 'hello'\n")
    file.write_text("from beside_mine import WORD\n" + WORLD.format(name="Mine"))
    assert registry.find(f"{file}:Mine")


def test_an_entry_point_is_found_and_cannot_hide_a_built_in_world(tmp_path, monkeypatch):
    info = tmp_path / "others-1.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: others\nVersion: 1\n")
    (info / "entry_points.txt").write_text("[troupe.envs]\nlake = troupe.envs.frozen_lake:FrozenLake\nguess = nowhere:Guess\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    assert registry.find("lake") is FrozenLake and "lake" in registry.names()
    assert registry.find("guess").__module__ == "troupe.envs.guess"


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("frozen_lak", "No environment 'frozen_lak'. Did you mean 'frozen_lake'?"),
        ("", "No environment ''. Known: bandit, calculator"),
        ("no_such_module:World", "cannot be imported: ModuleNotFoundError: No module named 'no_such_module'"),
        (":World", "cannot be imported: ValueError: Empty module name"),
        ("troupe.envs.frozen_lake:FrozenLak", "has no 'FrozenLak'. Did you mean 'FrozenLake'?"),
        ("troupe.envs.frozen_lake:MOVES", "is a dict, not a class: name one of its worlds"),
        ("{dir}/mine.py:Mien", "has no 'Mien'. Did you mean 'Mine'?"),
        ("{dir}/mine.py:helper", "is a function, not a class"),
        ("{dir}/mine.py:Stranger", "is not a world: derive it from"),
        ("{dir}/mine.py:Half", "is not a whole world: define step"),
        ("{dir}/mine.py:Unjudged", "is not a whole world: define verify"),
        ("{dir}/mine.py", "names no class: name one of its worlds"),
        ("{dir}/mime.py:Mine", "mime.py. Did you mean 'mine.py'?"),
        ("{dir}/nowhere/mine.py:Mine", "no file"),
        ("{dir}/needs.py:Mine", "cannot be imported: ModuleNotFoundError: No module named 'not_installed_here'"),
        ("{dir}/typo.py:Mine", "cannot be imported: SyntaxError: "),
        ("{dir}/exits.py:Mine", "cannot be imported: SystemExit: 3"),
    ],
)
def test_every_wrong_name_is_one_clear_line(file, name, reason):
    (file.parent / "needs.py").write_text("import not_installed_here\n")
    (file.parent / "typo.py").write_text("def (:\n")
    (file.parent / "exits.py").write_text("raise SystemExit(3)\n")
    with pytest.raises(ConfigError) as error:
        registry.find(name.replace("{dir}", str(file.parent)))
    assert reason in str(error.value) and "\n" not in str(error.value)


def test_a_file_that_failed_may_be_mended_and_found(file):
    file.write_text("import not_installed_here\n")
    with pytest.raises(ConfigError):
        registry.find(f"{file}:Mine")
    file.write_text(WORLD.format(name="Mine"))
    assert registry.find(f"{file}:Mine")


def test_options_reach_the_world_and_wrong_ones_are_named():
    world = registry.make(FrozenLake, {"size": 5})
    assert isinstance(world, FrozenLake) and world.size == 5
    for options, reason in [
        ({"sise": 5}, "frozen_lake has no option 'sise'. Did you mean 'size'?"),
        ({"zzz": 5}, "frozen_lake has no option 'zzz'. Known: size"),
        ({"size": 50}, "frozen_lake: size is 50; it is 3 to 10"),
        ({"size": "four"}, "frozen_lake: "),
    ]:
        with pytest.raises(ConfigError) as error:
            registry.make(FrozenLake, options)
        assert reason in str(error.value)
