"""`troupe env`: look at worlds, be the agent yourself, check that a world keeps its promises."""

from __future__ import annotations

import asyncio
import inspect
import json
import sys
from collections.abc import Callable, Coroutine
from typing import Annotated, Any

import typer

app = typer.Typer(no_args_is_help=True, help="Worlds: list and show them, play one yourself, check one.")

NAME = Annotated[
    str, typer.Argument(help="world: a name, module:Class or file.py:Class, for example guess", show_default=False)
]
OPTION = Annotated[list[str] | None, typer.Option("--option", help="option of the world: key=value (repeatable)")]


@app.command("list")
def list_() -> None:
    """Shows the worlds that are known by name."""
    from rich.console import Console
    from rich.table import Table

    from troupe.envs import registry
    from troupe.protocol.errors import ConfigError

    table = Table("world", "what it is", box=None, pad_edge=False)
    for name in registry.names():
        try:
            about = _about(registry.find(name))
        except ConfigError as error:  # somebody's package; it must not hide the others
            about = f"broken: {error}"
        table.add_row(name, about)
    Console(highlight=False, emoji=False).print(table)


@app.command()
def show(name: NAME, option: OPTION = None) -> None:
    """Shows a world: what it is, its options, what the agent is told, how a first episode opens."""
    from troupe.envs import registry

    world = registry.find(name)
    options = options_of(option)
    driver = _driver(world, options)
    opening, tools = asyncio.run(_opening(driver, world.task("train", 0)))
    print(f"{world.name or world.__name__}   {inspect.getmodule(world).__name__}:{world.__qualname__}")  # type: ignore[union-attr]
    print(f"\n{inspect.getdoc(world) or 'It has no docstring.'}")
    takes = [
        f"  {p.name} = {options.get(p.name, p.default)!r}"
        for p in list(inspect.signature(world.__init__).parameters.values())[1:]
        if p.kind in (p.KEYWORD_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]
    print("\noptions\n" + ("\n".join(takes) or "  none"))
    print(f"\nat most {world.max_turns} turns")
    print("\nwhat the agent is told first\n" + _indented(world.system or "(no system prompt)"))
    if tools:
        print("\ntools of the first training task\n" + _indented("\n".join(map(_tool, tools))))
    print("\nthe first training task opens with\n" + _indented(opening))


@app.command()
def play(
    name: NAME,
    seed: Annotated[int, typer.Option(min=0, help="number of the task")] = 0,
    split: Annotated[str, typer.Option(help="train or heldout")] = "train",
    option: OPTION = None,
) -> None:
    """Lets you be the agent. In a world with tools, NAME {"argument": value} calls one.

    /state shows what the world knows and the agent does not; Ctrl-D or Ctrl-C leaves.
    """
    from troupe.envs import registry
    from troupe.envs.base import SPLITS
    from troupe.protocol.errors import ConfigError, nearest

    if split not in SPLITS:
        raise ConfigError(f"no split '{split}': it is one of {', '.join(SPLITS)}.{nearest(split, SPLITS)}")
    world = registry.find(name)
    driver = _driver(world, options_of(option))
    with asyncio.Runner() as runner:  # the keyboard is read outside of the loop, whose own Ctrl-C handler would keep it
        try:
            _play(runner.run, driver, world.task(split, seed))
        except (EOFError, KeyboardInterrupt):
            print("\nYou left the game.")
        finally:
            runner.run(driver.close())


@app.command()
def check(
    name: NAME,
    option: OPTION = None,
    episodes: Annotated[int, typer.Option(min=1, help="episodes to play")] = 20,
    timeout: Annotated[float, typer.Option(min=0.01, help="seconds that each call of the world may take")] = 30.0,
    seconds: Annotated[float, typer.Option(min=1, help="about how long all of it may take")] = 120.0,
    json_: Annotated[bool, typer.Option("--json", help="everything, as one JSON object")] = False,
) -> None:
    """Checks a world: reproducible, isolated, tidy, safe against garbage. Exit code 1 if a promise is broken.

    The world runs in a process of its own; what it prints goes to standard error.
    """
    from rich.console import Console

    from troupe.envs.check import examine

    console = Console(stderr=True, highlight=False, emoji=False)
    with console.status("starting") as status:
        report = examine(
            name,
            options_of(option),
            episodes,
            timeout,
            limit_s=seconds,
            import_s=max(30.0, timeout),
            show=lambda promise: status.update(promise),
        )
    if json_:
        print(json.dumps(report.as_json(), indent=1, ensure_ascii=False))
    else:
        _print_report(report)
    if not report.ok:
        raise typer.Exit(1)


@app.command()
def serve(
    name: NAME,
    host: Annotated[str, typer.Option(help="address it listens on; anyone who reaches it may play")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="port; 0: any free one")] = 8000,
    set_: Annotated[list[str] | None, typer.Option("--set", help="option of the world: key=value (repeatable)")] = None,
    sessions: Annotated[int, typer.Option(min=1, help="worlds at the same time, one for each socket")] = 256,
    idle: Annotated[float, typer.Option(min=0.1, help="seconds after which a silent client is sent away")] = 1800.0,
    timeout: Annotated[float, typer.Option(min=0.01, help="seconds that each call of the world may take")] = 30.0,
) -> None:
    """Serves a world as an OpenEnv environment, to any client of OpenEnv, until Ctrl-C.

    troupe env serve guess --set high=50 --port 8000

    With OpenEnv:    GenericEnvClient(base_url="http://127.0.0.1:8000"); reset(seed=7), step({"message": "25"})

    With Troupe:     troupe env play openenv:ws://127.0.0.1:8000, from another venv or another machine
    """
    from troupe.envs import registry
    from troupe.envs.openenv import serve as openenv
    from troupe.envs.tools import ToolWorld

    world = registry.find(name)
    action = '{"tool_name": …, "arguments": {…}}' if issubclass(world, ToolWorld) else '{"message": "…"}'

    def ready(url: str) -> None:
        print(
            f"Serving {name} as an OpenEnv environment at {url} · {sessions} sessions · Ctrl-C to stop\n\n"
            f'  env = openenv.core.GenericEnvClient(base_url="{url}").sync()\n'
            f"  env.reset(seed=0); env.step({action})\n\n"
            f"  troupe env play openenv:{url.replace('http', 'ws', 1)}\n"
        )

    openenv.serve(
        world,
        options_of(set_, "--set"),
        host=host,
        port=port,
        sessions=sessions,
        idle_s=idle,
        step_s=timeout,
        ready=ready,
    )
    print("Stopped.")


# -- helpers ---------------------------------------------------------------------------------------------------------


def _print_report(report: Any) -> None:
    """What failed first at the top."""
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    styles = {"ok": "green", "broken": "bold red", "warning": "yellow", "unknown": "yellow"}
    table = Table("", "promise", "seen", box=None, pad_edge=False)
    for finding in report.sorted:
        table.add_row(Text(finding.status, styles[finding.status]), finding.name, Text(finding.detail))
    console = Console(highlight=False, markup=False, emoji=False)
    console.print(table)
    if report.seconds:
        console.print(f"\n{report.timing}")
    console.print(f"\n{report.verdict}", soft_wrap=True)


def options_of(given: list[str] | None, flag: str = "--option") -> dict[str, Any]:
    """["size=5", "think=none"] as values: TOML, or a bare word."""
    from troupe.protocol.errors import ConfigError
    from troupe.protocol.toml import value_of

    options = {}
    for text in given or []:
        key, equals, value = text.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"{flag} '{text}': write it as key=value")
        options[key.strip()] = value_of(value)
    return options


def _driver(world: Any, options: dict[str, Any]) -> Any:
    from troupe.envs import registry
    from troupe.envs.drive import Driver

    return Driver(registry.make(world, options))


async def _opening(driver: Any, task: Any) -> tuple[str, list[dict[str, Any]]]:
    try:
        return await driver.reset(task), driver.tools()
    finally:
        await driver.close()


def _play(run: Callable[[Coroutine[Any, Any, Any]], Any], driver: Any, task: Any) -> None:
    """One episode with a person as the agent. Raises EOFError or KeyboardInterrupt when they have had enough."""
    from rich.console import Console

    from troupe.protocol.errors import BadArguments, InvalidAction, UnknownTool

    console = Console(highlight=False, markup=False, emoji=False)
    if driver.world.system:
        console.print(driver.world.system + "\n", style="dim")
    opening = run(driver.reset(task))
    if tools := driver.tools():
        console.print("\n".join(map(_tool, tools)), style="dim")
        console.print('Call one with: name {"argument": value}. Anything else that you write is your answer.\n', style="dim")
    console.print(opening)
    score = 0.0
    for turn in range(1, driver.world.max_turns + 1):
        while (said := console.input("> ")).strip() == "/state":
            console.print(json.dumps(run(driver.state()), ensure_ascii=False, indent=1), style="dim")
        try:
            result = run(_act(driver, said))
        except (UnknownTool, BadArguments, InvalidAction) as error:
            kind = {UnknownTool: "Unknown tool", BadArguments: "Bad arguments"}.get(type(error), "Invalid action")
            console.print(f"{kind}: {error}")
            continue
        score += result.reward
        if result.text:
            console.print(result.text)
        _print_reward(console, result)
        if result.done:
            console.print(f"\nThe episode is over: {_verdict(result)}, score {score:g} in {_turns(turn)}.", style="bold")
            return
    result = run(driver.verify())
    if result is not None:
        score += result.reward
        _print_reward(console, result)
    verdict = "no success" if result is None else _verdict(result)
    console.print(f"\nThe {_turns(driver.world.max_turns)} are used up: {verdict}, score {score:g}.", style="bold")


async def _act(driver: Any, said: str) -> Any:
    """What a person wrote, as a tool call if it looks like one."""
    from troupe.envs.base import action_of
    from troupe.protocol.errors import BadArguments

    name, brace, rest = said.partition("{")
    if not brace or not name.strip().isidentifier() or not driver.tools():
        return await driver.step(action_of(said))
    try:
        arguments = json.loads(brace + rest)
    except (ValueError, RecursionError) as error:
        raise BadArguments(f"this is no JSON: {error}") from None
    return await driver.call(name.strip(), arguments)


def _print_reward(console: Any, turn: Any) -> None:
    if turn.reward or turn.parts:
        parts = f" ({', '.join(f'{name} {value:g}' for name, value in turn.parts.items())})" if turn.parts else ""
        console.print(f"reward {turn.reward:g}{parts}", style="green" if turn.reward > 0 else "yellow")


def _verdict(turn: Any) -> str:
    return "success" if (turn.reward > 0 if turn.success is None else turn.success) else "no success"


def _tool(spec: dict[str, Any]) -> str:
    """find_item(name: string): Find the id of an item."""
    parameters = spec["parameters"]
    required = parameters.get("required", ())
    takes = (f"{name}{'' if name in required else '?'}: {_type(s)}" for name, s in parameters.get("properties", {}).items())
    return f"{spec['name']}({', '.join(takes)}): {spec.get('description', '')}"


def _type(schema: dict[str, Any]) -> str:
    if "enum" in schema:
        return " | ".join(json.dumps(value, ensure_ascii=False) for value in schema["enum"])
    if "anyOf" in schema:
        return " | ".join(map(_type, schema["anyOf"]))
    return str(schema.get("type") or schema.get("$ref", "any").rpartition("/")[2])


def _turns(number: int) -> str:
    return "1 turn" if number == 1 else f"{number} turns"


def _about(world: type[Any]) -> str:
    """The first sentence about a world: of its docstring, or of its module's if the class only lists its options."""
    own = inspect.getdoc(world) or ""
    if not own or own.startswith("Options"):
        own = inspect.getdoc(sys.modules[world.__module__]) or ""
    return own.partition("\n")[0]


def _indented(text: str) -> str:
    return "\n".join(f"  {line}" for line in text.splitlines())
