"""What README and docs/ say can be done can be done: their links lead somewhere, their commands are understood.

Commands are parsed as the command line would parse them, recipes and keys included; running them is for the tests of each part.
"""

import re
import shlex
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer

from troupe.actors.settings import RunConfig
from troupe.cluster import cli
from troupe.cluster import commands as registered

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "bench/README.md", *sorted((ROOT / "docs").glob("*.md"))]
page = pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))


@pytest.fixture(scope="session")
def command() -> Any:
    registered.register(cli.app)
    return typer.main.get_command(cli.app)


def blocks(page: Path, language: str = "") -> list[str]:
    """The fenced blocks of a page whose first line names `language`."""
    return re.findall(rf"^```{language}\n(.*?)^```", page.read_text(), re.S | re.M)


def commands(page: Path) -> list[list[str]]:
    """Arguments of each `troupe …` in the fenced blocks without a language; … and [] stand for what may be added."""
    joined = "\n".join(blocks(page)).replace("\\\n", " ")
    lines = re.findall(r"^(?:\.venv/bin/)?troupe (.*?)(?:\s+(?:#|&|\|).*)?$", joined, re.M)
    return [shlex.split(re.sub(r" …|[][]", "", line), comments=True) for line in lines if not line.startswith("·")]


def anchors(page: Path) -> set[str]:
    headings = re.findall(r"^#+ (.+)$", re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M), re.M)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


@page
def test_links_lead_somewhere(page: Path) -> None:
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.S | re.M)
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if not re.match(r"[a-z]+://", target):
            path, _, anchor = target.partition("#")
            there = (page.parent / path).resolve() if path else page
            assert there.exists(), target
            assert not anchor or anchor in anchors(there), target


@page
def test_commands_are_understood(page: Path, command: Any) -> None:
    for args in commands(page):
        understood(command, args)


def understood(command: Any, args: list[str]) -> None:
    """Follows a line down to its command, whose options must be those that are given."""
    context = command.context_class(command, info_name="troupe")
    line = " ".join(args)
    while hasattr(command, "get_command"):
        assert args, f"troupe {line}: it ends before a command"
        found = command.get_command(context, args[0])
        assert found is not None, f"troupe {line}: no command '{args[0]}'"
        command, args = found, args[1:]
        context = command.context_class(command, info_name=command.name, parent=context)
    parser = command.make_parser(context)
    try:
        values, rest, _ = parser.parse_args(list(args))
    except Exception as error:  # of the click that typer brings along
        raise AssertionError(f"troupe {line}: {error}") from error
    assert not rest, f"troupe {line}: nobody takes {rest}"
    given = [value for name in ("set_", "set", "overrides") for value in values.get(name) or ()]
    keys = [value for value in [*given, *args] if re.fullmatch(r"[a-z]\w*(\.\w+)+=.*", str(value))]
    for key in keys:
        assert known(key.partition("=")[0]), f"troupe {line}: no key {key}"


def known(key: str) -> bool:
    """Whether a recipe may have it."""
    section: Any = RunConfig
    *path, last = key.split(".")
    for name in path:
        field = section.model_fields.get(name)
        if field is None:
            return False
        inner = [
            kind for kind in (field.annotation, *getattr(field.annotation, "__args__", ())) if hasattr(kind, "model_fields")
        ]
        if not inner:
            return True  # a world's own options
        section = inner[0]
    return last in section.model_fields


@page
def test_recipes_in_toml_are_toml(page: Path) -> None:
    for block in blocks(page, "toml"):
        tomllib.loads(block)


def test_what_is_not_there_is_found(command: Any) -> None:
    for wrong in (["trian"], ["train", "--grop", "3"], ["train", "x", "--set", "rollout.groupsize=1"]):
        with pytest.raises(AssertionError):
            understood(command, wrong)
